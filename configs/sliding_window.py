"""Sliding-window attention in every block, the SWA-w baselines of the MesaNet paper: `440m-w64` is SWA-64."""

from mesanet_jax.recipes import backbone

WINDOWS = (4, 64, 256, 1024)
SIZES = tuple(f"{size}-w{window}" for size in backbone.PAPER for window in WINDOWS) + ("demo", "smoke")
SMALL_WINDOW = {"demo": "64", "smoke": "16"}
LEARNING_RATE = 1e-3  # appendix G: not scanned for these models


def get_config(size: str = "140m-w1024"):
    """`size` is one of `SIZES`, any other window in its place."""
    name, _, window = size.partition("-w")
    window = window or SMALL_WINDOW.get(name, "")
    if not window.isdigit():
        raise ValueError(f"no window in {size!r}; write one of 64 tokens as in 440m-w64")
    config = backbone.backbone("sliding_window", name, ("sliding",))
    config.name = f"sliding_window-{size}"
    config.model.sliding.window = int(window)
    if name in backbone.PAPER:
        config.optimizer.learning_rate = LEARNING_RATE
    return config
