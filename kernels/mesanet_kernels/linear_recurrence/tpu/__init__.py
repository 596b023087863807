"""Kernels of a linear recurrence with one decay per head, for TPUs (Pallas, Mosaic TPU)."""
