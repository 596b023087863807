"""Named shapes and example inputs of every op, for the tests and the benchmarks.

B batch, T time, H heads (query heads of attention), J key heads, K key size, V value size (vocabulary of the
cross-entropy), D channels, W taps; for the diagonal state space model H channels, N modes.
"""

from collections.abc import Mapping

import numpy as np

# Inputs that stay float32 when the others are bfloat16: gates, parameters of a state space model, the embedding.
WIDE = frozenset(
    ("log_decay", "beta", "input_gate", "forget_gate", "a", "lam", "embedding")
    + ("log_rate", "log_frequency", "c_re", "c_im", "skip")
)

SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "mesa": {
        "tiny": dict(B=2, T=11, H=2, K=8, V=12),
        "ragged": dict(B=1, T=70, H=2, K=16, V=24),
        "demo": dict(B=8, T=256, H=4, K=32, V=32),
        "demo_wide": dict(B=8, T=256, H=4, K=64, V=64),
        "16x2048": dict(B=16, T=2048, H=8, K=128, V=128),
        "4x8192": dict(B=4, T=8192, H=8, K=128, V=128),
        "1x32768": dict(B=1, T=32768, H=8, K=128, V=128),
    },
    "causal_conv1d": {
        "tiny": dict(B=2, T=11, D=6, W=4),
        "ragged": dict(B=2, T=70, D=12, W=4),
        "demo": dict(B=8, T=256, D=256, W=4),
        "16x2048": dict(B=16, T=2048, D=1024, W=4),
    },
    "attention": {
        "tiny": dict(B=2, T=11, H=4, J=2, K=8, V=12),
        "ragged": dict(B=1, T=150, H=2, J=1, K=16, V=16),
        "demo": dict(B=8, T=256, H=4, J=4, K=64, V=64),
        "16x2048": dict(B=16, T=2048, H=8, J=8, K=128, V=128),
    },
    "linear_scan": {
        "tiny": dict(B=2, T=11, D=6),
        "ragged": dict(B=2, T=70, D=12),
        "demo": dict(B=8, T=256, D=240),
        "16x2048": dict(B=16, T=2048, D=1280),
        "1x32768": dict(B=1, T=32768, D=1280),
    },
    "diagonal_ssm": {
        "tiny": dict(B=2, T=11, H=6, N=4),
        "ragged": dict(B=2, T=70, H=12, N=8),
        "demo": dict(B=8, T=256, H=96, N=64),
        "16x2048": dict(B=16, T=2048, H=384, N=64),
        "1x32768": dict(B=1, T=32768, H=384, N=64),
    },
    "softmax_cross_entropy": {
        "tiny": dict(B=2, T=11, D=8, V=21),
        "ragged": dict(B=2, T=70, D=16, V=40),
        "demo": dict(B=8, T=256, D=256, V=512),
        "16x2048": dict(B=16, T=2048, D=1024, V=32000),
    },
}
for _op in ("gated_linear_attention", "gated_linear_attention_vector", "delta_rule", "mlstm"):
    SHAPES[_op] = SHAPES["mesa"]


