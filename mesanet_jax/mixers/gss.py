"""Gated state spaces (GSS, Mehta et al., arXiv 2206.13947): a wide gate around a narrow diagonal state space.

B batch, T time, D model width, F gate width, H channels of the state space, N modes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import Linear, fan_in_normal, param
from mesanet_jax.mixers.backends import implementation_field
from mesanet_jax.schema import Config, Field
from mesanet_kernels import diagonal_ssm, diagonal_ssm_step

S4D_STEPS = (1e-3, 1e-1)  # S4D's range of step sizes: modes remember between ten and a thousand tokens

GSSState = tuple[jax.Array, jax.Array]  # real and imaginary part of the state, each [B, H, N] float32


class GSS(nnx.Module):
    """out(widen(SSM(norm(gelu(value(x))))) * gelu(gate(x))), no biases; the state space has H << F channels.

    Lambda, C and D are float32, and the state space computes in float32 whatever the dtype of the stream. Lambda and D
    have no weight decay.
    """

    FIELDS = {
        "expansion": Field(
            1.5,
            "width of the gate over model.dim (the paper uses 4, in blocks without a feed-forward layer)",
            above=0.0,
            fixed=True,
        ),
        "ssm_width": Field(
            0.375,
            "channels of the state space over model.dim (the paper: 0.25)",
            above=0.0,
            fixed=True,
        ),
        "modes": Field(64, "number of complex modes, shared by all channels (the paper: 512)", at_least=1, fixed=True),
        "input_norm": Field(True, "apply a LayerNorm before the state space", fixed=True),
        "init": Field(
            "dss",
            "initial modes: dss, standard normal as published, most of which forget within tens of tokens; "
            "s4d, those of S4D-Lin, which remember between ten and a thousand tokens",
            choices=("dss", "s4d"),
            fixed=True,
        ),
        "chunk_size": Field(
            None,
            "tokens that the op computes together as one chunk; none: the kernel library's choice",
            kind=int,
            at_least=1,
        ),
        # "fft" cannot keep documents apart.
        "implementation": implementation_field("diagonal_ssm", without=("fft",)),
    }

    @staticmethod
    def check(model: Config) -> None:
        """Raises UserError if a width is rounded to zero."""
        for name in ("expansion", "ssm_width"):
            if not _width(model, name):
                raise UserError(
                    f"config.model.gss.{name}={model.gss[name]}: no channel is left of {model.dim}; "
                    "choose a larger ratio"
                )

    def __init__(self, model: Config, *, rngs: nnx.Rngs):
        options, wide, narrow = model.gss, _width(model, "expansion"), _width(model, "ssm_width")
        self.chunk_size, self.implementation = options.chunk_size, options.implementation
        self.gate = Linear(model.dim, wide, axes=("embed", "heads"), rngs=rngs)
        self.value = Linear(model.dim, narrow, axes=("embed", "heads"), rngs=rngs)
        self.norm = LayerNorm(narrow, rngs=rngs, eps=model.norm_eps) if options.input_norm else None
        lambda_2N, c_scale_N = INITS[options.init](rngs.params(), options.modes)
        normal = jax.nn.initializers.normal(1.0)
        c_init = lambda key, shape, dtype: c_scale_N * normal(key, shape, dtype)
        # log(-Re Lambda) and log(Im Lambda); real and imaginary part of C
        self.lambda_raw = param(rngs, lambda *_: lambda_2N, lambda_2N.shape, (None, None))
        self.C = param(rngs, c_init, (2, narrow, options.modes), (None, "heads", None))
        self.D = param(rngs, normal, (narrow,), ("heads",))
        # Split over its outputs, like the gate that they are multiplied with: devices then exchange the narrow side.
        self.widen = Linear(narrow, wide, axes=(None, "heads"), rngs=rngs)
        out_init = fan_in_normal(model.residual_init_scale / model.layers)
        self.out = Linear(wide, model.dim, axes=("heads", "embed"), rngs=rngs, init=out_init)

    def _run(self, x: jax.Array, ssm: Callable[..., Any]) -> tuple[jax.Array, GSSState]:
        """Returns (y, state) of the layer for rows or for one token, as `ssm` is."""
        v = jax.nn.gelu(self.value(x))
        v = v if self.norm is None else self.norm(v)
        v, state = ssm(v, *self.lambda_raw[...], *self.C[...], self.D[...])
        return self.out(self.widen(v) * jax.nn.gelu(self.gate(x))), state

    def _rows_op(self, **options: Any) -> Callable[..., Any]:
        return partial(diagonal_ssm, chunk_size=self.chunk_size, implementation=self.implementation, **options)

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        return self._run(x_BTD, self._rows_op(segment_ids=segment_ids_BT))[0]

    def init_state(self, batch: int, *, max_length: int, dtype: jax.typing.DTypeLike) -> GSSState:
        del max_length, dtype  # the state has a constant size and is float32
        empty = jnp.zeros((batch, *self.C.shape[-2:]), jnp.float32)
        return empty, empty

    def extend(self, x_BTD: jax.Array, state: GSSState) -> tuple[jax.Array, GSSState]:
        return self._run(x_BTD, self._rows_op(initial_state=state))

    def decode_step(self, x_BD: jax.Array, state: GSSState) -> tuple[jax.Array, GSSState]:
        return self._run(x_BD, partial(diagonal_ssm_step, state=state, implementation=self.implementation))

    def flops_per_token(self, seq_len: int) -> Flops:
        """Counts the projections and the state space in chunks of C tokens.

        For each channel, the state space multiplies with a C x C matrix in a chunk, writes to the 2N real numbers of
        its state and reads them. The matrix is computed once for all rows and not counted.
        """
        (narrow, wide), dim = self.widen.kernel.shape[-2:], self.out.kernel.shape[-1]
        chunk = min(self.chunk_size or 32, seq_len)
        state = 2 * self.C.shape[-1]
        return products(2 * (2 * dim * wide + dim * narrow + narrow * wide) + 2 * narrow * (chunk + 2 * state))


class LayerNorm(nnx.Module):
    """(x - mean) / deviation * scale + bias over the last axis, in float32."""

    def __init__(self, size: int, *, rngs: nnx.Rngs, eps: float):
        self.scale = param(rngs, jax.nn.initializers.ones, (size,), ("heads",))
        self.bias = param(rngs, jax.nn.initializers.zeros, (size,), ("heads",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        centred = x.astype(jnp.float32) - jnp.mean(x.astype(jnp.float32), axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + self.eps) * self.scale[...] + self.bias[...]).astype(x.dtype)


def _width(model: Config, name: str) -> int:
    return round(model.gss[name] * model.dim)


def _dss(key: jax.Array, modes: int) -> tuple[jax.Array, jax.Array]:
    """Returns (logarithms of Lambda [2, N], scale of C [N]): standard normal and one, as in the published code."""
    return jax.random.normal(key, (2, modes)), jnp.ones(modes)


def _s4d(key: jax.Array, modes: int) -> tuple[jax.Array, jax.Array]:
    """As `_dss`, for S4D-Lin (arXiv 2206.11893): Lambda = step (-1/2 + i pi n), and C is scaled by the step.

    The step sizes belong to the modes and not to the channels, since channels share the modes here. n + 1/2 replaces n
    so that the frequency of the first mode has a logarithm.
    """
    log_step_N = jax.random.uniform(key, (modes,), minval=np.log(S4D_STEPS[0]), maxval=np.log(S4D_STEPS[1]))
    log_frequency_N = log_step_N + np.log(np.pi * (np.arange(modes) + 0.5))
    return jnp.stack([log_step_N + np.log(0.5), log_frequency_N]), jnp.exp(log_step_N)


INITS = {"dss": _dss, "s4d": _s4d}
