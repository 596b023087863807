"""The linear scan on TPUs, in one pass over the data (Pallas, Mosaic TPU).

The state stays in VMEM from one block of tokens to the next. Memory bandwidth limits the recurrence, so it need not
fill the vector unit: the 8 tokens of a tile are computed one by one.

B batch, T time, D channels, R tokens of a tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mesanet_kernels.dispatch import require
from mesanet_kernels.linear_recurrence.chunks import pad_time
from mesanet_kernels.ops.linear_scan import differentiable
from mesanet_kernels.partition import partitioned

TILE_TOKENS = 8  # tokens per tile, the rows of a vector register
BLOCK_TOKENS = 256  # tokens per block
# Channels per block: the first that divides D; all channels if none does.
BLOCK_CHANNELS = (512, 256, 128)


def linear_scan_pallas_tpu(x_BTD, a_BTD, state_BD, segment_ids_BT) -> tuple[jax.Array, jax.Array]:
    """Computes `api.linear_scan`. Raises NotImplementedError if the kernel does not support the call."""
    require("linear_scan", "pallas_tpu", unsupported_reason(x_BTD, a_BTD))
    return differentiable.linear_scan_with_gradient(scan, x_BTD, a_BTD, state_BD, segment_ids_BT)


def unsupported_reason(x_BTD, a_BTD, *_) -> str:
    """Returns why the kernel cannot run this call; empty if it can."""
    return "has no float64" if jnp.float64 in (x_BTD.dtype, a_BTD.dtype) else ""


def scan(x_BTD: jax.Array, a_BTD: jax.Array, state_BD: jax.Array, *, reverse: bool) -> jax.Array:
    """Computes h [B, T, D] on any mesh; a backend of differentiable.py."""

    def call(*arrays):
        return (_kernel(*arrays, reverse=reverse),)

    # Channels are split over the mesh axes of the heads, therefore the letter H.
    return partitioned(call, (x_BTD, a_BTD, state_BD), axes=("BTH", "BTH", "BH"), results=("BTH",))[0]


def _kernel(x_BTD, a_BTD, state_BD, *, reverse: bool, interpret: Any = False) -> jax.Array:
    """Computes h [B, T, D] on one device; `interpret` as in `pl.pallas_call`."""
    batch, length, channels = x_BTD.shape
    times = min(BLOCK_TOKENS, length + -length % TILE_TOKENS)
    x_BTD, a_BTD = (pad_time(z_BTD, chunk=times) for z_BTD in (x_BTD, a_BTD))
    if reverse:  # the padding comes first and must not change the state
        past_end_T1 = (jnp.arange(x_BTD.shape[1]) >= length)[:, None]
        a_BTD = jnp.where(past_end_T1, 1, a_BTD)
    blocks = x_BTD.shape[1] // times
    width = next((width for width in BLOCK_CHANNELS if channels % width == 0), channels)
    order = range(TILE_TOKENS)[::-1] if reverse else range(TILE_TOKENS)

    def kernel(x, a, initial, h, state):
        @pl.when(pl.program_id(2) == 0)
        def _():
            state[...] = initial[0]

        def tile(number, state_1D):
            first = TILE_TOKENS * (times // TILE_TOKENS - 1 - number if reverse else number)
            rows = pl.ds(pl.multiple_of(first, TILE_TOKENS), TILE_TOKENS)
            x_RD, a_RD = x[0, rows], a[0, rows]
            h_RD: list[Any] = [None] * TILE_TOKENS
            for row in order:
                state_1D = a_RD[row : row + 1] * state_1D + x_RD[row : row + 1]
                h_RD[row] = state_1D
            h[0, rows] = jnp.concatenate(h_RD)
            return state_1D

        state[...] = jax.lax.fori_loop(0, times // TILE_TOKENS, tile, state[...])

    def block_index(row, part, step):
        return row, blocks - 1 - step if reverse else step, part

    sequence = pl.BlockSpec((1, times, width), block_index)
    h_BTD = pl.pallas_call(
        kernel,
        grid=(batch, channels // width, blocks),
        in_specs=[sequence, sequence, pl.BlockSpec((1, 1, width), lambda row, part, step: (row, 0, part))],
        out_specs=sequence,
        out_shape=jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype),
        scratch_shapes=[pltpu.VMEM((1, width), x_BTD.dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(x_BTD, a_BTD, state_BD[:, None])
    return h_BTD[:, :length]
