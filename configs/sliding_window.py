"""Sliding-window attention in every block: the SWA baselines of MesaNet (arXiv 2506.05233, section 4).

Sizes: 140m, 440m and 1b with a window, as in 440m-w64 (MesaNet's SWA-64); demo; smoke.
"""

from mesanet_jax.recipes import backbone
from mesanet_jax.schema import Config

WINDOWS = (4, 64, 256, 1024)
SIZES = tuple(f"{size}-w{window}" for size in backbone.PAPER for window in WINDOWS) + ("demo", "smoke")
SMALL_WINDOW = {"demo": "64", "smoke": "16"}
LEARNING_RATE = 1e-3  # MesaNet, appendix G: not searched for in these models


def get_config(size: str = "140m-w1024") -> Config:
    """`size` is one of SIZES; any other window is possible too."""
    name, _, window = size.partition("-w")
    window = window or SMALL_WINDOW.get(name, "")
    if not window.isdigit():
        raise ValueError(f"no window in {size!r}; a window of 64 tokens is written as in 440m-w64")
    config = backbone.backbone("sliding_window", name, ("sliding",))
    config.name = f"sliding_window-{size}"
    config.model.sliding.window = int(window)
    if name in backbone.PAPER:
        config.optimizer.learning_rate = LEARNING_RATE
    return config
