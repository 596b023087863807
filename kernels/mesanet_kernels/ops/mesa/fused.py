"""What the solvers in kernels share, on GPUs and TPUs."""

import jax.numpy as jnp

# Below this a row's residual is rounding, and the row rests.
ROUNDING = float(jnp.finfo(jnp.float32).eps)


def divide(a, b, valid):
    """a / b; 0 where not valid, or where half precision has left b, which is positive, at or below 0."""
    valid = valid & (b > 0)
    return jnp.where(valid, a / jnp.where(valid, b, 1.0), 0.0)
