"""The training recipe of nanochat (github.com/karpathy/nanochat, commit 92d63d4), as values of a config.

nanochat scales everything with the depth: width, batch, number of steps, learning rates and weight decay.
"""

import math

from mesanet_jax.config import default_config
from mesanet_jax.recipes.backbone import small
from mesanet_jax.schema import Config

DEPTHS = ("d12", "d20")
SMALL = ("demo", "smoke")
SIZES = (*DEPTHS, *SMALL)
HEAD_DIM = 128

# The run at which nanochat's learning rates and weight decay are stated: d12, with a batch of so many tokens.
REFERENCE_WIDTH, REFERENCE_DEPTH, REFERENCE_BATCH = 768, 12, 2**19


def recipe(config: Config, *, ratio: float = 12.0, batch_tokens: int | None = None) -> None:
    """Sets the length, the batch and the optimizer of a run whose model is already set, in place.

    Rows have 2048 tokens.

    Args:
      config: the run.
      ratio: training tokens for each parameter of the blocks and the head. Maglev uses 100, for 83,000 steps of d20.
      batch_tokens: tokens of a batch; None: a power of two that grows with the size of the model.
    """
    model = config.model
    size = scaling_parameters(model.dim, model.layers, model.vocab_size)
    growth = size / scaling_parameters(REFERENCE_WIDTH, REFERENCE_DEPTH, model.vocab_size)
    tokens = batch_tokens or 2 ** round(math.log2(REFERENCE_BATCH * growth**0.383))
    config.data.seq_len = 2048
    config.data.batch_size = tokens // config.data.seq_len
    config.steps = int(ratio * size) // tokens
    optimizer(config, batch_scale=math.sqrt(tokens / REFERENCE_BATCH), decay_scale=1 / growth)
    config.optimizer.warmup_steps = 40


def scaling_parameters(dim: int, layers: int, vocab_size: int) -> int:
    """Returns the number of parameters in the blocks' matrices and the head (d20: 435,159,040)."""
    return 12 * dim**2 * layers + vocab_size * dim


def optimizer(config: Config, *, batch_scale: float = 1.0, decay_scale: float = 1.0) -> None:
    """Sets Muon for the matrices of the blocks, and a group of AdamW for each other kind of parameter, in place.

    Args:
      config: the run; neither its length nor its warm-up is changed.
      batch_scale: factor on the learning rates. Those of embeddings and head also fall with the root of the width.
      decay_scale: factor on Muon's weight decay, beside `batch_scale`.
    """
    table = batch_scale * math.sqrt(REFERENCE_WIDTH / config.model.dim)
    values = config.optimizer
    values.name, values.clip_norm, values.eps = "muon", None, 1e-10
    values.learning_rate = 0.02 * batch_scale  # for parameters that have no group of their own
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


def backbone(kind: str, size: str, pattern: tuple[str, ...]) -> Config:
    """Returns a run of a model that is built on nanochat's Transformer.

    The caller sets its name and, for a depth, its length and optimizer (`recipe`).

    Args:
      kind: the model class, `config.model.kind`.
      size: one of `SIZES`, or another depth such as "d16".
      pattern: the mixers by depth, repeated.

    Raises:
      ValueError: there is no such size.
    """
    depth = size.removeprefix("d")
    if size not in SMALL and not (size.startswith("d") and depth.isdigit()):
        raise ValueError(f"no size {size!r}; choose from {', '.join(SIZES)}, or another depth such as d16")
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
    # These parameters have no weight decay if the optimizer is AdamW.
    config.optimizer.no_decay = (*config.optimizer.no_decay, "scales", "smear", "backout", "value_embedding")
    return config
