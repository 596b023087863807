"""Decoding: how tokens are drawn, the engine that draws them, and text from tokens as they arrive."""
