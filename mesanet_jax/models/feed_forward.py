"""Feed-forward networks as a branch of a block: a mixer without a memory."""

import jax
from flax import nnx

from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import Initializer, Linear, SwiGLU, fan_in_normal
from mesanet_jax.models.mixture import Mixture


class GELUNetwork(nnx.Module):
    """down(gelu(up(x))), no biases."""

    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs, out_init: Initializer):
        self.up = Linear(dim, hidden, axes=("embed", "mlp"), rngs=rngs)
        self.down = Linear(hidden, dim, axes=("mlp", "embed"), rngs=rngs, init=out_init)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


NETWORKS = {"gelu": GELUNetwork, "swiglu": SwiGLU}


class FeedForward(nnx.Module):
    """One network `ratio` times as wide as the stream; with `auxiliary_ratio` another, the two mixed by their own scalars."""

    def __init__(self, model, ratio: float, auxiliary_ratio: float | None = None, *, rngs: nnx.Rngs):
        def network(ratio):
            out_init = fan_in_normal(model.residual_init_scale / model.layers)
            return NETWORKS[model.feed_forward](model.dim, round(ratio * model.dim), rngs=rngs, out_init=out_init)

        dual = auxiliary_ratio is not None
        self.primary = network(ratio)
        self.auxiliary = network(auxiliary_ratio) if dual else None
        self.mixture = Mixture(("primary", "auxiliary"), model.mixing, rngs=rngs) if dual else None

    def _run(self, x):
        if self.mixture is None:
            return self.primary(x)
        return self.mixture([self.primary(x), self.auxiliary(x)]).astype(x.dtype)

    def __call__(self, x_BTD, segment_ids_BT):
        return self._run(x_BTD)

    def with_stats(self, x_BTD, segment_ids_BT):
        """As a call, with the weights of the two networks."""
        return self._run(x_BTD), {} if self.mixture is None else self.mixture.observe("ffn_mixture")

    def init_state(self, batch: int, *, max_length: int, dtype):
        return ()

    def extend(self, x_BTD, state):
        return self._run(x_BTD), state

    def decode_step(self, x_BD, state):
        return self._run(x_BD), state

    def flops_per_token(self, seq_len: int) -> Flops:
        networks = (self.primary, self.auxiliary)
        return sum((products(2 * kernel.size) for kernel in jax.tree.leaves(nnx.state(networks))), Flops())
