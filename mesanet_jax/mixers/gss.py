"""Gated state spaces (GSS, Mehta et al., arXiv 2206.13947): a wide gate around a narrow diagonal state space.

B batch, T time, D model width, F gate width, H channels of the state space, N modes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import Linear, fan_in_normal, param
from mesanet_jax.schema import Field
from mesanet_kernels import diagonal_ssm, diagonal_ssm_step

S4D_STEPS = (1e-3, 1e-1)  # S4D's range of step sizes: it remembers ten tokens to a thousand


class GSS(nnx.Module):
    """out((W_g SSM(gelu(W_v x))) * gelu(W_u x)), no biases; the state space sees H << F channels.

    Lambda, C and D are float32 and the state space computes in it, whatever the dtype of the stream. Weight decay
    leaves Lambda and D alone.
    """

    FIELDS = {
        "expansion": Field(1.5, "width of the gate over model.dim; the paper's 4 is for blocks without a feed-forward layer", above=0.0, fixed=True),
        "ssm_width": Field(0.375, "channels of the state space over model.dim; the paper: 0.25", above=0.0, fixed=True),
        "modes": Field(64, "complex modes, shared by all channels; the paper: 512", at_least=1, fixed=True),
        "input_norm": Field(True, "LayerNorm before the state space", fixed=True),
        "init": Field(
            "dss",
            "initial modes: dss, standard normal as published, most forget in tens of tokens; "
            "s4d, those of S4D-Lin, which remember ten to a thousand",
            choices=("dss", "s4d"),
            fixed=True,
        ),
        "chunk_size": Field(None, "tokens a chunk of the parallel form; none: the kernel library's choice", kind=int, at_least=1),
        "implementation": Field(None, "diagonal_ssm backend of the kernel library; none: the best that applies", kind=str, choices=("reference", "xla")),
    }  # fmt: skip

    @staticmethod
    def check(model) -> None:
        for name in ("expansion", "ssm_width"):
            if not _width(model, name):
                raise UserError(f"config.model.gss.{name}={model.gss[name]}: no channel is left of {model.dim}")

    def __init__(self, model, *, rngs: nnx.Rngs):
        options, wide, narrow = model.gss, _width(model, "expansion"), _width(model, "ssm_width")
        self.parallel = {name: options[name] for name in ("chunk_size", "implementation")}
        self.gate = Linear(model.dim, wide, axes=("embed", "heads"), rngs=rngs)
        self.value = Linear(model.dim, narrow, axes=("embed", "heads"), rngs=rngs)
        self.norm = LayerNorm(narrow, rngs=rngs, eps=model.norm_eps) if options.input_norm else None
        lambda_2N, c_scale_N = INITS[options.init](rngs.params(), options.modes)
        normal = jax.nn.initializers.normal(1.0)
        c_init = lambda key, shape, dtype: c_scale_N * normal(key, shape, dtype)
        # log(-Re Lambda) and log(Im Lambda), real and imaginary part of C
        self.lambda_raw = param(rngs, lambda *_: lambda_2N, lambda_2N.shape, (None, None))
        self.C = param(rngs, c_init, (2, narrow, options.modes), (None, "heads", None))
        self.D = param(rngs, normal, (narrow,), ("heads",))
        # Split over its outputs, like the gate that they meet: what is gathered is the narrow side.
        self.widen = Linear(narrow, wide, axes=(None, "heads"), rngs=rngs)
        out_init = fan_in_normal(model.residual_init_scale / model.layers)
        self.out = Linear(wide, model.dim, axes=("heads", "embed"), rngs=rngs, init=out_init)

    def _run(self, x, ssm):
        """The layer around the state space in the form, parallel or of one token, that `ssm` has: (y, state)."""
        v = jax.nn.gelu(self.value(x))
        v = v if self.norm is None else self.norm(v)
        v, state = ssm(v, *self.lambda_raw[...], *self.C[...], self.D[...])
        return self.out(self.widen(v) * jax.nn.gelu(self.gate(x))), state

    def __call__(self, x_BTD, segment_ids_BT):
        return self._run(x_BTD, partial(diagonal_ssm, segment_ids=segment_ids_BT, **self.parallel))[0]

    def init_state(self, batch: int, *, max_length: int, dtype):
        """Real and imaginary part of the state, [B,H,N] float32; its size does not depend on the length."""
        del max_length, dtype
        empty = jnp.zeros((batch, *self.C.shape[-2:]), jnp.float32)
        return empty, empty

    def extend(self, x_BTD, state):
        return self._run(x_BTD, partial(diagonal_ssm, initial_state=state, **self.parallel))

    def decode_step(self, x_BD, state):
        return self._run(x_BD, partial(diagonal_ssm_step, state=state, implementation=self.parallel["implementation"]))

    def flops_per_token(self, seq_len: int) -> Flops:
        """Projections; of the state space in chunks of C tokens: the C x C product a channel, a write to the 2N real
        numbers of a channel's state, and a read. Its kernel, made once for all rows, is not counted."""
        (narrow, wide), dim = self.widen.kernel.shape[-2:], self.out.kernel.shape[-1]
        chunk = min(self.parallel["chunk_size"] or 32, seq_len)
        state = 2 * self.C.shape[-1]
        return products(2 * (2 * dim * wide + dim * narrow + narrow * wide) + 2 * narrow * (chunk + 2 * state))


class LayerNorm(nnx.Module):
    """(x - mean) / deviation * scale + bias over the last axis, in float32."""

    def __init__(self, size: int, *, rngs: nnx.Rngs, eps: float):
        self.scale = param(rngs, jax.nn.initializers.ones, (size,), ("heads",))
        self.bias = param(rngs, jax.nn.initializers.zeros, (size,), ("heads",))
        self.eps = eps

    def __call__(self, x):
        centred = x.astype(jnp.float32) - jnp.mean(x.astype(jnp.float32), axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + self.eps) * self.scale[...] + self.bias[...]).astype(x.dtype)


def _width(model, name: str) -> int:
    return round(model.gss[name] * model.dim)


def _dss(key, modes: int):
    """Standard normal logarithms, C as it is drawn (the published code)."""
    return jax.random.normal(key, (2, modes)), jnp.ones(modes)


def _s4d(key, modes: int):
    """S4D-Lin (arXiv 2206.11893): Lambda = step (-1/2 + i pi n), C and its input scaled by the step.

    Steps are a mode's here, not a channel's, as channels share the modes; n + 1/2 in place of n has a logarithm.
    """
    log_step_N = jax.random.uniform(key, (modes,), minval=np.log(S4D_STEPS[0]), maxval=np.log(S4D_STEPS[1]))
    log_frequency_N = log_step_N + np.log(np.pi * (np.arange(modes) + 0.5))
    return jnp.stack([log_step_N + np.log(0.5), log_frequency_N]), jnp.exp(log_step_N)


INITS = {"dss": _dss, "s4d": _s4d}
