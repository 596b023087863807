"""The causal convolution on NVIDIA GPUs, as one kernel for each pass (Pallas, Mosaic GPU).

Memory bandwidth limits the kernels, and they move each array about once. A program computes a block of tokens for some
channels. It also reads the W - 1 tokens before the block and, in the backward pass, the W - 1 tokens after it, so that
no program waits for another. A thread walks through time with the last inputs of its channels in registers. It reads
tokens in groups, one group ahead of the tokens that it computes.

B batch, T time, D channels, W taps, X = W - 1 earlier inputs, S blocks of tokens, Y = W + 1 sums: one for each tap and
one for the bias. Inside the kernels, the taps are in the order of age: first that of the token itself, then that of the
token before it, ...
"""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.dispatch import require
from mesanet_kernels.ops.causal_conv1d import xla
from mesanet_kernels.partition import on_a_device, partitioned
from mesanet_kernels.tiles import gpu as tiles

BLOCK_TOKENS = 128  # tokens per program
# Tokens per group, read together ahead of time. Larger groups need more registers, so fewer programs would share an SM.
FORWARD_GROUP = 8
BACKWARD_GROUP = 4
THREADS = 128
TAPS = range(2, 9)  # the supported W


def causal_conv1d_pallas_gpu(
    activation: str | None, x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT
) -> tuple[jax.Array, jax.Array]:
    """Computes `api.causal_conv1d`. Raises NotImplementedError if the kernel does not support the call."""
    require("causal_conv1d", "pallas_gpu", unsupported_reason(activation, x_BTD, w_WD))
    y_BTD = _convolve_on_mesh(activation, x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT)
    # The last inputs are computed outside the custom VJP, so that no gradient is added to dx if they are not used.
    return y_BTD, xla.last_inputs(x_BTD, tail_BXD, segment_ids_BT)


def unsupported_reason(activation: str | None, x_BTD, w_WD, *_) -> str:
    """Returns why the kernel cannot run this call; empty if it can."""
    if jnp.float64 in (x_BTD.dtype, w_WD.dtype):
        return "has no float64"
    if on_a_device("H", x_BTD.shape[-1]) < THREADS:
        return f"needs at least {THREADS} channels on a device"
    if w_WD.shape[0] not in TAPS:
        return f"needs {TAPS[0]} to {TAPS[-1]} taps"
    return tiles.unsupported_reason(())


def _convolve(activation, x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT) -> jax.Array:
    # Channels are split over the mesh axes of the heads, therefore the letter H.
    return partitioned(
        partial(_forward_kernel, activation), (x_BTD, w_WD, bias_D, tail_BXD, _reach(segment_ids_BT, len(w_WD))),
        axes=("BTH", "WH", "H", "BXH", "BT"), results=("BTH",),
    )[0]  # fmt: skip


def _forward(activation, *inputs):
    return _convolve_on_mesh(activation, *inputs), inputs


def _backward(activation, inputs, dy_BTD):
    x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT = inputs
    dx_BTD, sums_BSYD = partitioned(
        partial(_backward_kernel, activation),
        (x_BTD, dy_BTD, w_WD, bias_D, tail_BXD, _reach(segment_ids_BT, len(w_WD))),
        axes=("BTH", "BTH", "WH", "H", "BXH", "BT"), results=("BTH", "BSYH"),
    )  # fmt: skip
    sums_YD = jnp.sum(sums_BSYD, axis=(0, 1))
    dw_WD, dbias_D = sums_YD[-2::-1].astype(w_WD.dtype), sums_YD[-1].astype(bias_D.dtype)

    few = slice(0, len(w_WD) - 1)  # only the first W - 1 tokens read the initial state

    def first_outputs(tail_BXD):
        return xla.causal_conv1d_xla(activation, x_BTD[:, few], w_WD, bias_D, tail_BXD, segment_ids_BT[:, few])[0]

    _, gradient_of_tail = jax.vjp(first_outputs, tail_BXD)
    return dx_BTD, dw_WD, dbias_D, *gradient_of_tail(dy_BTD[:, few]), None


_convolve_on_mesh = jax.custom_vjp(_convolve, nondiff_argnums=(0,))
_convolve_on_mesh.defvjp(_forward, _backward)


def _reach(segment_ids_BT, width: int) -> jax.Array:
    """Returns int32 [B, T]: how many of the W - 1 inputs before a token belong to its document."""
    same_document = (xla.same_document(segment_ids_BT, width, tap) for tap in range(width - 1))
    return cast(jax.Array, sum(same_BT1[..., 0].astype(jnp.int32) for same_BT1 in same_document))


