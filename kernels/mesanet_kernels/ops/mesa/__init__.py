"""Mesa: ridge regression over the past, solved for every token (docs/mesa.md)."""
