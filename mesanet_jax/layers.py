"""The parametrised layers that all families share, and the elementwise functions around them.

Every parameter is an `nnx.Param` with the logical names of its axes (`mesanet_jax.mesh` maps them to devices).
Parameters are float32. Layers compute in the dtype of their input, and reductions in float32.

B batch, T time, D model width, F feed-forward width, H heads, K head size, E any input size, O any output size.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

Initializer = Callable[..., jax.Array]


def param(rngs: nnx.Rngs, init: Initializer, shape: Sequence[int], axes: Sequence[str | None]) -> nnx.Param:
    """Returns a float32 parameter whose dimensions have the logical names `axes`."""
    return nnx.Param(init(rngs.params(), tuple(shape), jnp.float32), axes=tuple(axes))


def fan_in_normal(scale: float = 1.0) -> Initializer:
    """Returns the normal initializer with variance scale / fan_in.

    MesaNet (appendix G) uses it for all weights, with scale 2 / layers for those whose output enters the residual
    stream.
    """
    return jax.nn.initializers.variance_scaling(scale, "fan_in", "normal")


class Linear(nnx.Module):
    """A matrix, and a bias if it has an initializer: [..., E] -> [..., O]."""

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

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.kernel[...].astype(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32; the scale starts at one."""

    def __init__(self, size: int, *, rngs: nnx.Rngs, eps: float, axes: tuple[str | None] = ("embed",)):
        self.scale = param(rngs, jax.nn.initializers.ones, (size,), axes)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return _rms_norm(x, self.scale[...], self.eps)


class SwiGLU(nnx.Module):
    """Two branches D -> F, SiLU on one of them, and their product back to D (MesaNet, appendix E)."""

    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs, out_init: Initializer):
        self.gate = Linear(dim, hidden, axes=("embed", "mlp"), rngs=rngs)
        self.up = Linear(dim, hidden, axes=("embed", "mlp"), rngs=rngs)
        self.down = Linear(hidden, dim, axes=("mlp", "embed"), rngs=rngs, init=out_init)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(_silu_product(self.gate(x_BTD), self.up(x_BTD)))


# The backward pass recomputes elementwise work: it costs less than keeping its float32 copies in memory. There is no
# guard against merging the two computations, since the loop over blocks separates the passes already.
_recomputed = partial(jax.checkpoint, prevent_cse=False)


@partial(_recomputed, static_argnums=2)
def _rms_norm(x, scale_D, eps):
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + eps) * scale_D).astype(x.dtype)


@partial(_recomputed, static_argnums=1)
def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """Returns x / rms(x) over the last axis, computed in float32: RMSNorm without a scale."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)).astype(x.dtype)


@_recomputed
def _silu_product(gate, up):
    return jax.nn.silu(gate) * up


def l2_normalize(x: jax.Array, *, eps: float = 1e-6) -> jax.Array:
    """Returns x / sqrt(|x|^2 + eps) over the last axis, computed in float32 (MesaNet, appendix E)."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.sum(jnp.square(x32), axis=-1, keepdims=True) + eps)).astype(x.dtype)


def rotary(x_BTHK: jax.Array, positions_T: jax.Array, *, base: float) -> jax.Array:
    """Applies the rotary position embedding (RoFormer, arXiv 2104.09864), with angles in float32.

    A pair consists of a channel in the first half of a head and the channel at the same place in the second half.
    """
    half = x_BTHK.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_T1F = positions_T.astype(jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles_T1F), jnp.sin(angles_T1F)
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHK.dtype)


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, *, rngs: nnx.Rngs) -> nnx.Module:
    """Returns `count` independently initialised copies of a module as one, whose parameters have a leading axis."""
    keys = jax.random.split(rngs.params(), count)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    return nnx.merge(graphdef, jax.vmap(lambda key: nnx.state(make(nnx.Rngs(params=key))))(keys))