def _forward_kernel(activation, x_BTD, w_WD, bias_D, tail_BXD, reach_BT) -> tuple[jax.Array]:
    """Returns (y [B, T, D],)."""

    def convolve(x, w, bias, tail, reach, y):
        part = _part(x)
        x, y, tail, reach = part.of_row(x), part.of_row(y), part.of_row(tail), reach.at[part.row]
        taps, bias_D = part.parameters(w, bias)

        def read(t):
            return part.load(x.at[t]), reach[t]

        def compute(t, token, earlier):
            x_D, reach = token
            window = (x_D.astype(jnp.float32), *earlier)
            y_D, _ = ACTIVATIONS[activation](_weighted(bias_D, taps, window, reach))
            y[t] = y_D.astype(y.dtype)
            return window[:-1]

        _walk(part, read, compute, part.earlier(x, tail), group_size=FORWARD_GROUP)

    out_type = (jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype),)
    return _call(convolve, out_type, x_BTD)(x_BTD, w_WD, bias_D, tail_BXD, reach_BT)


def _backward_kernel(activation, x_BTD, dy_BTD, w_WD, bias_D, tail_BXD, reach_BT) -> tuple[jax.Array, jax.Array]:
    """Returns (dx [B, T, D], float32 [B, S, Y, D]: the sums of each block for dw, in order of age, and for dbias)."""
    (batch, length, channels), width = x_BTD.shape, w_WD.shape[0]

    def convolve_backwards(x, dy, w, bias, tail, reach, dx, sums):
        part = _part(x)
        x, dy, dx, tail, reach = *map(part.of_row, (x, dy, dx, tail)), reach.at[part.row]
        taps, bias_D = part.parameters(w, bias)
        zero_D = plgpu.layout_cast(jnp.zeros(bias_D.shape, jnp.float32), part.layout)

        def read(t):
            return part.load(x.at[t]), part.load(dy.at[t]), reach[t]

        def through_activation(token, earlier):
            """Returns the inputs of a token's sum and the gradient of the sum."""
            x_D, dy_D, reach = token
            window = (x_D.astype(jnp.float32), *earlier)
            _, slope_D = ACTIVATIONS[activation](_weighted(bias_D, taps, window, reach))
            return window, dy_D.astype(jnp.float32) * slope_D

        def spread(t, dz_D, reach, unfinished):
            """Adds to dx of the token and of the W - 1 tokens before it, and writes that of the earliest, now complete.

            Another program writes dx of the tokens before the block. Here it is written to the place of the block's
            first token, which overwrites it later.
            """
            *unfinished, complete_D = _add((zero_D, *unfinished), [tap_D * dz_D for tap_D in taps], reach)
            dx[jnp.maximum(t - len(unfinished), part.first)] = complete_D.astype(dx.dtype)
            return tuple(unfinished)

        def compute(t, token, carry):
            earlier, unfinished, of_taps, of_bias_D = carry
            *_, reach = token
            window, dz_D = through_activation(token, earlier)
            of_taps = _add(of_taps, [dz_D * x_D for x_D in window], reach)
            return window[:-1], spread(t, dz_D, reach, unfinished), of_taps, of_bias_D + dz_D

        carry = part.earlier(x, tail), (zero_D,) * (width - 1), (zero_D,) * width, zero_D
        earlier, unfinished, of_taps, of_bias_D = _walk(part, read, compute, carry, group_size=BACKWARD_GROUP)
        for index, sum_D in enumerate((*of_taps, of_bias_D)):
            sums[part.row, lax.axis_index("block"), index, part.channels] = sum_D

        following = [part.last + ahead for ahead in range(1, width)]
        tokens = [read(jnp.minimum(t, length - 1)) for t in following]
        for t, (x_D, dy_D, reach) in zip(following, tokens):
            reach = jnp.where(t < length, reach, 0)  # there is no token after the end of the row
            window, dz_D = through_activation((x_D, dy_D, reach), earlier)
            earlier, unfinished = window[:-1], spread(t, dz_D, reach, unfinished)

    out_type = (
        jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype),
        jax.ShapeDtypeStruct((batch, pl.cdiv(length, BLOCK_TOKENS), width + 1, channels), jnp.float32),
    )
    return _call(convolve_backwards, out_type, x_BTD)(x_BTD, dy_BTD, w_WD, bias_D, tail_BXD, reach_BT)


def _silu(z_D):
    """Returns the value and the slope of silu.

    The sigmoid 1 / (1 + e^-z) is computed as the square of a reciprocal square root, which is one instruction on a GPU;
    a division takes several.
    """
    sigmoid_D = jnp.square(lax.rsqrt(1 + jnp.exp(-z_D)))
    y_D = z_D * sigmoid_D
    return y_D, sigmoid_D + y_D * (1 - sigmoid_D)


