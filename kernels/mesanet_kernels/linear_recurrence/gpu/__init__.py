"""Kernels of a linear recurrence with one decay per head, for NVIDIA Hopper GPUs (Pallas, Mosaic GPU)."""
