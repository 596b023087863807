"""Gates of a matrix memory: how strongly a token is written, and how much of the memory remains.

Each is a module from the stream x [..., D] to float32. The decays are listed in `DECAYS` under the names that a config
uses; they return log gamma.

D model width, H heads, K key size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.layers import Initializer, Linear, param
from mesanet_jax.schema import Config, Field

# Options of the decays with one scalar per head.
DECAY_FIELDS = {
    "decay": Field(
        "sigmoid",
        "form of the decay gate: sigmoid(x), or softplus for exp(-A softplus(x + b)) as in Mamba2",
        choices=("sigmoid", "softplus"),
        fixed=True,
    ),
    "decay_bias_init": Field(
        0.0,
        "initial bias of the decay gate's first head; 0 starts with a decay of one half",
        fixed=True,
    ),
    "decay_bias_init_last": Field(
        None,
        "initial bias of the last head, with the others equally spaced between; none: that of the first head",
        kind=float,
        fixed=True,
    ),
    "decay_rate_init": Field(
        (1.0, 16.0),
        "softplus: range in which the initial rate A is uniform",
        fixed=True,
    ),
    "decay_step_init": Field(
        (1e-3, 1e-1),
        "softplus: range in which the initial step size softplus(b) is log-uniform",
        fixed=True,
    ),
}
# Options of a family whose op also accepts a separate decay for each key channel.
VECTOR_DECAY_FIELDS = DECAY_FIELDS | {
    "decay": Field(
        "sigmoid",
        "form of the decay gate: sigmoid or softplus, one per head; low_rank: a sigmoid per key channel, with logits "
        "of low rank",
        choices=("sigmoid", "softplus", "low_rank"),
        fixed=True,
    ),
    "decay_rank": Field(16, "low_rank: rank of the logits", at_least=1, fixed=True),
    "decay_temperature": Field(16.0, "low_rank: divisor of log gamma", above=0.0, fixed=True),
}
SMALLEST = 1e-4  # lower bound of initial step sizes (as in mamba_ssm/modules/mamba2.py) and rates


class InputGate(Linear):
    """beta = sigmoid(W x + b), one per head: [..., D] -> [..., H] (MesaNet, appendix G.2)."""

    def __init__(self, dim: int, heads: int, *, rngs: nnx.Rngs):
        super().__init__(dim, heads, axes=("embed", "heads"), rngs=rngs, bias_init=jax.nn.initializers.zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(super().__call__(x.astype(jnp.float32)))


class SigmoidDecay(Linear):
    """gamma = sigmoid(W x + b), one per head: [..., D] -> [..., H] (MesaNet, appendix G.2)."""

    def __init__(self, dim: int, heads: int, key_size: int, *, options: Config, rngs: nnx.Rngs):
        bias_init = spaced_biases(options.decay_bias_init, options.decay_bias_init_last)
        super().__init__(dim, heads, axes=("embed", "heads"), rngs=rngs, bias_init=bias_init)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.log_sigmoid(super().__call__(x.astype(jnp.float32)))


class SoftplusDecay(Linear):
    """gamma = exp(-A softplus(W x + b)), one per head: [..., D] -> [..., H].

    softplus(W x + b) is the step size with which a continuous memory that decays at the rate A is discretised (Mamba2,
    arXiv 2405.21060; Gated DeltaNet, arXiv 2412.06464).
    """

    def __init__(self, dim: int, heads: int, key_size: int, *, options: Config, rngs: nnx.Rngs):
        def step_init(key, shape, dtype):
            return _inverse_softplus(_log_uniform(key, shape, dtype, bounds=options.decay_step_init))

        def log_rate_init(key, shape, dtype):
            return jnp.log(_uniform(key, shape, dtype, bounds=options.decay_rate_init))

        super().__init__(dim, heads, axes=("embed", "heads"), rngs=rngs, bias_init=step_init)
        self.A_log = param(rngs, log_rate_init, (heads,), ("heads",))

    def step_size(self, x: jax.Array) -> jax.Array:
        return jax.nn.softplus(super().__call__(x.astype(jnp.float32)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return -jnp.exp(self.A_log[...]) * self.step_size(x)


class LowRankDecay(nnx.Module):
    """gamma = sigmoid(W2 W1 x + b)^(1 / temperature), one per key channel: [..., D] -> [..., H, K].

    GLA, arXiv 2312.06635.
    """

    def __init__(self, dim: int, heads: int, key_size: int, *, options: Config, rngs: nnx.Rngs):
        rank, self.heads, self.temperature = options.decay_rank, heads, options.decay_temperature
        bias_init = spaced_biases(options.decay_bias_init, options.decay_bias_init_last)
        self.down = Linear(dim, rank, axes=("embed", None), rngs=rngs)
        self.up = Linear(rank, heads * key_size, axes=(None, "heads"), rngs=rngs, bias_init=bias_init)

    def __call__(self, x: jax.Array) -> jax.Array:
        logits = self.up(self.down(x.astype(jnp.float32)))
        return jax.nn.log_sigmoid(logits.reshape(*x.shape[:-1], self.heads, -1)) / self.temperature


Decay = SigmoidDecay | SoftplusDecay | LowRankDecay
DECAYS: dict[str, Callable[..., Decay]] = {
    "sigmoid": SigmoidDecay,
    "softplus": SoftplusDecay,
    "low_rank": LowRankDecay,
}


def spaced_biases(first: float, last: float | None) -> Initializer:
    """Returns the initializer of biases in equal steps from `first` to `last`; all are `first` if `last` is None."""
    last = first if last is None else last
    return lambda key, shape, dtype: jnp.asarray(np.linspace(first, last, *shape), dtype)


def check_ranges(section: str, options: Config) -> None:
    """Raises UserError if an initial range of the softplus decay is not two increasing numbers."""
    for name in ("decay_rate_init", "decay_step_init"):
        bounds = options[name]
        if not (len(bounds) == 2 and all(type(x) in (int, float) for x in bounds) and 0 <= bounds[0] < bounds[1]):
            raise UserError(f"config.model.{section}.{name}={bounds}: needs two numbers, 0 <= first < second")


def _uniform(key, shape, dtype, *, bounds):
    """Uniform between the bounds, the lower one at least `SMALLEST`: a rate of zero has no finite logarithm."""
    low, high = bounds
    return jax.random.uniform(key, shape, dtype, jnp.maximum(low, SMALLEST), high)


def _log_uniform(key, shape, dtype, *, bounds):
    return jnp.exp(jax.random.uniform(key, shape, dtype, *np.log(np.maximum(bounds, SMALLEST))))


def _inverse_softplus(x):
    return x + jnp.log(-jnp.expm1(-x))
