"""The delta rule of DeltaNet and Gated DeltaNet."""
