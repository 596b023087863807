"""The work of an op, for rates: the matrix products of its chunked form, and the bytes of inputs and outputs.

Blocks of C x C tokens are counted in full, as matrix units compute them; attention is counted by the tokens seen.

B batch, T time, H heads, K key size, V value size, D channels, N modes, W taps.
"""

import jax
import numpy as np

CHUNK = 64  # tokens per chunk in these counts, whatever an implementation uses


def flops(op: str, sizes: dict[str, int], *, max_iters: float) -> float | None:
    """Returns the floating-point operations of the matrix products of a forward pass; None if the op has hardly any.

    Args:
      op: a key of `shapes.SHAPES`.
      sizes: the size of each axis.
      max_iters: the solver iterations of "mesa"; may be a mean.
    """
    count = FORWARD.get(op)
    return count and count(sizes, max_iters) * sizes["B"] * sizes["T"]


def moved_bytes(*trees) -> int:
    """Returns the bytes of all arrays of the trees, each read or written once."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))


def _linear(s, _):
    """Counts scores and values inside the chunk, and reading and writing the state, per token."""
    return s["H"] * (2 * CHUNK * (s["K"] + s["V"]) + 4 * s["K"] * s["V"])


def _mesa(s, iterations):
    """Counts `iterations` products with H_t, writing both states and reading one, per token."""
    image = 4 * CHUNK * s["K"] + 2 * s["K"] ** 2
    return s["H"] * (iterations * image + 2 * s["K"] ** 2) + _linear(s, 0)


def _delta(s, _):
    """Counts linear attention and the products of the WY form with keys, values and state, per token."""
    return _linear(s, 0) + s["H"] * (2 * CHUNK * (2 * s["K"] + s["V"]) + 2 * s["K"] * s["V"])


FORWARD = {
    "mesa": _mesa,
    "gated_linear_attention": _linear,
    "gated_linear_attention_vector": _linear,
    "mlstm": _linear,
    "delta_rule": _delta,
    "attention": lambda s, _: s["H"] * s["T"] * (s["K"] + s["V"]),
    "softmax_cross_entropy": lambda s, _: 2 * s["D"] * s["V"],
}
