"""The linear scan on NVIDIA GPUs: each array is read once and written once, a thread for each channel (Pallas, Mosaic GPU).

The recurrence is bound by the bytes it moves. So inputs are read as they are, a token of a new document is known by a bit
of its own, and the backward kernel makes both gradients in one pass. A thread has few bytes on their way at a time: it
reads a turn of tokens before it computes the turn before.

B batch, T time, D channels.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.checks import require
from mesanet_kernels.gpu import tiles
from mesanet_kernels.ops.linear_scan.differentiable import starts
from mesanet_kernels.partition import partitioned

CHANNELS = 128  # of a block, a thread each
# Tokens read ahead together, by what an H200 took at 16 x 2048 x 1024: forward 0.148 ms with 16 and 0.114 with 32, backward
# (what both ways take more) 0.179 and 0.361.
FORWARD_TURN, BACKWARD_TURN = 32, 16
LANES = plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1)


def linear_scan(x_BTD, a_BTD, state_BD, segment_ids_BT):
    """As `api.linear_scan`. Raises NotImplementedError where the kernel lacks what the call needs."""
    require("linear_scan", "pallas_gpu", lacks(x_BTD, a_BTD))
    return _scan(x_BTD, a_BTD, state_BD, starts(segment_ids_BT)[..., 0].astype(jnp.int32))


def lacks(x_BTD, a_BTD):
    """What the call needs and the kernel has not, as the end of a sentence; "" where it can do it."""
    if jnp.float64 in (x_BTD.dtype, a_BTD.dtype):
        return "has no float64"
    if x_BTD.shape[-1] < CHANNELS:
        return f"needs at least {CHANNELS} channels"
    return tiles.lacks(())


@jax.custom_vjp
def _scan(x_BTD, a_BTD, state_BD, starts_BT):
    """(h [B,T,D], final state [B,D])."""
    return _forward(x_BTD, a_BTD, state_BD, starts_BT)[0]


def _forward(x_BTD, a_BTD, state_BD, starts_BT):
    # Channels lie on the mesh axis that heads do.
    arrays = (x_BTD, a_BTD, state_BD, starts_BT)
    h_BTD, final_BD = partitioned(_forward_kernel, arrays, axes=("BTH", "BTH", "BH", "BT"), results=("BTH", "BH"))
    return (h_BTD, final_BD), (a_BTD, h_BTD, state_BD, starts_BT)


def _backward(saved, cotangents):
    """g_t = dh_t + a_{t+1} g_{t+1} from the last token to the first: dx_t = g_t, da_t = g_t h_{t-1}."""
    dx_BTD, da_BTD, dstate_BD = partitioned(
        _backward_kernel, (*cotangents, *saved),
        axes=("BTH", "BH", "BTH", "BTH", "BH", "BT"), results=("BTH", "BTH", "BH"),
    )  # fmt: skip
    return dx_BTD, da_BTD, dstate_BD, None


_scan.defvjp(_forward, _backward)


def _forward_kernel(x_BTD, a_BTD, state_BD, starts_BT):
    length = x_BTD.shape[1]

    def scan(x, a, state, starts, h, final):
        row, channels = _place(x_BTD.shape[2])

        def read(t):
            return _load(x.at[row, t, channels]), _decay(a, starts, row, t, channels)

        def compute(t, tokens, h_D):
            for ahead, (x_D, a_D) in enumerate(tokens):
                h_D = a_D * h_D + x_D
                h[row, t + ahead, channels] = h_D.astype(x_BTD.dtype)
            return h_D

        final[row, channels] = _turns(length, read, compute, _load(state.at[row, channels]), turn=FORWARD_TURN)

    out_type = jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype), jax.ShapeDtypeStruct(state_BD.shape, jnp.float32)
    return _call(scan, out_type, x_BTD)(x_BTD, a_BTD, state_BD, starts_BT)


def _backward_kernel(dh_BTD, dfinal_BD, a_BTD, h_BTD, state_BD, starts_BT):
    length = dh_BTD.shape[1]

    def scan_backwards(dh, dfinal, a, h, state, starts, dx, da, dstate):
        row, channels = _place(dh_BTD.shape[2])

        def read(back):
            """Token t = T - 1 - back, and the state before it, which for the first one is not among h."""
            t = length - 1 - back
            before_D = jnp.where(
                t > 0, _load(h.at[row, jnp.maximum(t - 1, 0), channels]), _load(state.at[row, channels])
            )
            goes_on = jnp.where(starts[row, t] != 0, 0.0, 1.0)
            return _load(dh.at[row, t, channels]), _decay(a, starts, row, t, channels), before_D * goes_on

        def compute(back, tokens, from_later_D):
            for ahead, (dh_D, a_D, before_D) in enumerate(tokens):
                t = length - 1 - back - ahead
                g_D = dh_D + from_later_D
                dx[row, t, channels] = g_D.astype(dh_BTD.dtype)
                da[row, t, channels] = (g_D * before_D).astype(a_BTD.dtype)
                from_later_D = a_D * g_D
            return from_later_D

        dstate[row, channels] = _turns(length, read, compute, _load(dfinal.at[row, channels]), turn=BACKWARD_TURN)

    out_type = (
        jax.ShapeDtypeStruct(dh_BTD.shape, dh_BTD.dtype),
        jax.ShapeDtypeStruct(a_BTD.shape, a_BTD.dtype),
        jax.ShapeDtypeStruct(state_BD.shape, jnp.float32),
    )
    return _call(scan_backwards, out_type, dh_BTD)(dh_BTD, dfinal_BD, a_BTD, h_BTD, state_BD, starts_BT)


def _turns(length, read, compute, carry, *, turn):
    """`compute(t, [read(t), ...], carry)` for all t in order, a turn at a time, each read before the one before is computed."""
    turns, rest = divmod(length, turn)
    tokens_of = lambda first, count: [read(first + ahead) for ahead in range(count)]

    def take_turn(number, state):
        tokens, carry = state
        following = tokens_of(jnp.minimum((number + 1) * turn, length - turn), turn)
        return following, compute(number * turn, tokens, carry)

    if turns:
        _, carry = lax.fori_loop(0, turns, take_turn, (tokens_of(0, turn), carry))
    return compute(turns * turn, tokens_of(turns * turn, rest), carry)


def _place(channels):
    """This program's row, and its channels: the last block is moved back to end where the channels do."""
    first = jnp.minimum(lax.axis_index("part") * CHANNELS, channels - CHANNELS)
    return lax.axis_index("row"), pl.ds(first, CHANNELS)


def _decay(a, starts, row, t, channels):
    return _load(a.at[row, t, channels]) * jnp.where(starts[row, t] != 0, 0.0, 1.0)


def _load(ref):
    return tiles.untiled(ref, LANES).astype(jnp.float32)


def _call(kernel, out_type, like_BTD):
    rows, _, channels = like_BTD.shape
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(rows, -(-channels // CHANNELS)),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # no thread reads what another wrote
        ),
    )
