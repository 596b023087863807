"""The short causal convolutions, with SiLU, of a matrix memory's queries, keys and values.

B batch, T time, C channels, W taps.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mesanet_jax.layers import param
from mesanet_jax.mixers.backends import for_other_ops
from mesanet_kernels import causal_conv1d, causal_conv1d_step


def make_taps(width: int, channels: int, *, rngs: nnx.Rngs) -> nnx.Param:
    """Returns taps [W, C], normal with variance 1 / W: MesaNet gives no initialisation for its convolutions."""

    def init(key, shape, dtype):
        return jax.random.normal(key, shape, dtype) / np.sqrt(shape[0])

    return param(rngs, init, (width, channels), (None, "heads"))


def convolve_rows(
    x_BTC: jax.Array,
    taps_WC: nnx.Param | None,
    tail: jax.Array | None,
    *,
    segment_ids: jax.Array | None,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns rows after convolution and SiLU, and their last W - 1 inputs; without taps, its arguments.

    Args:
      taps_WC: from `make_taps`, or None for no convolution.
      tail: [B, W-1, C], the inputs before these; None: there are none.
      segment_ids: [B, T], the documents that are kept apart; None: each row is one document.
      implementation: that of the mixer's main op.
    """
    if taps_WC is None:
        return x_BTC, tail
    return causal_conv1d(
        x_BTC,
        taps_WC[...].astype(x_BTC.dtype),
        activation="silu",
        segment_ids=segment_ids,
        initial_state=tail,
        implementation=for_other_ops(implementation),
    )


def convolve_token(
    x_BC: jax.Array, taps_WC: nnx.Param | None, tail: jax.Array | None, *, implementation: str | None
) -> tuple[jax.Array, jax.Array | None]:
    """As `convolve_rows`, for one token: x [B, C]."""
    if taps_WC is None:
        return x_BC, tail
    return causal_conv1d_step(
        x_BC,
        taps_WC[...].astype(x_BC.dtype),
        tail,
        activation="silu",
        implementation=for_other_ops(implementation),
    )


def empty_tail(taps_WC: nnx.Param | None, batch: int, channels: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the tail before a document's first token, [B, W-1, C]; [B, 0, C] without taps."""
    return jnp.zeros((batch, 0 if taps_WC is None else taps_WC.shape[-2] - 1, channels), dtype)
