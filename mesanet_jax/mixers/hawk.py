"""Hawk: a gated linear recurrence in every channel, the RG-LRU (Griffin, arXiv 2402.19427, sections 2.3 and 2.4).

B batch, T time, D model width, R recurrence width, N blocks of a gate, I = R/N inputs of a block, W conv taps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import Linear, fan_in_normal, param
from mesanet_jax.mixers.backends import for_other_ops, implementation_field
from mesanet_jax.schema import Config, Field
from mesanet_kernels import causal_conv1d, causal_conv1d_step, document_starts, linear_scan, linear_scan_step

DECAY_POWER = 8.0  # c in a_t = a^(c r_t), section 2.4
MAX_ROOT_GRADIENT = 1000.0  # bound on the derivative of sqrt(1 - a^2), which is infinite at a = 1


class HawkState(NamedTuple):
    """The decoding state of one layer; its size does not depend on the number of tokens."""

    conv: jax.Array  # [B, W-1, R], the last inputs of the convolution
    h: jax.Array  # [B, R] float32
    next_position: jax.Array  # [] int32, the number of tokens so far: the first one is not scaled


class Hawk(nnx.Module):
    """Two branches: a GELU gate, and a convolution followed by the RG-LRU; their product goes back to the stream."""

    FIELDS = {
        "expansion": Field(
            1.25,
            "width of the recurrence over model.dim (MesaNet, appendix G)",
            above=0.0,
            fixed=True,
        ),
        "num_blocks": Field(
            None,
            "number of diagonal blocks in the matrices of the two gates; none: model.heads",
            kind=int,
            at_least=1,
            fixed=True,
        ),
        "conv_width": Field(4, "taps of the causal convolution", at_least=2, fixed=True),
        "decay_init": Field(
            "griffin",
            "which initial decay is uniform between 0.9 and 0.999: griffin, that of an open gate, a^8; "
            "recurrentgemma, a itself (there, a^2 is uniform)",
            choices=("griffin", "recurrentgemma"),
            fixed=True,
        ),
        "implementation": implementation_field("linear_scan"),
    }

    @staticmethod
    def check(model: Config) -> None:
        """Raises UserError if the blocks of the gates do not divide the width."""
        width, blocks = _width(model), model.hawk.num_blocks or model.heads
        if width % blocks:
            raise UserError(
                f"config.model.hawk: {blocks} blocks do not divide the width {width}; set num_blocks or expansion"
            )

    def __init__(self, model: Config, *, rngs: nnx.Rngs):
        options, width = model.hawk, _width(model)
        self.implementation = options.implementation
        zeros = jax.nn.initializers.zeros
        branch = lambda: Linear(model.dim, width, axes=("embed", "heads"), rngs=rngs, bias_init=zeros)
        gate = lambda: BlockLinear(width, options.num_blocks or model.heads, rngs=rngs)
        self.gate_branch, self.recurrent_branch = branch(), branch()
        self.conv = Taps(options.conv_width, width, rngs=rngs)
        self.recurrence_gate, self.input_gate = gate(), gate()
        self.lambda_raw = param(rngs, partial(_lambda_init, options.decay_init), (width,), ("heads",))
        out_init = fan_in_normal(model.residual_init_scale / model.layers)
        self.out = Linear(width, model.dim, axes=("heads", "embed"), rngs=rngs, init=out_init)

    def _recurrence(self, x: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns input and decay of the linear scan, [..., R].

        `first` [..., 1] marks the first token of each document, whose input is not scaled.
        """
        log_decay = DECAY_POWER * jax.nn.sigmoid(self.recurrence_gate(x)) * jax.nn.log_sigmoid(self.lambda_raw[...])
        scale = jnp.where(first, 1.0, _bounded_sqrt(-jnp.expm1(2 * log_decay)))
        gated = scale * jax.nn.sigmoid(self.input_gate(x)) * x.astype(jnp.float32)
        return gated.astype(x.dtype), jnp.exp(log_decay)

    def _run(self, x: jax.Array, first: jax.Array, *, convolve: Callable[..., Any], scan: Callable[..., Any]):
        """Returns (y, conv tail, h) of the layer for rows or for one token, as `convolve` and `scan` are."""
        taps_WR, bias_R = self.conv.cast(x.dtype)
        inputs, tail = convolve(self.recurrent_branch(x), taps_WR, bias=bias_R)
        h, last = scan(*self._recurrence(inputs, first))
        return self.out(jax.nn.gelu(self.gate_branch(x)) * h), tail, last

    def _run_rows(
        self,
        x_BTD: jax.Array,
        first: jax.Array,
        *,
        segment_ids: jax.Array | None,
        conv: jax.Array | None,
        h: jax.Array | None,
    ):
        conv_implementation = for_other_ops(self.implementation)
        convolve = partial(
            causal_conv1d, segment_ids=segment_ids, initial_state=conv, implementation=conv_implementation
        )
        scan = partial(linear_scan, segment_ids=segment_ids, initial_state=h, implementation=self.implementation)
        return self._run(x_BTD, first, convolve=convolve, scan=scan)

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        first_BT1 = document_starts(segment_ids_BT)[..., None]
        return self._run_rows(x_BTD, first_BT1, segment_ids=segment_ids_BT, conv=None, h=None)[0]

    def init_state(self, batch: int, *, max_length: int, dtype: jax.typing.DTypeLike) -> HawkState:
        del max_length  # the state has a constant size
        taps, width = self.conv.kernel.shape[-2:]
        conv, h = jnp.zeros((batch, taps - 1, width), dtype), jnp.zeros((batch, width), jnp.float32)
        return HawkState(conv, h, jnp.zeros((), jnp.int32))

    def extend(self, x_BTD: jax.Array, state: HawkState) -> tuple[jax.Array, HawkState]:
        length = x_BTD.shape[1]
        first_T1 = (state.next_position + jnp.arange(length) == 0)[:, None]
        y_BTD, conv, h = self._run_rows(x_BTD, first_T1, segment_ids=None, conv=state.conv, h=state.h)
        return y_BTD, HawkState(conv, h, state.next_position + length)

    def decode_step(self, x_BD: jax.Array, state: HawkState) -> tuple[jax.Array, HawkState]:
        conv_implementation = for_other_ops(self.implementation)
        convolve = partial(causal_conv1d_step, state=state.conv, implementation=conv_implementation)
        scan = partial(linear_scan_step, state=state.h, implementation=self.implementation)
        y_BD, conv, h = self._run(x_BD, state.next_position == 0, convolve=convolve, scan=scan)
        return y_BD, HawkState(conv, h, state.next_position + 1)

    def flops_per_token(self, seq_len: int) -> Flops:
        """Counts projections, convolution and gates; the recurrence is elementwise."""
        del seq_len
        width, dim = self.out.kernel.shape[-2:]
        taps, (_, inputs, _) = self.conv.kernel.shape[-2], self.input_gate.kernel.shape[-3:]
        return products(2 * width * (3 * dim + taps + 2 * inputs))


