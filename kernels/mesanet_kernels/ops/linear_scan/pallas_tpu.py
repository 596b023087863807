"""The linear scan on TPUs: one pass over the data, the state in VMEM from one block of time to the next (Pallas, Mosaic).

The recurrence is bound by the bytes it moves, so it need not fill the vector unit: rows of a tile of 8 tokens are
taken one by one.

B batch, T time, D channels.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mesanet_kernels.dispatch import require
from mesanet_kernels.linear_recurrence.chunks import pad_time
from mesanet_kernels.ops.linear_scan import differentiable
from mesanet_kernels.partition import partitioned

ROWS = 8  # of a tile
TIMES = 256  # tokens of a block
CHANNELS = (512, 256, 128)  # of a block, the most that divide D; all where none does


def linear_scan(x_BTD, a_BTD, state_BD, segment_ids_BT):
    """As `api.linear_scan`. Raises NotImplementedError where the kernel lacks what the call needs."""
    require("linear_scan", "pallas_tpu", unsupported_reason(x_BTD, a_BTD))
    return differentiable.linear_scan(scan, x_BTD, a_BTD, state_BD, segment_ids_BT)


def unsupported_reason(x_BTD, a_BTD, *_):
    """Why the kernel cannot run this call; empty if it can."""
    return "has no float64" if jnp.float64 in (x_BTD.dtype, a_BTD.dtype) else ""


def scan(x_BTD, a_BTD, state_BD, *, reverse):
    """h [B, T, D], as `differentiable` calls it."""
    call = lambda *arrays: (_kernel(*arrays, reverse=reverse),)
    # Channels lie on the mesh axis that heads do.
    return partitioned(call, (x_BTD, a_BTD, state_BD), axes=("BTH", "BTH", "BH"), results=("BTH",))[0]


def _kernel(x_BTD, a_BTD, state_BD, *, reverse, interpret=False):
    """The kernel; `interpret` as in `pl.pallas_call`."""
    batch, length, channels = x_BTD.shape
    times = min(TIMES, length + -length % ROWS)
    x_BTD, a_BTD = (pad_time(z_BTD, chunk=times) for z_BTD in (x_BTD, a_BTD))
    if reverse:  # the padding comes first: it must hand the state on
        past_end_T1 = (jnp.arange(x_BTD.shape[1]) >= length)[:, None]
        a_BTD = jnp.where(past_end_T1, 1, a_BTD)
    blocks = x_BTD.shape[1] // times
    width = next((width for width in CHANNELS if channels % width == 0), channels)
    order = range(ROWS)[::-1] if reverse else range(ROWS)

    def kernel(x, a, initial, h, state):
        @pl.when(pl.program_id(2) == 0)
        def _():
            state[...] = initial[0]

        def tile(step, state_1D):
            first = ROWS * (times // ROWS - 1 - step if reverse else step)
            rows = pl.ds(pl.multiple_of(first, ROWS), ROWS)
            x_RD, a_RD, h_RD = x[0, rows], a[0, rows], [None] * ROWS
            for row in order:
                state_1D = a_RD[row : row + 1] * state_1D + x_RD[row : row + 1]
                h_RD[row] = state_1D
            h[0, rows] = jnp.concatenate(h_RD)
            return state_1D

        state[...] = jax.lax.fori_loop(0, times // ROWS, tile, state[...])

    in_time = lambda block: blocks - 1 - block if reverse else block
    sequence = pl.BlockSpec((1, times, width), lambda row, part, block: (row, in_time(block), part))
    h_BTD = pl.pallas_call(
        kernel,
        grid=(batch, channels // width, blocks),
        in_specs=[sequence, sequence, pl.BlockSpec((1, 1, width), lambda row, part, block: (row, 0, part))],
        out_specs=sequence,
        out_shape=jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype),
        scratch_shapes=[pltpu.VMEM((1, width), x_BTD.dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(x_BTD, a_BTD, state_BD[:, None])
    return h_BTD[:, :length]