ACTIVATIONS = {None: lambda z_D: (z_D, 1.0), "silu": _silu}  # each returns the value and the slope


def _weighted(bias_D, taps, window, reach):
    """Returns the sum before the activation."""
    sum_D = bias_D + taps[0] * window[0]
    for back in range(1, len(taps)):
        sum_D = jnp.where(reach >= back, sum_D + taps[back] * window[back], sum_D)
    return sum_D


def _add(totals, terms, reach):
    """Adds one term to the total of each tap whose input belongs to the document of the token."""
    first, *others = (total + term for total, term in zip(totals, terms, strict=True))
    return first, *(jnp.where(reach >= back, new, totals[back]) for back, new in enumerate(others, 1))


def _walk(part, read, compute, carry, *, group_size: int):
    """Runs `carry = compute(t, read(t), carry)` for each token of the block in order.

    Each token is read `group_size` tokens before it is computed.
    """
    groups = (part.last + 1 - part.first) // group_size

    def compute_group(number, state):
        tokens, carry = list(state[0]), state[1]
        # No group follows the last one: it reads its own tokens once more, from the cache.
        now, then = (part.first + group_size * jnp.minimum(number + later, groups - 1) for later in (0, 1))
        for ahead in range(group_size):
            carry = compute(now + ahead, tokens[ahead], carry)
            tokens[ahead] = read(then + ahead)  # reuses the registers of the token just computed
        return tokens, carry

    tokens = [read(jnp.minimum(part.first + ahead, part.last)) for ahead in range(group_size)]
    _, carry = lax.fori_loop(0, groups, compute_group, (tokens, carry))
    rest = part.first + group_size * groups
    return lax.fori_loop(rest, part.last + 1, lambda t, carry: compute(t, read(t), carry), carry)


class _Part(NamedTuple):
    """The part of the arrays that one program computes: tokens `first` to `last` of a row, and some channels.

    The last block of channels is moved back so that it ends at the last channel. It overlaps the block before it, and
    both write the same values there.
    """

    row: jax.Array
    first: jax.Array
    last: jax.Array
    channels: pl.Slice
    layout: Any

    def of_row(self, ref):
        """Selects the program's row and channels: [B, T, D] becomes [T, D]."""
        return ref.at[self.row, :, self.channels]

    def load(self, ref):
        """Loads one number per channel in the dtype in which it is stored, which takes the fewest registers."""
        return tiles.untiled(ref, self.layout)

    def earlier(self, x, tail):
        """Returns the W - 1 inputs before the block, the latest first: from the row, or from the initial state."""
        kept = tail.shape[0]
        of_row = [self.load(x.at[jnp.maximum(self.first - back, 0)]) for back in range(1, kept + 1)]
        before_row = [self.load(tail.at[kept - back]) for back in range(1, kept + 1)]
        return tuple(jnp.where(self.first > 0, *inputs).astype(jnp.float32) for inputs in zip(of_row, before_row))

    def parameters(self, w, bias):
        """Returns (the taps in order of age, the bias)."""
        taps = [self.load(w.at[tap, self.channels]).astype(jnp.float32) for tap in range(w.shape[0])[::-1]]
        return taps, self.load(bias.at[self.channels]).astype(jnp.float32)


def _part(x) -> _Part:
    """Returns the part of this program."""
    _, length, channels = x.shape
    each = _channels_per_thread(x)
    block = each * THREADS
    first = lax.axis_index("block") * BLOCK_TOKENS
    return _Part(
        row=lax.axis_index("row"),
        first=first,
        last=jnp.minimum(first + BLOCK_TOKENS, length) - 1,
        channels=pl.ds(jnp.minimum(lax.axis_index("part") * block, channels - block), block),
        layout=plgpu.Layout.WG_STRIDED((block,), vec_size=each),
    )


def _channels_per_thread(x) -> int:
    """Returns 2 if a pair of channels is aligned in memory for every token, else 1."""
    channels = x.shape[-1]
    return 2 if channels % 2 == 0 and channels >= 2 * THREADS else 1


def _call(kernel, out_type, x_BTD):
    """Returns `kernel` as a function of arrays, with one program for each part of x."""
    rows, length, channels = x_BTD.shape
    return tiles.kernel(
        kernel,
        out_type=out_type,
        grid=(rows, pl.cdiv(length, BLOCK_TOKENS), pl.cdiv(channels, _channels_per_thread(x_BTD) * THREADS)),
        grid_names=("row", "block", "part"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # no thread reads what another thread wrote
        ),
    )