class Taps(nnx.Module):
    """Taps [W, R] and bias [R] of a depthwise convolution; variance 0.01 / W, as in recurrentgemma."""

    def __init__(self, taps: int, width: int, *, rngs: nnx.Rngs):
        self.kernel = param(rngs, fan_in_normal(0.01), (taps, width), (None, "heads"))
        self.bias = param(rngs, jax.nn.initializers.zeros, (width,), ("heads",))

    def cast(self, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
        return self.kernel[...].astype(dtype), self.bias[...].astype(dtype)


class BlockLinear(nnx.Module):
    """[..., R] -> [..., R] float32 by a block-diagonal matrix with `blocks` blocks, and a bias."""

    def __init__(self, width: int, blocks: int, *, rngs: nnx.Rngs):
        init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
        self.kernel = param(rngs, init, (blocks, width // blocks, width // blocks), ("heads", None, None))
        self.bias = param(rngs, jax.nn.initializers.zeros, (width,), ("heads",))

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel_NIJ = self.kernel[...].astype(x.dtype)
        x_NI = x.reshape(*x.shape[:-1], *kernel_NIJ.shape[:2])
        y_NJ = jnp.einsum("...ni,nij->...nj", x_NI, kernel_NIJ, preferred_element_type=jnp.float32)
        return y_NJ.reshape(x.shape) + self.bias[...]


def _width(model: Config) -> int:
    return round(model.hawk.expansion * model.dim)


def _lambda_init(kind: str, key, shape, dtype) -> jax.Array:
    """Returns Lambda, where a = sigmoid(Lambda)."""
    low, high = 0.9, 0.999
    if kind == "griffin":
        log_a = jnp.log(jax.random.uniform(key, shape, dtype, low, high)) / DECAY_POWER
    else:
        log_a = jnp.log(jax.random.uniform(key, shape, dtype, low**2, high**2)) / 2
    return log_a - jnp.log(-jnp.expm1(log_a))


@jax.custom_jvp
def _bounded_sqrt(x: jax.Array) -> jax.Array:
    """sqrt(x), with a derivative of at most `MAX_ROOT_GRADIENT`."""
    return jnp.sqrt(x)


@_bounded_sqrt.defjvp  # pyright: ignore[reportFunctionMemberAccess]
def _bounded_sqrt_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    root = jnp.sqrt(x)
    return root, dx * 0.5 / jnp.maximum(root, 0.5 / MAX_ROOT_GRADIENT)
