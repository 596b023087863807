"""The diagonal system of a state space, discretised by zero-order hold with a step of one token.

    s' = Lambda s + v      gives      s_t = e^Lambda s_{t-1} + (e^Lambda - 1) / Lambda v_t

N modes.
"""

import math

import jax
import jax.numpy as jnp

# Beyond it nothing changes in float32: the decay over a million tokens is 1 or the decay over one token is 0. Inside
# it, |Lambda|^2 neither overflows nor underflows.
LARGEST_LOG = 40.0
SERIES_RADIUS = 0.5
SERIES_TERMS = 16  # the first one left out is 0.5^16 / 17!, far below the rounding of float64


def zero_order_hold(log_rate_N, log_frequency_N):
    """Lambda = -exp(log_rate) + i exp(log_frequency) and the gain (e^Lambda - 1) / Lambda of the input, complex [N]."""
    rate_N, frequency_N = (jnp.exp(jnp.clip(x, -LARGEST_LOG, LARGEST_LOG)) for x in (log_rate_N, log_frequency_N))
    lambda_N = jax.lax.complex(-rate_N, frequency_N)
    return lambda_N, _gain(lambda_N)


def expm1(z):
    """e^z - 1 of complex numbers, as exact as z near 0."""
    return z * _gain(z)


def _gain(z):
    """(e^z - 1) / z, by its Taylor series near 0, where the quotient and still more its derivative cancel."""
    near = jnp.abs(z) < SERIES_RADIUS
    inside = jnp.where(near, z, 0)
    outside = jnp.where(near, 1, z)
    series = jnp.zeros_like(z)
    for k in range(SERIES_TERMS, 0, -1):
        series = series * inside + 1 / math.factorial(k)
    return jnp.where(near, series, (jnp.exp(outside) - 1) / outside)
