"""A learned mixture: branches summed with weights that depend on the layer and on no input (PHA).

N branches.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.layers import param

# Weights of scores p: "softplus-normalised" may mean either of the first two.
WEIGHTS = {
    "normalized": lambda p_N: jax.nn.softplus(p_N) / jnp.sum(jax.nn.softplus(p_N), axis=-1, keepdims=True),
    "raw": jax.nn.softplus,
    "uniform": lambda p_N: jnp.full_like(p_N, 1 / p_N.shape[-1]),
}


class Mixture(nnx.Module):
    """sum_i w_i z_i over the branches `names`, w = softplus(p) / sum softplus(p), p = 0 at first; `kind` is of WEIGHTS."""

    def __init__(self, names: tuple[str, ...], kind: str, *, rngs: nnx.Rngs):
        self.names, self.kind = names, kind
        learned = kind != "uniform"
        self.mixing = param(rngs, jax.nn.initializers.zeros, (len(names),), (None,)) if learned else None

    def weights(self):
        """[N] float32."""
        return WEIGHTS[self.kind](jnp.zeros(len(self.names)) if self.mixing is None else self.mixing[...])

    def __call__(self, branches):
        """The sum in float32, whatever the dtype of the branches."""
        return sum(w * z.astype(jnp.float32) for w, z in zip(self.weights(), branches, strict=True))

    def observe(self, label: str) -> dict[str, jax.Array]:
        """{"label/branch": its weight}, empty where nothing is learned."""
        if self.mixing is None:
            return {}
        return {f"{label}/{name}": weight for name, weight in zip(self.names, self.weights(), strict=True)}
