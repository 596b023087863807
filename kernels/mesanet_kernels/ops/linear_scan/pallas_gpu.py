"""The linear scan on NVIDIA GPUs, with one thread per channel (Pallas, Mosaic GPU).

Memory bandwidth limits the recurrence, and a row of 1024 channels occupies only eight blocks of threads. Therefore the
kernels read and write each array once, the copy engine brings groups of tokens to shared memory ahead of time, one flag
per token marks where documents start, and the backward kernel computes both gradients in one pass.

B batch, T time, D channels.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.dispatch import require
from mesanet_kernels.ops.linear_scan.differentiable import reset_mask
from mesanet_kernels.partition import partitioned
from mesanet_kernels.tiles import gpu as tiles

CHANNELS = 128  # channels per block, one thread for each
GROUP = 32  # tokens that are copied together: the copy engine needs 128 bytes of the flags
STAGES = 3  # groups in shared memory: one is computed while the others are copied
ALIGNED = 8  # the number of channels is a multiple: 16 bytes of bfloat16, the smallest copy
LANES = plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1)


def linear_scan_pallas_gpu(x_BTD, a_BTD, state_BD, segment_ids_BT) -> tuple[jax.Array, jax.Array]:
    """Computes `api.linear_scan`. Raises NotImplementedError if the kernel does not support the call."""
    require("linear_scan", "pallas_gpu", unsupported_reason(x_BTD, a_BTD))
    return _scan_with_gradient(x_BTD, a_BTD, state_BD, reset_mask(segment_ids_BT)[..., 0].astype(jnp.int32))


def unsupported_reason(x_BTD, a_BTD, *_) -> str:
    """Returns why the kernel cannot run this call; empty if it can."""
    if jnp.float64 in (x_BTD.dtype, a_BTD.dtype):
        return "has no float64"
    if x_BTD.shape[-1] < CHANNELS or x_BTD.shape[-1] % ALIGNED:
        return f"needs at least {CHANNELS} channels, a multiple of {ALIGNED}"
    return tiles.unsupported_reason(())


def _scan(x_BTD, a_BTD, state_BD, starts_BT) -> tuple[jax.Array, jax.Array]:
    """Returns (h [B, T, D], the final state [B, D])."""
    return _forward(x_BTD, a_BTD, state_BD, starts_BT)[0]


def _forward(x_BTD, a_BTD, state_BD, starts_BT):
    # Channels are split over the mesh axes of the heads, therefore the letter H.
    arrays = (x_BTD, a_BTD, state_BD, starts_BT)
    h_BTD, final_BD = partitioned(_forward_kernel, arrays, axes=("BTH", "BTH", "BH", "BT"), results=("BTH", "BH"))
    return (h_BTD, final_BD), (a_BTD, h_BTD, state_BD, starts_BT)


def _backward(saved, cotangents):
    """Computes g_t = dh_t + a_{t+1} g_{t+1} from the last token to the first; dx_t = g_t and da_t = g_t h_{t-1}."""
    dx_BTD, da_BTD, dstate_BD = partitioned(
        _backward_kernel, (*cotangents, *saved),
        axes=("BTH", "BH", "BTH", "BTH", "BH", "BT"), results=("BTH", "BTH", "BH"),
    )  # fmt: skip
    return dx_BTD, da_BTD, dstate_BD, None


_scan_with_gradient = jax.custom_vjp(_scan)
_scan_with_gradient.defvjp(_forward, _backward)


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
    return _call(scan, out_type, x_BTD, a_BTD)(x_BTD, a_BTD, state_BD, _pad_to_groups(starts_BT))


def _backward_kernel(dh_BTD, dfinal_BD, a_BTD, h_BTD, state_BD, starts_BT):
    length = dh_BTD.shape[1]

    def scan_backwards(dh, dfinal, a, h, state, starts, dx, da, dstate, *scratch):
        row, channels = _place(dh_BTD.shape[2])

        def compute(t, token, carry):
            """Computes a token. Its h is the previous state of the next token, so da of that token follows too."""
            dh_D, a_D, h_D, start = token
            from_later_D, gradient_D = carry
            write_da(t + 1, gradient_D, h_D)
            g_D = dh_D + from_later_D
            dx[row, t, channels] = g_D.astype(dh_BTD.dtype)
            a_D = jnp.where(start != 0, 0.0, a_D)
            return a_D * g_D, jnp.where(start != 0, 0.0, g_D)

        def write_da(t, gradient_D, previous_D):
            @pl.when(t < length)
            def _():
                da[row, t, channels] = (gradient_D * previous_D).astype(a_BTD.dtype)

        sources = *(x.at[row, :, channels] for x in (dh, a, h)), starts.at[row]
        first = _load(dfinal.at[row, channels])
        from_later_D, gradient_D = _walk(length, sources, scratch, compute, (first, first), backwards=True)
        write_da(0, gradient_D, _load(state.at[row, channels]))
        dstate[row, channels] = from_later_D

    out_type = (
        jax.ShapeDtypeStruct(dh_BTD.shape, dh_BTD.dtype),
        jax.ShapeDtypeStruct(a_BTD.shape, a_BTD.dtype),
        jax.ShapeDtypeStruct(state_BD.shape, jnp.float32),
    )
    call = _call(scan_backwards, out_type, dh_BTD, a_BTD, h_BTD)
    return call(dh_BTD, dfinal_BD, a_BTD, h_BTD, state_BD, _pad_to_groups(starts_BT))


def _walk(length, sources, scratch, compute, carry, *, backwards):
    """Runs `carry = compute(t, [the value of each source at t], carry)` for all tokens t in order.

    Whole groups of tokens are read from shared memory, the remaining tokens of the row directly.
    """
    *slots, loaded = scratch
    groups, rest = divmod(length, GROUP)
    order = range(GROUP)[::-1] if backwards else range(GROUP)

    def first_of(number):
        return GROUP * (groups - 1 - number if backwards else number)

    def fetch(number):
        slot, tokens = lax.rem(number, STAGES), pl.ds(first_of(number), GROUP)
        tiles.fetch([(source.at[tokens], x_s.at[slot]) for source, x_s in zip(sources, slots)], loaded.at[slot])

    def read(refs, index):
        return [_load(ref.at[index]) if len(ref.shape) > 1 else ref[index] for ref in refs]

    def compute_rest(done, carry):
        t = length - 1 - done if backwards else length - rest + done
        return compute(t, read(sources, t), carry)

    def compute_group(number, carry):
        slot = lax.rem(number, STAGES)
        plgpu.barrier_wait(loaded.at[slot])
        plgpu.commit_smem()  # all warps have finished the previous group, whose slot is refilled now
        pl.when(number + STAGES - 1 < groups)(lambda: fetch(number + STAGES - 1))
        # Read all tokens first, so that no read waits for a computation.
        tokens = [read([x_s.at[slot] for x_s in slots], index) for index in order]
        for index, token in zip(order, tokens):
            carry = compute(first_of(number) + index, token, carry)
        return carry

    for number in range(min(STAGES - 1, groups)):
        fetch(jnp.int32(number))
    if backwards:
        carry = lax.fori_loop(0, rest, compute_rest, carry)
    carry = lax.fori_loop(0, groups, compute_group, carry)
    return carry if backwards else lax.fori_loop(0, rest, compute_rest, carry)


def _pad_to_groups(starts_BT):
    """Pads the rows to whole groups, as the copy engine needs."""
    return jnp.pad(starts_BT, ((0, 0), (0, -starts_BT.shape[1] % GROUP)))


def _place(channels):
    """Returns the row and the channels of this program. The last block is moved back to end at the last channel."""
    first = jnp.minimum(lax.axis_index("part") * CHANNELS, channels - CHANNELS)
    return lax.axis_index("row"), pl.ds(first, CHANNELS)


def _load(ref):
    return tiles.untiled(ref, LANES).astype(jnp.float32)


def _call(kernel, out_type, *walked):
    """Returns `kernel` as a function of arrays.

    Its scratch memory holds groups of tokens of the arrays `walked` and of the flags where documents start.
    """
    rows, _, channels = walked[0].shape
    return tiles.kernel(
        kernel,
        out_type=out_type,
        grid=(rows, -(-channels // CHANNELS)),
        grid_names=("row", "part"),
        scratch_types=[
            *(plgpu.SMEM((STAGES, GROUP, CHANNELS), x.dtype) for x in walked),
            plgpu.SMEM((STAGES, GROUP), jnp.int32),
            plgpu.Barrier(num_arrivals=len(walked) + 1, num_barriers=STAGES),
        ],
        compiler_params=tiles.COMPILER,
    )
