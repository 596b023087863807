"""The few parametrised layers that every family shares.

B batch, T time, D model width, F feed-forward width, H heads, K head size, E any input size, O any output size.

Every parameter is an `nnx.Param` that carries the logical names of its axes (`mesanet_jax.mesh`). Parameters are
float32; layers compute in the dtype of their input, reductions in float32.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

Initializer = Callable[..., jax.Array]


def param(rngs: nnx.Rngs, init: Initializer, shape: Sequence[int], axes: Sequence[str | None]) -> nnx.Param:
    """A float32 parameter whose dimensions are named `axes`."""
    return nnx.Param(init(rngs.params(), tuple(shape), jnp.float32), axes=tuple(axes))


def fan_in_normal(scale: float = 1.0) -> Initializer:
    """Normal with variance scale / fan_in (MesaNet, appendix G: all weights, scale 2/N towards the residual)."""
    return jax.nn.initializers.variance_scaling(scale, "fan_in", "normal")


class Linear(nnx.Module):
    """[..., E] -> [..., O]."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        axes: tuple[str | None, str | None],
        rngs: nnx.Rngs,
        init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ):
        self.kernel = param(rngs, init or fan_in_normal(), (in_size, out_size), axes)
        self.bias = param(rngs, bias_init, (out_size,), axes[1:]) if bias_init else None

    def __call__(self, x):
        y = x @ self.kernel[...].astype(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32; the scale starts at one."""

    def __init__(self, size: int, *, rngs: nnx.Rngs, eps: float, axes: tuple[str | None] = ("embed",)):
        self.scale = param(rngs, jax.nn.initializers.ones, (size,), axes)
        self.eps = eps

    def __call__(self, x):
        return _rms_norm(x, self.scale[...], self.eps)


class SwiGLU(nnx.Module):
    """Two branches D -> F, SiLU on one, their product back to D (MesaNet, appendix E)."""

    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs, out_init: Initializer):
        self.gate = Linear(dim, hidden, axes=("embed", "mlp"), rngs=rngs)
        self.up = Linear(dim, hidden, axes=("embed", "mlp"), rngs=rngs)
        self.down = Linear(hidden, dim, axes=("mlp", "embed"), rngs=rngs, init=out_init)

    def __call__(self, x_BTD):
        return self.down(_silu_product(self.gate(x_BTD), self.up(x_BTD)))


# Elementwise work is cheaper to do again than to keep: float32 copies in the norms and the factors of SiLU were half of
# what a Transformer block saved. No barrier against CSE: the loop over blocks separates the two passes already.
_recomputed = partial(jax.checkpoint, prevent_cse=False)


@partial(_recomputed, static_argnums=2)
def _rms_norm(x, scale_D, eps):
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + eps) * scale_D).astype(x.dtype)


@partial(_recomputed, static_argnums=1)
def rms_normalize(x, eps: float):
    """x / rms(x) over the last axis, in float32: RMSNorm without a gain."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)).astype(x.dtype)


@_recomputed
def _silu_product(gate, up):
    return jax.nn.silu(gate) * up


def l2_normalize(x, *, eps: float = 1e-6):
    """x / ||x|| over the last axis, in float32, eps inside the root (MesaNet, appendix E)."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.sum(jnp.square(x32), axis=-1, keepdims=True) + eps)).astype(x.dtype)


def rotary(x_BTHK, positions_T, *, base: float):
    """Rotary position embedding, half-split pairs (Su et al. 2021), angles in float32."""
    half = x_BTHK.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_T1F = positions_T.astype(jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles_T1F), jnp.sin(angles_T1F)
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHK.dtype)


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, *, rngs: nnx.Rngs) -> nnx.Module:
    """`count` independently initialised copies of a module as one module whose parameters have a leading axis."""
    keys = jax.random.split(rngs.params(), count)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    return nnx.merge(graphdef, jax.vmap(lambda key: nnx.state(make(nnx.Rngs(params=key))))(keys))
