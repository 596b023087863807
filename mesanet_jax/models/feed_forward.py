"""Feed-forward networks as a branch of a block: they have the calls of a mixer, and no memory.

B batch, T time, D model width.
"""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import Initializer, Linear, SwiGLU, fan_in_normal
from mesanet_jax.models.mixture import Mixture
from mesanet_jax.schema import Config


class GELUNetwork(nnx.Module):
    """down(gelu(up(x))), without biases."""

    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs, out_init: Initializer):
        self.up = Linear(dim, hidden, axes=("embed", "mlp"), rngs=rngs)
        self.down = Linear(hidden, dim, axes=("mlp", "embed"), rngs=rngs, init=out_init)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return self.down(jax.nn.gelu(self.up(x)))


NETWORKS = {"gelu": GELUNetwork, "swiglu": SwiGLU}


class FeedForward(nnx.Module):
    """One network, or two mixed by learned scalars (the dual feed-forward of PHA).

    Args:
      ratio: width of the network divided by the width of the stream.
      auxiliary_ratio: the same for a second network; None for one network alone.
    """

    def __init__(self, model: Config, ratio: float, auxiliary_ratio: float | None = None, *, rngs: nnx.Rngs):
        def network(ratio: float) -> nnx.Module:
            out_init = fan_in_normal(model.residual_init_scale / model.layers)
            return NETWORKS[model.feed_forward](model.dim, round(ratio * model.dim), rngs=rngs, out_init=out_init)

        self.primary = network(ratio)
        self.auxiliary = None if auxiliary_ratio is None else network(auxiliary_ratio)
        dual = self.auxiliary is not None
        self.mixture = Mixture(("primary", "auxiliary"), model.mixing, rngs=rngs) if dual else None

    def _run(self, x):
        if self.auxiliary is None or self.mixture is None:
            return self.primary(x)
        return self.mixture([self.primary(x), self.auxiliary(x)]).astype(x.dtype)

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """The network's output for whole rows."""
        return self._run(x_BTD)

    def with_stats(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The network's output for whole rows, and the weights of the two networks."""
        return self._run(x_BTD), {} if self.mixture is None else self.mixture.stats("ffn_mixture")

    def init_state(self, batch: int, *, max_length: int, dtype: DTypeLike) -> tuple[()]:
        """The empty state: there is no memory."""
        return ()

    def extend(self, x_BTD: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The network's output for T further tokens."""
        return self._run(x_BTD), state

    def decode_step(self, x_BD: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The network's output for one further token."""
        return self._run(x_BD), state

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token."""
        kernels = jax.tree.leaves(nnx.state((self.primary, self.auxiliary)))
        return sum((products(2 * kernel.size) for kernel in kernels), Flops())
