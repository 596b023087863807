"""The diagonal system of a state space model, discretised by zero-order hold with a step of one token.

    s' = Lambda s + v      gives      s_t = e^Lambda s_{t-1} + (e^Lambda - 1) / Lambda v_t

N modes.
"""

import math

import jax
import jax.numpy as jnp

# Larger absolute values would not change float32 results: the decay over a million tokens is 1 already, or the decay
# over one token is 0. Within this bound, |Lambda|^2 neither overflows nor underflows.
LARGEST_LOG = 40.0
SERIES_RADIUS = 0.5
SERIES_TERMS = 16  # the first omitted term is 0.5^16 / 17!, far below the rounding error of float64


def zero_order_hold(log_rate_N: jax.Array, log_frequency_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns Lambda = -exp(log_rate) + i exp(log_frequency) and the gain (e^Lambda - 1) / Lambda, complex [N]."""
    rate_N, frequency_N = (jnp.exp(jnp.clip(x, -LARGEST_LOG, LARGEST_LOG)) for x in (log_rate_N, log_frequency_N))
    lambda_N = jax.lax.complex(-rate_N, frequency_N)
    return lambda_N, _gain(lambda_N)


def expm1(z: jax.Array) -> jax.Array:
    """Returns e^z - 1 of complex numbers, with a small relative error near 0 too."""
    return z * _gain(z)


def _gain(z: jax.Array) -> jax.Array:
    """Returns (e^z - 1) / z.

    Near 0 it is computed by its Taylor series, because the quotient, and even more its derivative, suffer from
    cancellation there.
    """
    near = jnp.abs(z) < SERIES_RADIUS
    inside = jnp.where(near, z, 0)
    outside = jnp.where(near, 1, z)
    series = jnp.zeros_like(z)
    for k in range(SERIES_TERMS, 0, -1):
        series = series * inside + 1 / math.factorial(k)
    return jnp.where(near, series, (jnp.exp(outside) - 1) / outside)
