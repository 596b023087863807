"""Gated linear attention, with one decay per head or per key channel."""
