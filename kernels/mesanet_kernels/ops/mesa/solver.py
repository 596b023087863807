"""Conjugate gradients on many small systems at once, every row (token and head) a system of its own.

The seam to the layer is (operator, diagonal, right-hand side): the chunk-parallel form, the decode step and
both passes use the same solver, so they agree before convergence too.

R any leading axes, K size of a system.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Solution(NamedTuple):
    x_RK: jax.Array
    iterations_R: jax.Array  # int32


class _Iterate(NamedTuple):
    step: jax.Array
    x_RK: jax.Array
    residual_RK: jax.Array
    direction_RK: jax.Array  # x itself in a row that restarts
    delta_R: jax.Array  # squared norm of the residual
    rho_R: jax.Array  # product of the residual and the preconditioned one
    floor_R: jax.Array  # below it, delta says nothing about the true residual
    restart_R: jax.Array
    iterations_R: jax.Array


def conjugate_gradients(operator: Callable, diagonal_RK, rhs_RK, *, max_iters: int, tol: float) -> Solution:
    """Solves operator(x) = rhs for a symmetric positive definite operator, as in the paper (App. C, Alg. 1).

    It starts at rhs / diagonal, and a row stops once its residual is at most `tol` times the starting one;
    tol = 0 runs `max_iters` steps. A right-hand side is solved at unit norm and scaled back: a loss gradient
    of norm 1e-8 is solved as well as a unit query (mesanet.md 1.7.1), and a zero one gives zero.

    The residual is updated, not computed, so it forgets the rounding of the first one, which is large where
    keys repeat. A row whose residual has shrunk to rounding error spends one step on its true residual and goes on
    from there (iterative refinement); this also keeps 0 / 0 away.

    Args:
      operator: [R, K] -> [R, K], linear in each row.
      diagonal_RK: the operator's diagonal, positive.
      max_iters, tol: Python numbers.

    Returns:
      x [R, K] in rhs's dtype and the steps each row took, int32 [R].
    """
    unit_RK, norm_R1 = normalize(rhs_RK)
    start_RK = unit_RK / diagonal_RK
    residual_RK = unit_RK - operator(start_RK)
    problem = operator, lambda r_RK: r_RK, unit_RK
    x_RK, iterations_R = _iterate(problem, start_RK, residual_RK, max_iters=max_iters, tol=tol)
    return Solution(x_RK * norm_R1, iterations_R)


def preconditioned_conjugate_gradients(operator, precondition, rhs_RK, *, max_iters, tol) -> Solution:
    """As `conjugate_gradients`, but from zero, and with directions bent by `precondition`, an approximate inverse.

    A row stops once its residual is at most `tol` times its right-hand side.

    Args:
      precondition: [R, K] -> [R, K], symmetric positive definite and linear in each row.
    """
    unit_RK, norm_R1 = normalize(rhs_RK)
    problem = operator, precondition, unit_RK
    x_RK, iterations_R = _iterate(problem, jnp.zeros_like(unit_RK), unit_RK, max_iters=max_iters, tol=tol)
    return Solution(x_RK * norm_R1, iterations_R)


def _iterate(problem, x_RK, residual_RK, *, max_iters, tol) -> Solution:
    _, precondition, _ = problem
    delta_R, direction_RK = _squared_norm(residual_RK), precondition(residual_RK)
    stop_R = tol * tol * delta_R

    def advance(state):
        active_R = state.delta_R > stop_R if tol > 0 else jnp.ones_like(state.restart_R)
        return _advance(problem, active_R, state)

    def unfinished(state):
        return (state.step < max_iters) & jnp.any(state.delta_R > stop_R)

    state = _Iterate(
        step=jnp.int32(0),
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
    else:  # no test, hence no reduction over a mesh, in each step
        state = jax.lax.fori_loop(0, max_iters, lambda _, state: advance(state), state)
    return Solution(state.x_RK, state.iterations_R)


def _advance(problem, active_R, state):
    """One step of every active row; the others stay bitwise as they are (steps of length 0)."""
    operator, precondition, unit_RK = problem
    restart_R = state.restart_R & active_R
    image_RK = operator(state.direction_RK)
    curvature_R = jnp.sum(state.direction_RK * image_RK, axis=-1)
    length_R = _divide(state.rho_R, curvature_R, active_R & ~state.restart_R)
    x_RK = state.x_RK + length_R[..., None] * state.direction_RK
    residual_RK = jnp.where(
        restart_R[..., None], unit_RK - image_RK, state.residual_RK - length_R[..., None] * image_RK
    )
    bent_RK = precondition(residual_RK)
    delta_R, rho_R = _squared_norm(residual_RK), jnp.sum(residual_RK * bent_RK, axis=-1)
    floor_R = jnp.where(restart_R, _rounding_floor(delta_R), state.floor_R)
    next_restart_R = ~state.restart_R & (delta_R <= floor_R)
    momentum_R = _divide(rho_R, state.rho_R, ~state.restart_R)
    direction_RK = jnp.where(next_restart_R[..., None], x_RK, bent_RK + momentum_R[..., None] * state.direction_RK)
    return _Iterate(
        state.step + 1,
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
    return float(jnp.finfo(delta_R.dtype).eps) ** 2 * delta_R


def normalize(rhs_RK):
    """Unit rows and their norms [R, 1] (1 for a zero row). By the largest entry first: squares of 1e-30 are 0."""
    largest_R1 = jnp.max(jnp.abs(rhs_RK), axis=-1, keepdims=True)
    largest_R1 = jnp.where(largest_R1 > 0, largest_R1, 1)
    scaled_RK = rhs_RK / largest_R1
    norm_R1 = jnp.sqrt(jnp.sum(scaled_RK * scaled_RK, axis=-1, keepdims=True))
    norm_R1 = jnp.where(norm_R1 > 0, norm_R1, 1)
    return scaled_RK / norm_R1, largest_R1 * norm_R1


def _squared_norm(x_RK):
    return jnp.sum(x_RK * x_RK, axis=-1)


def _divide(a, b, valid):
    """a / b; 0 where not valid or b is 0."""
    valid = valid & (b != 0)
    return jnp.where(valid, a / jnp.where(valid, b, 1), 0)