def example(op: str, shape: str | Mapping[str, int], *, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random inputs of `op` by name, in the order of its arguments; float32, or int32 for targets.

    Args:
      op: a key of `SHAPES`: the name of an op, or its name with "_vector" for the form with one decay per key channel.
      shape: a name in `SHAPES[op]`, or a dict of sizes like those there.
      seed: of the random numbers.
    """
    sizes = SHAPES[op][shape] if isinstance(shape, str) else shape
    return _EXAMPLES[op](np.random.default_rng(seed), sizes)


def _gated_linear_attention(rng: np.random.Generator, s: Mapping[str, int]) -> dict[str, np.ndarray]:
    rows = s["B"], s["T"], s["H"]
    return dict(
        q=_unit(rng, *rows, s["K"]),
        k=_unit(rng, *rows, s["K"]),
        v=_normal(rng, *rows, s["V"]),
        log_decay=-np.exp(rng.uniform(-7, 0, rows)).astype(np.float32),
        beta=rng.uniform(0, 1, rows).astype(np.float32),
    )


def _gated_linear_attention_vector(rng: np.random.Generator, s: Mapping[str, int]) -> dict[str, np.ndarray]:
    log_decay = -np.exp(rng.uniform(-7, 0, (s["B"], s["T"], s["H"], s["K"]))).astype(np.float32)
    return _gated_linear_attention(rng, s) | dict(log_decay=log_decay)


def _mlstm(rng: np.random.Generator, s: Mapping[str, int]) -> dict[str, np.ndarray]:
    rows = s["B"], s["T"], s["H"]
    return dict(
        q=_normal(rng, *rows, s["K"]),
        k=_normal(rng, *rows, s["K"]),
        v=_normal(rng, *rows, s["V"]),
        input_gate=2 * _normal(rng, *rows),
        forget_gate=3 + 2 * _normal(rng, *rows),
    )


def _mesa(rng: np.random.Generator, s: Mapping[str, int]) -> dict[str, np.ndarray]:
    lam = rng.uniform(0.25, 1.25, (s["H"], s["K"])).astype(np.float32)
    return dict(**_gated_linear_attention(rng, s), lam=lam)


def _causal_conv1d(rng: np.random.Generator, s: Mapping[str, int]) -> dict[str, np.ndarray]:
    return dict(x=_normal(rng, s["B"], s["T"], s["D"]), w=_normal(rng, s["W"], s["D"]), bias=_normal(rng, s["D"]))


def _attention(rng: np.random.Generator, s: Mapping[str, int]) -> dict[str, np.ndarray]:
    return dict(
        q=_normal(rng, s["B"], s["T"], s["H"], s["K"]),
        k=_normal(rng, s["B"], s["T"], s["J"], s["K"]),
        v=_normal(rng, s["B"], s["T"], s["J"], s["V"]),
    )


def _linear_scan(rng: np.random.Generator, s: Mapping[str, int]) -> dict[str, np.ndarray]:
    shape = s["B"], s["T"], s["D"]
    return dict(x=_normal(rng, *shape), a=np.exp(-np.exp(rng.uniform(-7, 1, shape))).astype(np.float32))


def _diagonal_ssm(rng: np.random.Generator, s: Mapping[str, int]) -> dict[str, np.ndarray]:
    """All values are standard normal, as in the initialisation of DSS and in tests/golden/dss_typical.npz."""
    modes, channels_and_modes = s["N"], (s["H"], s["N"])
    return dict(
        u=_normal(rng, s["B"], s["T"], s["H"]),
        log_rate=_normal(rng, modes),
        log_frequency=_normal(rng, modes),
        c_re=_normal(rng, *channels_and_modes),
        c_im=_normal(rng, *channels_and_modes),
        skip=_normal(rng, s["H"]),
    )


def _softmax_cross_entropy(rng: np.random.Generator, s: Mapping[str, int]) -> dict[str, np.ndarray]:
    return dict(
        hidden=_normal(rng, s["B"], s["T"], s["D"]),
        embedding=(_normal(rng, s["V"], s["D"]) / np.float32(np.sqrt(s["D"]))),
        targets=rng.integers(0, s["V"], (s["B"], s["T"]), dtype=np.int32),
    )


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _unit(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns normal vectors along the last axis, scaled to length 1."""
    x = _normal(rng, *shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


_EXAMPLES = {
    "mesa": _mesa,
    "gated_linear_attention": _gated_linear_attention,
    "gated_linear_attention_vector": _gated_linear_attention_vector,
    "delta_rule": _gated_linear_attention,
    "causal_conv1d": _causal_conv1d,
    "attention": _attention,
    "mlstm": _mlstm,
    "linear_scan": _linear_scan,
    "diagonal_ssm": _diagonal_ssm,
    "softmax_cross_entropy": _softmax_cross_entropy,
}
