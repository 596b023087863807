"""A learned mixture of branches; its weights depend on the layer, not on the input (PHA, arXiv 2606.16093, abstract).

N branches.
"""

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.layers import param


def _normalized(p_N):
    weights_N = jax.nn.softplus(p_N)
    return weights_N / jnp.sum(weights_N, axis=-1, keepdims=True)


# From the learned scalars p to the weights of the branches. The abstract's "normalised via Softplus" may mean either of
# the first two; the third learns nothing, for comparison.
WEIGHTS = {
    "normalized": _normalized,
    "raw": jax.nn.softplus,
    "uniform": lambda p_N: jnp.full_like(p_N, 1 / p_N.shape[-1]),
}


class Mixture(nnx.Module):
    """sum_i w_i z_i over the branches z_i, where w comes from learned scalars p that start at zero.

    Args:
      names: the branches, in the order in which they are given.
      kind: how w follows from p, a key of WEIGHTS.
    """

    def __init__(self, names: tuple[str, ...], kind: str, *, rngs: nnx.Rngs):
        self.names, self.kind = names, kind
        learned = kind != "uniform"
        self.mixing = param(rngs, jax.nn.initializers.zeros, (len(names),), (None,)) if learned else None

    def weights(self) -> jax.Array:
        """The weights of the branches, [N] float32."""
        return WEIGHTS[self.kind](jnp.zeros(len(self.names)) if self.mixing is None else self.mixing[...])

    def __call__(self, branches: Sequence[jax.Array]) -> jax.Array:
        """The weighted sum of the branches in float32, whatever their dtype."""
        weighted = [w * z.astype(jnp.float32) for w, z in zip(self.weights(), branches, strict=True)]
        return reduce(jnp.add, weighted)

    def stats(self, label: str) -> dict[str, jax.Array]:
        """{"label/branch": its weight}; empty if nothing is learned."""
        if self.mixing is None:
            return {}
        return {f"{label}/{name}": weight for name, weight in zip(self.names, self.weights(), strict=True)}
