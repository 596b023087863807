"""The causal convolution on NVIDIA GPUs: a kernel each way, each array moved about once (Pallas, Mosaic GPU).

It is bound by the bytes it moves. A program has a span of tokens of some channels, looks W - 1 tokens further back and, in
the backward pass, as many further ahead: no program waits for another. A thread walks its channels in time with the last
inputs in registers, and reads tokens a turn ahead of those it computes.

B batch, T time, D channels, W taps, X = W - 1 earlier inputs, S spans, Y = W + 1 sums: taps and bias. In a kernel taps are
in the order of the inputs that they meet: the token, the one before, ...
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.dispatch import require
from mesanet_kernels.ops.causal_conv1d import xla
from mesanet_kernels.partition import on_a_device, partitioned
from mesanet_kernels.tiles import gpu as tiles

SPAN = 128  # tokens of a program
# Tokens read ahead; more would take registers from which other programs run meanwhile.
FORWARD_TURN = 8
BACKWARD_TURN = 4
THREADS = 128
TAPS = range(2, 9)


def causal_conv1d(activation, x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT):
    """As `api.causal_conv1d`. Raises NotImplementedError where the kernel lacks what the call needs."""
    require("causal_conv1d", "pallas_gpu", unsupported_reason(activation, x_BTD, w_WD))
    y_BTD = _convolve(activation, x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT)
    # Not of `_convolve`: where nobody uses the last inputs, no gradient of theirs is added to all of dx.
    return y_BTD, xla.last_inputs(x_BTD, tail_BXD, segment_ids_BT)


def unsupported_reason(activation, x_BTD, w_WD, *_):
    """Why the kernel cannot run this call; empty if it can."""
    if jnp.float64 in (x_BTD.dtype, w_WD.dtype):
        return "has no float64"
    if on_a_device("H", x_BTD.shape[-1]) < THREADS:
        return f"needs at least {THREADS} channels on a device"
    if w_WD.shape[0] not in TAPS:
        return f"needs {TAPS[0]} to {TAPS[-1]} taps"
    return tiles.unsupported_reason(())


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(activation, x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT):
    # Channels lie on the mesh axis that heads do.
    return partitioned(
        partial(_forward_kernel, activation), (x_BTD, w_WD, bias_D, tail_BXD, _reach(segment_ids_BT, len(w_WD))),
        axes=("BTH", "WH", "H", "BXH", "BT"), results=("BTH",),
    )[0]  # fmt: skip


def _forward(activation, *inputs):
    return _convolve(activation, *inputs), inputs


def _backward(activation, inputs, dy_BTD):
    x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT = inputs
    dx_BTD, sums_BSYD = partitioned(
        partial(_backward_kernel, activation),
        (x_BTD, dy_BTD, w_WD, bias_D, tail_BXD, _reach(segment_ids_BT, len(w_WD))),
        axes=("BTH", "BTH", "WH", "H", "BXH", "BT"), results=("BTH", "BSYH"),
    )  # fmt: skip
    sums_YD = jnp.sum(sums_BSYD, axis=(0, 1))
    dw_WD, dbias_D = sums_YD[-2::-1].astype(w_WD.dtype), sums_YD[-1].astype(bias_D.dtype)

    few = slice(0, len(w_WD) - 1)  # the tokens that the tail reaches
    of_few = lambda tail: xla.causal_conv1d(activation, x_BTD[:, few], w_WD, bias_D, tail, segment_ids_BT[:, few])[0]
    _, through_few = jax.vjp(of_few, tail_BXD)
    return dx_BTD, dw_WD, dbias_D, *through_few(dy_BTD[:, few]), None


_convolve.defvjp(_forward, _backward)


def _reach(segment_ids_BT, width):
    """How many of the W - 1 inputs before a token are of its document, int32 [B, T]."""
    return sum(xla.same_document(segment_ids_BT, width, tap)[..., 0].astype(jnp.int32) for tap in range(width - 1))


def _forward_kernel(activation, x_BTD, w_WD, bias_D, tail_BXD, reach_BT):
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

        _walk(part, read, compute, part.earlier(x, tail), turn=FORWARD_TURN)

    out_type = (jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype),)
    return _call(convolve, out_type, x_BTD)(x_BTD, w_WD, bias_D, tail_BXD, reach_BT)


def _backward_kernel(activation, x_BTD, dy_BTD, w_WD, bias_D, tail_BXD, reach_BT):
    """dx [B, T, D], and the sums of every span for dw, taps in a kernel's order, and dbias, float32 [B, S, Y, D]."""
    (batch, length, channels), width = x_BTD.shape, w_WD.shape[0]

    def convolve_backwards(x, dy, w, bias, tail, reach, dx, sums):
        part = _part(x)
        x, dy, dx, tail, reach = *map(part.of_row, (x, dy, dx, tail)), reach.at[part.row]
        taps, bias_D = part.parameters(w, bias)
        zero_D = plgpu.layout_cast(jnp.zeros(bias_D.shape, jnp.float32), part.layout)

        def read(t):
            return part.load(x.at[t]), part.load(dy.at[t]), reach[t]

        def through_activation(token, earlier):
            """The inputs that a token's sum is of, and the gradient of the sum."""
            x_D, dy_D, reach = token
            window = (x_D.astype(jnp.float32), *earlier)
            _, slope_D = ACTIVATIONS[activation](_weighted(bias_D, taps, window, reach))
            return window, dy_D.astype(jnp.float32) * slope_D

        def spread(t, dz_D, reach, unfinished):
            """Adds to dx of the token and of those before it, and writes the earliest, which is complete.

            Those before the span are another program's: they go where the span's first token will overwrite them.
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
        earlier, unfinished, of_taps, of_bias_D = _walk(part, read, compute, carry, turn=BACKWARD_TURN)
        for index, sum_D in enumerate((*of_taps, of_bias_D)):
            sums[part.row, lax.axis_index("span"), index, part.channels] = sum_D

        following = [part.last + ahead for ahead in range(1, width)]
        tokens = [read(jnp.minimum(t, length - 1)) for t in following]
        for t, (x_D, dy_D, reach) in zip(following, tokens):
            reach = jnp.where(t < length, reach, 0)  # past the end nothing reaches back
            window, dz_D = through_activation((x_D, dy_D, reach), earlier)
            earlier, unfinished = window[:-1], spread(t, dz_D, reach, unfinished)

    out_type = (
        jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype),
        jax.ShapeDtypeStruct((batch, pl.cdiv(length, SPAN), width + 1, channels), jnp.float32),
    )
    return _call(convolve_backwards, out_type, x_BTD)(x_BTD, dy_BTD, w_WD, bias_D, tail_BXD, reach_BT)


def _silu(z_D):
    """1 / (1 + e^-z) is the square of a root, for which the GPU has an instruction; it divides in many."""
    sigmoid_D = jnp.square(lax.rsqrt(1 + jnp.exp(-z_D)))
    y_D = z_D * sigmoid_D
    return y_D, sigmoid_D + y_D * (1 - sigmoid_D)


ACTIVATIONS = {None: lambda z_D: (z_D, 1.0), "silu": _silu}  # value and slope


def _weighted(bias_D, taps, window, reach):
    """The sum before the activation."""
    sum_D = bias_D + taps[0] * window[0]
    for back in range(1, len(taps)):
        sum_D = jnp.where(reach >= back, sum_D + taps[back] * window[back], sum_D)
    return sum_D


def _add(totals, terms, reach):
    """totals + terms, one for every tap; where the document does not reach as far back, the total alone."""
    first, *others = (total + term for total, term in zip(totals, terms, strict=True))
    return first, *(jnp.where(reach >= back, new, totals[back]) for back, new in enumerate(others, 1))


def _walk(part, read, compute, carry, *, turn):
    """`compute(t, read(t), carry)` for the tokens of the span in order, each read `turn` tokens before."""
    turns = (part.last + 1 - part.first) // turn

    def take_turn(number, state):
        tokens, carry = list(state[0]), state[1]
        # The last turn has none after it and reads itself once more, from the nearest cache.
        now, then = (part.first + turn * jnp.minimum(number + later, turns - 1) for later in (0, 1))
        for ahead in range(turn):
            carry = compute(now + ahead, tokens[ahead], carry)
            tokens[ahead] = read(then + ahead)  # into the registers of the token that is done
        return tokens, carry

    tokens = [read(jnp.minimum(part.first + ahead, part.last)) for ahead in range(turn)]
    _, carry = lax.fori_loop(0, turns, take_turn, (tokens, carry))
    rest = part.first + turn * turns
    return lax.fori_loop(rest, part.last + 1, lambda t, carry: compute(t, read(t), carry), carry)


class _Part(NamedTuple):
    """What a program has: a span of tokens of a row, from `first` to `last`, and some channels."""

    row: jax.Array
    first: jax.Array
    last: jax.Array
    channels: pl.Slice
    layout: plgpu.Layout

    def of_row(self, ref):
        """[B, T, D] -> [T, D], the program's channels of it."""
        return ref.at[self.row, :, self.channels]

    def load(self, ref):
        """A number of each channel, as it is stored, which takes the fewest registers."""
        return tiles.untiled(ref, self.layout)

    def earlier(self, x, tail):
        """The W - 1 inputs before the span, the last one first: of the row, or from before it."""
        kept = tail.shape[0]
        of_row = [self.load(x.at[jnp.maximum(self.first - back, 0)]) for back in range(1, kept + 1)]
        before_row = [self.load(tail.at[kept - back]) for back in range(1, kept + 1)]
        return tuple(jnp.where(self.first > 0, *inputs).astype(jnp.float32) for inputs in zip(of_row, before_row))

    def parameters(self, w, bias):
        """The taps, the token's own first, and the bias."""
        load = lambda ref: self.load(ref).astype(jnp.float32)
        return [load(w.at[tap, self.channels]) for tap in range(w.shape[0])[::-1]], load(bias.at[self.channels])


def _part(x):
    """This program's: the last block of channels is moved back to end where they do, and writes some a second time."""
    _, length, channels = x.shape
    each = _channels_of_a_thread(x)
    block = each * THREADS
    first = lax.axis_index("span") * SPAN
    return _Part(
        row=lax.axis_index("row"),
        first=first,
        last=jnp.minimum(first + SPAN, length) - 1,
        channels=pl.ds(jnp.minimum(lax.axis_index("part") * block, channels - block), block),
        layout=plgpu.Layout.WG_STRIDED((block,), vec_size=each),
    )


def _channels_of_a_thread(x):
    """Two where they lie in one word of every token."""
    channels = x.shape[-1]
    return 2 if channels % 2 == 0 and channels >= 2 * THREADS else 1


def _call(kernel, out_type, x_BTD):
    rows, length, channels = x_BTD.shape
    return tiles.kernel(
        kernel,
        out_type=out_type,
        grid=(rows, pl.cdiv(length, SPAN), pl.cdiv(channels, _channels_of_a_thread(x_BTD) * THREADS)),
        grid_names=("row", "span", "part"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # no thread reads what another wrote
        ),
    )
