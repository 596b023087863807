"""Conjugate gradients on many small linear systems at once: every row (one token of one head) is a system of its own.

The solver knows the layer only as (operator, diagonal, right-hand side). The chunk-parallel form, the decoding step,
the forward and the backward pass all use it, so they agree even before it has converged. docs/mesa.md, "The solver".

R any leading axes, K size of a system.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# The rounding unit of float32. The kernels stop a row once its residual has shrunk by this factor: what is left of the
# updated residual is rounding error.
ROUNDING = float(jnp.finfo(jnp.float32).eps)


class Solution(NamedTuple):
    """Solutions x and the number of iterations that each row took, int32."""

    x_RK: jax.Array
    iterations_R: jax.Array


class _Iterate(NamedTuple):
    """The state of the iteration.

    Attributes:
      iteration: how many iterations have been done.
      x_RK: the current solutions.
      residual_RK: rhs - operator(x), updated rather than computed anew.
      direction_RK: the next search direction; in a row that restarts, x itself.
      delta_R: the squared norm of the residual.
      rho_R: the inner product of the residual and the preconditioned residual.
      floor_R: the value of delta below which the updated residual says nothing about the true one.
      restart_R: whether the next iteration computes the true residual instead of a step along a direction.
      iterations_R: how many iterations each row has taken.
    """

    iteration: jax.Array
    x_RK: jax.Array
    residual_RK: jax.Array
    direction_RK: jax.Array
    delta_R: jax.Array
    rho_R: jax.Array
    floor_R: jax.Array
    restart_R: jax.Array
    iterations_R: jax.Array


def conjugate_gradients(
    operator: Callable, diagonal_RK: jax.Array, rhs_RK: jax.Array, *, max_iters: int, tol: float
) -> Solution:
    """Solves operator(x) = rhs for a symmetric positive definite operator (MesaNet, appendix C, algorithm 1).

    The solution starts at rhs / diagonal. A row stops once the norm of its residual is at most `tol` times that of its
    first one; tol = 0 runs `max_iters` iterations. A right-hand side is solved at unit norm and the solution scaled
    back, so a loss gradient of norm 1e-8 is solved as well as a unit query, and a zero right-hand side gives zero.

    The residual is updated rather than computed anew, so the rounding error of the first one would stay in it; that
    error is large where keys repeat. A row whose residual has shrunk to rounding error therefore spends one iteration
    on computing its true residual and goes on from there (iterative refinement). This also avoids 0 / 0.

    Args:
      operator: [R, K] -> [R, K], linear in each row.
      diagonal_RK: the diagonal of the operator, positive.
      rhs_RK: right-hand sides of any norm.
      max_iters: the largest number of iterations.
      tol: the relative residual at which a row stops.

    Returns:
      x [R, K] in the dtype of rhs, and the iterations that each row took, int32 [R].
    """
    unit_RK, norm_R1 = normalize(rhs_RK)
    start_RK = unit_RK / diagonal_RK
    residual_RK = unit_RK - operator(start_RK)
    problem = operator, lambda r_RK: r_RK, unit_RK
    x_RK, iterations_R = _iterate(problem, start_RK, residual_RK, max_iters=max_iters, tol=tol)
    return Solution(x_RK * norm_R1, iterations_R)


def preconditioned_conjugate_gradients(
    operator: Callable, precondition: Callable, rhs_RK: jax.Array, *, max_iters: int, tol: float
) -> Solution:
    """Solves operator(x) = rhs like `conjugate_gradients`, with a preconditioner and starting from zero.

    A row stops once the norm of its residual is at most `tol` times that of its right-hand side.

    Args:
      operator: [R, K] -> [R, K], linear in each row.
      precondition: [R, K] -> [R, K], an approximate inverse of the operator; symmetric positive definite and linear in
        each row.
      rhs_RK, max_iters, tol: as in `conjugate_gradients`.
    """
    unit_RK, norm_R1 = normalize(rhs_RK)
    problem = operator, precondition, unit_RK
    x_RK, iterations_R = _iterate(problem, jnp.zeros_like(unit_RK), unit_RK, max_iters=max_iters, tol=tol)
    return Solution(x_RK * norm_R1, iterations_R)


def _iterate(problem, x_RK, residual_RK, *, max_iters, tol) -> Solution:
    """Iterates from x and its residual. `problem` is (operator, precondition, right-hand sides of unit norm)."""
    _, precondition, _ = problem
    delta_R, direction_RK = _squared_norm(residual_RK), precondition(residual_RK)
    stop_R = tol * tol * delta_R

    def advance(state):
        active_R = state.delta_R > stop_R if tol > 0 else jnp.ones_like(state.restart_R)
        return _advance(problem, active_R, state)

    def unfinished(state):
        return (state.iteration < max_iters) & jnp.any(state.delta_R > stop_R)

    state = _Iterate(
        iteration=jnp.int32(0),
        x_RK=x_RK,
        residual_RK=residual_RK,
        direction_RK=direction_RK,
        delta_R=delta_R,
        rho_R=jnp.sum(residual_RK * direction_RK, axis=-1),
        floor_R=_rounding_floor(delta_R),
        restart_R=jnp.zeros(delta_R.shape, bool),
        iterations_R=jnp.zeros(delta_R.shape, jnp.int32),
    )
    if tol > 0:
        state = jax.lax.while_loop(unfinished, advance, state)
    else:  # without a stopping test, no iteration needs a reduction over the devices of a mesh
        state = jax.lax.fori_loop(0, max_iters, lambda _, state: advance(state), state)
    return Solution(state.x_RK, state.iterations_R)


def _advance(problem, active_R, state):
    """Returns the state after one iteration. Inactive rows take a step of length 0, so that no bit of x changes."""
    operator, precondition, unit_RK = problem
    restart_R = state.restart_R & active_R
    image_RK = operator(state.direction_RK)
    curvature_R = jnp.sum(state.direction_RK * image_RK, axis=-1)
    length_R = divide_positive(state.rho_R, curvature_R, active_R & ~state.restart_R)
    x_RK = state.x_RK + length_R[..., None] * state.direction_RK
    residual_RK = jnp.where(
        restart_R[..., None], unit_RK - image_RK, state.residual_RK - length_R[..., None] * image_RK
    )
    preconditioned_RK = precondition(residual_RK)
    delta_R, rho_R = _squared_norm(residual_RK), jnp.sum(residual_RK * preconditioned_RK, axis=-1)
    floor_R = jnp.where(restart_R, _rounding_floor(delta_R), state.floor_R)
    next_restart_R = ~state.restart_R & (delta_R <= floor_R)
    momentum_R = divide_positive(rho_R, state.rho_R, ~state.restart_R)
    next_RK = preconditioned_RK + momentum_R[..., None] * state.direction_RK
    direction_RK = jnp.where(next_restart_R[..., None], x_RK, next_RK)
    return _Iterate(
        state.iteration + 1,
        x_RK,
        residual_RK,
        direction_RK,
        delta_R,
        rho_R,
        floor_R,
        next_restart_R,
        state.iterations_R + active_R.astype(jnp.int32),
    )


def _rounding_floor(delta_R):
    """Returns the squared norm that rounding errors alone give a residual that began with the squared norm delta."""
    return float(jnp.finfo(delta_R.dtype).eps) ** 2 * delta_R


def normalize(rhs_RK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns rows of unit norm [R, K] and the norms [R, 1], 1 for a zero row.

    Rows are first divided by their largest entry, because the squares of numbers like 1e-30 are 0 in float32.
    """
    largest_R1 = jnp.max(jnp.abs(rhs_RK), axis=-1, keepdims=True)
    largest_R1 = jnp.where(largest_R1 > 0, largest_R1, 1)
    scaled_RK = rhs_RK / largest_R1
    norm_R1 = jnp.sqrt(jnp.sum(scaled_RK * scaled_RK, axis=-1, keepdims=True))
    norm_R1 = jnp.where(norm_R1 > 0, norm_R1, 1)
    return scaled_RK / norm_R1, largest_R1 * norm_R1


def _squared_norm(x_RK):
    """Returns the squared norm of every row."""
    return jnp.sum(x_RK * x_RK, axis=-1)


def divide_positive(a, b, valid):
    """Returns a / b, or 0 where not `valid` or where b is not positive; any shapes that broadcast.

    The divisors of conjugate gradients are positive in exact arithmetic. Rounding can leave them at or below 0, where a
    quotient would be meaningless.
    """
    valid = valid & (b > 0)
    return jnp.where(valid, a / jnp.where(valid, b, 1.0), 0.0)
