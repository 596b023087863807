"""The recipe of nanochat (karpathy/nanochat 92d63d4), as values of a config whose model is set already."""

import math

from mesanet_jax.config import default_config
from mesanet_jax.recipes.backbone import small

DEPTHS = ("d12", "d20")
SMALL = ("demo", "smoke")
SIZES = (*DEPTHS, *SMALL)
HEAD_DIM = 128

REFERENCE_WIDTH, REFERENCE_DEPTH, REFERENCE_BATCH = 768, 12, 2**19  # d12, whose batch is counted in tokens


def recipe(config, *, ratio: float = 12.0, batch_tokens: int | None = None) -> None:
    """Rows of 2048, `ratio` tokens for each parameter of blocks and head, and the optimizer scaled to both.

    A batch of `batch_tokens` grows with the run unless given. (100 tokens and 2^19: Maglev, 83,000 steps of d20.)
    """
    model = config.model
    size = scaling_parameters(model.dim, model.layers, model.vocab_size)
    growth = size / scaling_parameters(REFERENCE_WIDTH, REFERENCE_DEPTH, model.vocab_size)
    if batch_tokens is None:
        batch_tokens = 2 ** round(math.log2(REFERENCE_BATCH * growth**0.383))
    config.data.seq_len = 2048
    config.data.batch_size = batch_tokens // config.data.seq_len
    config.steps = int(ratio * size) // batch_tokens
    optimizer(config, batch_scale=math.sqrt(batch_tokens / REFERENCE_BATCH), decay_scale=1 / growth)
    config.optimizer.warmup_steps = 40


def scaling_parameters(dim: int, layers: int, vocab_size: int) -> int:
    """Parameters of the blocks' matrices and the head: 435,159,040 of d20."""
    return 12 * dim**2 * layers + vocab_size * dim


def optimizer(config, *, batch_scale: float = 1.0, decay_scale: float = 1.0) -> None:
    """Muon for matrices and a group of AdamW for each of the others, of the run's length whatever it is.

    Rates grow by `batch_scale`, Muon's weight decay by both scales; those of tables fall with the root of the width.
    """
    table = batch_scale * math.sqrt(REFERENCE_WIDTH / config.model.dim)
    values = config.optimizer
    values.name, values.clip_norm, values.eps = "muon", None, 1e-10
    values.learning_rate = 0.02 * batch_scale  # of whatever has no group of its own
    values.schedule, values.warmdown_ratio, values.final_ratio = "warmdown", 0.65, 0.05

    groups = values.groups  # learning rate, b1, b2, weight decay
    groups.head = (0.008 * table, 0.8, 0.96, 0.01)
    groups.embedding = (0.3 * table, 0.8, 0.995, 0.001)
    groups.value_embedding = (0.15 * table, 0.8, 0.995, 0.01)
    groups.residual_scale = (0.005 * batch_scale, 0.8, 0.95, 0.05)
    groups.embedding_scale = (0.5 * batch_scale, 0.96, 0.95, 0.0)
    groups.smear = (0.2, 0.8, 0.95, 0.0)
    groups.backout = (0.2, 0.8, 0.95, 0.0)

    muon = values.muon
    muon.learning_rate = 0.02 * batch_scale
    muon.momentum_start, muon.momentum, muon.momentum_final, muon.momentum_warmup_steps = 0.85, 0.97, 0.90, 400
    muon.row_normalize, muon.iteration, muon.rescale, muon.second_moment = True, "polar_express", True, 0.9
    muon.weight_decay, muon.weight_decay_schedule, muon.cautious = 0.28 * batch_scale * decay_scale, "cosine", True


def backbone(kind: str, size: str, pattern: tuple[str, ...]):
    """A run of a kind of model that is built on nanochat, without its name and, of a depth, without its length."""
    depth = size.removeprefix("d")
    if size not in SMALL and not (size.startswith("d") and depth.isdigit()):
        raise ValueError(f"no size {size!r}; choose from {', '.join(SIZES)}, or another depth, as d16")
    config = default_config(pattern, kind=kind)
    model = config.model
    if size in SMALL:
        small(config, size)
        model.window = {"demo": 64, "smoke": 16}[size]
        if size == "smoke":
            model.layers = 4  # one period of nanochat's pattern
        optimizer(config)
    else:
        model.layers = int(depth)
        model.heads, model.head_dim = math.ceil(64 * model.layers / HEAD_DIM), HEAD_DIM
        model.dim = model.heads * HEAD_DIM
        model.vocab_size, model.vocab_multiple = 32_768, 64
        model.reset_at_documents = False
    with_scalars = (*config.optimizer.no_decay, "scales", "smear", "backout", "value_embedding")
    config.optimizer.no_decay = with_scalars  # of AdamW, if it is chosen
    return config
