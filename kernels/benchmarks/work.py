"""What an op has to do, for rates: products of its chunked form, and bytes of what goes in and comes out once.

Blocks of C x C tokens are counted in full, as matrix units compute them; attention by the tokens seen.

B batch, T time, H heads, K key size, V value size, D channels, N modes, W taps.
"""

import jax
import numpy as np

CHUNK = 64  # of the chunked forms counted here, whatever an implementation takes


def flops(op: str, sizes: dict[str, int], *, max_iters: int) -> float | None:
    """FLOP of the forward pass in matrix products; None where the op has none to speak of."""
    count = FORWARD.get(op)
    return count and count(sizes, max_iters) * sizes["B"] * sizes["T"]


def moved_bytes(*trees) -> int:
    """Bytes of all arrays, read or written once."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))


def _linear(s, _):
    """Scores and values inside the chunk, the state read and written."""
    return s["H"] * (2 * CHUNK * (s["K"] + s["V"]) + 4 * s["K"] * s["V"])


def _mesa(s, iterations):
    """`iterations` products with H_t = entering state + chunk, both states written, one read."""
    image = 4 * CHUNK * s["K"] + 2 * s["K"] ** 2
    return s["H"] * (iterations * image + 2 * s["K"] ** 2) + _linear(s, 0)


def _delta(s, _):
    """As linear attention, and the chunk's WY form: C x C products with keys and values; one more read of the state."""
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
