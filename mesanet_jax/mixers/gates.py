"""The decays of a matrix memory, by name: modules from the stream x [..., D] to log gamma, float32.

D model width, H heads, K key size.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.layers import Linear, param
from mesanet_jax.schema import Field

# What the scalar decays read of a family's section.
DECAY_FIELDS = {
    "decay": Field("sigmoid", "form of the decay gate: sigmoid of the stream, or softplus, Mamba2's exp(-A softplus(x + b))", choices=("sigmoid", "softplus"), fixed=True),
    "decay_bias_init": Field(0.0, "initial bias of the decay gate, 0 starts gamma at one half", fixed=True),
    "decay_bias_init_last": Field(None, "bias of the last head, the others spaced from the first", kind=float, fixed=True),
    "decay_rate_init": Field((1.0, 16.0), "softplus: A starts uniform between these", fixed=True),
    "decay_step_init": Field((1e-3, 1e-1), "softplus: softplus(b) starts log-uniform between these", fixed=True),
}  # fmt: skip
# And those of families whose op can forget each key channel by itself.
VECTOR_DECAY_FIELDS = DECAY_FIELDS | {
    "decay": Field("sigmoid", "as elsewhere, or low_rank: a sigmoid a key channel, its logits of low rank", choices=("sigmoid", "softplus", "low_rank"), fixed=True),
    "decay_rank": Field(16, "low_rank: rank of the logits", at_least=1, fixed=True),
    "decay_temperature": Field(16.0, "low_rank: divisor of log gamma", above=0.0, fixed=True),
}  # fmt: skip


class SigmoidDecay(Linear):
    """gamma = sigmoid(W x + b), one a head: [..., D] -> [..., H] (MesaNet, G.2)."""

    def __init__(self, dim: int, heads: int, key_size: int, *, options, rngs: nnx.Rngs):
        super().__init__(dim, heads, axes=("embed", "heads"), rngs=rngs, bias_init=bias_init(options))

    def __call__(self, x):
        return jax.nn.log_sigmoid(super().__call__(x.astype(jnp.float32)))


class SoftplusDecay(Linear):
    """gamma = exp(-A softplus(W x + b)), one a head: [..., D] -> [..., H] (Mamba2, arXiv 2405.21060; Gated DeltaNet,
    2412.06464). softplus(W x + b) is the step size of a continuous memory that decays at rate A."""

    def __init__(self, dim: int, heads: int, key_size: int, *, options, rngs: nnx.Rngs):
        step_init = lambda *args: _inverse_softplus(_log_uniform(*args, bounds=options.decay_step_init))
        super().__init__(dim, heads, axes=("embed", "heads"), rngs=rngs, bias_init=step_init)
        rate_init = lambda *args: jnp.log(_uniform(*args, bounds=options.decay_rate_init))
        self.A_log = param(rngs, rate_init, (heads,), ("heads",))

    def step_size(self, x):
        return jax.nn.softplus(super().__call__(x.astype(jnp.float32)))

    def __call__(self, x):
        return -jnp.exp(self.A_log[...]) * self.step_size(x)


class LowRankDecay(nnx.Module):
    """gamma = sigmoid(W2 W1 x + b)^(1/temperature), one a key channel: [..., D] -> [..., H, K] (GLA, arXiv 2312.06635)."""

    def __init__(self, dim: int, heads: int, key_size: int, *, options, rngs: nnx.Rngs):
        rank, self.heads, self.temperature = options.decay_rank, heads, options.decay_temperature
        self.down = Linear(dim, rank, axes=("embed", None), rngs=rngs)
        self.up = Linear(rank, heads * key_size, axes=(None, "heads"), rngs=rngs, bias_init=bias_init(options))

    def __call__(self, x):
        logits = self.up(self.down(x.astype(jnp.float32)))
        return jax.nn.log_sigmoid(logits.reshape(*x.shape[:-1], self.heads, -1)) / self.temperature


SMALLEST = 1e-4  # initial step size (the floor of mamba_ssm/modules/mamba2.py) or rate
DECAYS = {"sigmoid": SigmoidDecay, "softplus": SoftplusDecay, "low_rank": LowRankDecay}


def bias_init(options):
    """Biases in equal steps from the first to the last; all the first where no last is given."""
    last = options.decay_bias_init if options.decay_bias_init_last is None else options.decay_bias_init_last
    return lambda key, shape, dtype: jnp.asarray(np.linspace(options.decay_bias_init, last, *shape), dtype)


def check_ranges(section: str, options) -> None:
    """Refuses initial ranges of the softplus decay that are none."""
    for name in ("decay_rate_init", "decay_step_init"):
        bounds = options[name]
        if not (len(bounds) == 2 and all(type(x) in (int, float) for x in bounds) and 0 <= bounds[0] < bounds[1]):
            raise UserError(f"config.model.{section}.{name}={bounds}: needs two numbers, 0 <= first < second")


def _uniform(key, shape, dtype, *, bounds):
    """Not quite down to zero, whose logarithm no optimizer could move."""
    low, high = bounds
    return jax.random.uniform(key, shape, dtype, jnp.maximum(low, SMALLEST), high)


def _log_uniform(key, shape, dtype, *, bounds):
    return jnp.exp(jax.random.uniform(key, shape, dtype, *np.log(np.maximum(bounds, SMALLEST))))


def _inverse_softplus(x):
    return x + jnp.log(-jnp.expm1(-x))
