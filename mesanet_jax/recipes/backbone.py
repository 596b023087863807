"""The run that the families share, so that they differ only in their mixers.

The paper sizes follow MesaNet (arXiv 2506.05233, appendix G): heads of size 128 and 15B tokens, in batches of 256
rows of 2048 tokens.
"""

from mesanet_jax.config import default_config
from mesanet_jax.schema import Config

PAPER = {"140m": (14, 6, 768), "440m": (28, 8, 1024), "1b": (28, 12, 1536)}  # (blocks, heads, width) by size
SIZES = ("140m", "440m", "1b", "demo", "smoke")
# For families whose own papers have a different layer.
PUBLISHED_SIZES = tuple(f"{size}-published" for size in SIZES)


def backbone(family: str, size: str, pattern: tuple[str, ...]) -> Config:
    """Returns the run of one size; the caller sets only the values of its own mixer.

    Args:
      family: the name of the family, for the name of the run.
      size: one of `SIZES`.
      pattern: the mixers by depth, repeated.

    Raises:
      ValueError: there is no such size.
    """
    if size not in SIZES:
        raise ValueError(f"no size {size!r}; choose from {', '.join(SIZES)}")
    config = default_config(pattern)
    config.name = f"{family}-{size}"
    if size in PAPER:
        config.model.layers, config.model.heads, config.model.dim = PAPER[size]
    else:
        small(config, size)
    return config


def split_published(size: str) -> tuple[str, bool]:
    """Splits the size of a family that also has its own paper's layer: "440m-published" -> ("440m", True).

    Raises:
      ValueError: there is no such size.
    """
    scale, dash, form = size.partition("-")
    if scale not in SIZES or (dash and form != "published"):
        raise ValueError(f"no size {size!r}; choose from {', '.join(SIZES)}, each also as in 440m-published")
    return scale, bool(dash)


def small(config: Config, size: str) -> None:
    """Makes a run small, in place.

    Args:
      config: the run.
      size: "demo" trains on the embedded corpus, in a few minutes on two CPU cores; "smoke" takes seconds, for tests.
    """
    demo = size == "demo"
    config.steps = 600 if demo else 8
    config.data.path = "runs/demo/data" if demo else ""
    config.data.seq_len = 256 if demo else 64
    config.data.batch_size = 4 if demo else 8
    config.model.vocab_size = 2048 if demo else 512
    config.model.dim, config.model.layers = (192, 4) if demo else (32, 2)
    config.model.heads, config.model.head_dim = (6, 32) if demo else (2, 16)
    config.model.compute_dtype = "float32"  # CPUs have no fast bfloat16 arithmetic
    config.model.remat = "none"
    config.optimizer.warmup_steps = 50 if demo else 2
    config.optimizer.learning_rate = 8e-3 if demo else 5e-3
    config.optimizer.muon.dtype = "float32"
    config.train.eval_every = 200 if demo else None
    config.train.eval_batches = None if demo else 8
    config.train.log_every = 5 if demo else 1
    config.checkpoint.every = 200 if demo else 4
