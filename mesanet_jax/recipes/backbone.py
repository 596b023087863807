"""Backbones that the families share, so that a comparison differs in the mixer alone."""

from mesanet_jax.config import default_config

# MesaNet, appendix G: (blocks, heads, width) at key size 128; 15B tokens in steps of 256 rows of 2048.
PAPER = {"140m": (14, 6, 768), "440m": (28, 8, 1024), "1b": (28, 12, 1536)}
SIZES = ("140m", "440m", "1b", "demo", "smoke")
PUBLISHED_SIZES = tuple(f"{size}-published" for size in SIZES)  # of families whose own papers have another layer


def backbone(family: str, size: str, pattern: tuple[str, ...]):
    """The run of a size, with the mixers of `pattern`; only the mixer's own values are left to the caller."""
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
    """(scale, published) of a size of a family with a preset: `440m`, or `440m-published` with its own paper's layer."""
    scale, dash, form = size.partition("-")
    if scale not in SIZES or (dash and form != "published"):
        raise ValueError(f"no size {size!r}; choose from {', '.join(SIZES)}, each also as in 440m-published")
    return scale, bool(dash)


def small(config, size: str) -> None:
    """`demo`: the embedded corpus in a few minutes on two cores; `smoke`: seconds, for tests."""
    demo = size == "demo"
    config.steps = 600 if demo else 8
    config.data.path = "runs/demo/data" if demo else ""
    config.data.seq_len = 256 if demo else 64
    config.data.batch_size = 4 if demo else 8
    config.model.vocab_size = 2048 if demo else 512
    config.model.dim, config.model.layers = (192, 4) if demo else (32, 2)
    config.model.heads, config.model.head_dim = (6, 32) if demo else (2, 16)
    config.model.compute_dtype = "float32"  # two cores have no bfloat16 units
    config.model.remat = "none"
    config.optimizer.warmup_steps = 50 if demo else 2
    config.optimizer.learning_rate = 8e-3 if demo else 5e-3
    config.optimizer.muon.dtype = "float32"
    config.train.eval_every = 200 if demo else None
    config.train.eval_batches = None if demo else 8
    config.train.log_every = 5 if demo else 1
    config.checkpoint.every = 200 if demo else 4
