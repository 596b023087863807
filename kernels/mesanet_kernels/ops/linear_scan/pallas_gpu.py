"""The linear scan on NVIDIA GPUs: each array is read once and written once, a thread for each channel (Pallas, Mosaic GPU).

The recurrence is bound by the bytes it moves, and a row of 1024 channels keeps but eight blocks of threads busy. So the copy
engine brings tokens to shared memory some turns ahead, a token of a new document is known by a bit of its own, and the
backward kernel makes both gradients in one pass.

B batch, T time, D channels.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.dispatch import require
from mesanet_kernels.ops.linear_scan.differentiable import starts
from mesanet_kernels.partition import partitioned
from mesanet_kernels.tiles import gpu as tiles

CHANNELS = 128  # of a block, a thread each
TURN = 32  # tokens that are copied together: 128 bytes of `starts`, the least
STAGES = 3  # turns in shared memory: one computed, the others on their way; 72 KiB of x and a, 96 of what goes back
ALIGNED = 8  # channels: 16 bytes of bfloat16, the least that the copy engine moves
LANES = plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1)


def linear_scan(x_BTD, a_BTD, state_BD, segment_ids_BT):
    """As `api.linear_scan`. Raises NotImplementedError where the kernel lacks what the call needs."""
    require("linear_scan", "pallas_gpu", unsupported_reason(x_BTD, a_BTD))
    return _scan(x_BTD, a_BTD, state_BD, starts(segment_ids_BT)[..., 0].astype(jnp.int32))


def unsupported_reason(x_BTD, a_BTD, *_):
    """Why the kernel cannot run this call; empty if it can."""
    if jnp.float64 in (x_BTD.dtype, a_BTD.dtype):
        return "has no float64"
    if x_BTD.shape[-1] < CHANNELS or x_BTD.shape[-1] % ALIGNED:
        return f"needs at least {CHANNELS} channels, a multiple of {ALIGNED}"
    return tiles.unsupported_reason(())


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

    def scan(x, a, state, starts, h, final, *scratch):
        row, channels = _place(x_BTD.shape[2])

        def compute(t, token, h_D):
            x_D, a_D, start = token
            h_D = jnp.where(start != 0, 0.0, a_D) * h_D + x_D
            h[row, t, channels] = h_D.astype(x_BTD.dtype)
            return h_D

        sources = x.at[row, :, channels], a.at[row, :, channels], starts.at[row]
        final[row, channels] = _walk(length, sources, scratch, compute, _load(state.at[row, channels]), backwards=False)

    out_type = jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype), jax.ShapeDtypeStruct(state_BD.shape, jnp.float32)
    return _call(scan, out_type, x_BTD, a_BTD)(x_BTD, a_BTD, state_BD, _whole_turns(starts_BT))


def _backward_kernel(dh_BTD, dfinal_BD, a_BTD, h_BTD, state_BD, starts_BT):
    length = dh_BTD.shape[1]

    def scan_backwards(dh, dfinal, a, h, state, starts, dx, da, dstate, *scratch):
        row, channels = _place(dh_BTD.shape[2])

        def compute(t, token, carry):
            """A token's h is the one before of the token after it, whose da it completes."""
            dh_D, a_D, h_D, start = token
            from_later_D, reaching_D = carry
            complete(t + 1, reaching_D, h_D)
            g_D = dh_D + from_later_D
            dx[row, t, channels] = g_D.astype(dh_BTD.dtype)
            a_D = jnp.where(start != 0, 0.0, a_D)
            return a_D * g_D, jnp.where(start != 0, 0.0, g_D)

        def complete(t, reaching_D, before_D):
            @pl.when(t < length)
            def _():
                da[row, t, channels] = (reaching_D * before_D).astype(a_BTD.dtype)

        sources = *(x.at[row, :, channels] for x in (dh, a, h)), starts.at[row]
        first = _load(dfinal.at[row, channels])
        from_later_D, reaching_D = _walk(length, sources, scratch, compute, (first, first), backwards=True)
        complete(0, reaching_D, _load(state.at[row, channels]))
        dstate[row, channels] = from_later_D

    out_type = (
        jax.ShapeDtypeStruct(dh_BTD.shape, dh_BTD.dtype),
        jax.ShapeDtypeStruct(a_BTD.shape, a_BTD.dtype),
        jax.ShapeDtypeStruct(state_BD.shape, jnp.float32),
    )
    call = _call(scan_backwards, out_type, dh_BTD, a_BTD, h_BTD)
    return call(dh_BTD, dfinal_BD, a_BTD, h_BTD, state_BD, _whole_turns(starts_BT))


def _walk(length, sources, scratch, compute, carry, *, backwards):
    """`compute(t, [number of each source at t], carry)` for all t in order, whole turns of them from shared memory."""
    *slots, loaded = scratch
    turns, rest = divmod(length, TURN)
    order = range(TURN)[::-1] if backwards else range(TURN)
    first_of = lambda number: TURN * (turns - 1 - number if backwards else number)

    def fetch(number):
        slot, tokens = lax.rem(number, STAGES), pl.ds(first_of(number), TURN)
        tiles.fetch([(source.at[tokens], x_s.at[slot]) for source, x_s in zip(sources, slots)], loaded.at[slot])

    def read(refs, index):
        return [_load(ref.at[index]) if len(ref.shape) > 1 else ref[index] for ref in refs]

    def take_rest(done, carry):
        t = length - 1 - done if backwards else length - rest + done
        return compute(t, read(sources, t), carry)

    def take_turn(number, carry):
        slot = lax.rem(number, STAGES)
        plgpu.barrier_wait(loaded.at[slot])
        plgpu.commit_smem()  # all warps are past the turn before, whose slot is filled now
        pl.when(number + STAGES - 1 < turns)(lambda: fetch(number + STAGES - 1))
        # All of them first, so that none waits for another.
        tokens = [read([x_s.at[slot] for x_s in slots], index) for index in order]
        for index, token in zip(order, tokens):
            carry = compute(first_of(number) + index, token, carry)
        return carry

    for number in range(min(STAGES - 1, turns)):
        fetch(jnp.int32(number))
    if backwards:
        carry = lax.fori_loop(0, rest, take_rest, carry)
    carry = lax.fori_loop(0, turns, take_turn, carry)
    return carry if backwards else lax.fori_loop(0, rest, take_rest, carry)


def _whole_turns(starts_BT):
    """Rows as long as the copy engine wants them."""
    return jnp.pad(starts_BT, ((0, 0), (0, -starts_BT.shape[1] % TURN)))


def _place(channels):
    """This program's row, and its channels: the last block is moved back to end where the channels do."""
    first = jnp.minimum(lax.axis_index("part") * CHANNELS, channels - CHANNELS)
    return lax.axis_index("row"), pl.ds(first, CHANNELS)


def _load(ref):
    return tiles.untiled(ref, LANES).astype(jnp.float32)


def _call(kernel, out_type, *walked):
    """The kernel, with room for turns of the arrays that it walks and of the starts."""
    rows, _, channels = walked[0].shape
    return tiles.kernel(
        kernel,
        out_type=out_type,
        grid=(rows, -(-channels // CHANNELS)),
        grid_names=("row", "part"),
        scratch_types=[
            *(plgpu.SMEM((STAGES, TURN, CHANNELS), x.dtype) for x in walked),
            plgpu.SMEM((STAGES, TURN), jnp.int32),
            plgpu.Barrier(num_arrivals=len(walked) + 1, num_barriers=STAGES),
        ],
        compiler_params=tiles.COMPILER,
    )
