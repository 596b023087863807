"""Muon: orthogonalises the momentum of each matrix (Jordan 2024), with the extensions of nanochat as options.

L layers of a stack, I inputs and O outputs of a matrix. Kernels here are [..., I, O], whereas the papers' matrices are
[O, I], so the papers' rows are the outputs here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mesanet_jax.schema import Config, Field
from mesanet_jax.training.layer_exchange import exchange_layers


class Iteration(NamedTuple):
    """The polynomial iteration X <- a X + (b A + c A^2) X with A = X X^T.

    Attributes:
      sweeps: the coefficients (a, b, c) of each sweep; the last triple is used for all further sweeps.
      margin, eps: the iteration starts from X / (margin * |X| + eps), where |X| is the Frobenius norm, so that all
        singular values are at most one.
    """

    sweeps: tuple[tuple[float, float, float], ...]
    margin: float
    eps: float


ITERATIONS = {
    "quintic": Iteration(((3.4445, -4.7750, 2.0315),), margin=1.0, eps=1e-7),  # Jordan 2024
    "polar_express": Iteration(  # Amsel et al. 2025, with nanochat's coefficients
        (
            (8.15655, -22.48329, 15.87877),
            (4.04293, -2.80892, 0.50002),
            (3.89167, -2.77248, 0.50607),
            (3.28575, -2.36813, 0.46449),
            (2.34654, -1.70978, 0.42324),
        ),
        margin=1.01,
        eps=1e-6,
    ),
}

_SMALL = 1e-10  # prevents 0 / 0 for gradients that are zero

FIELDS = {
    "learning_rate": Field(
        0.02,
        "peak learning rate of the matrices; multiplied by sqrt(max(1, outputs / inputs)) for each matrix",
        at_least=0.0,
        fixed=True,
    ),
    "excluded": Field(
        ("conv",),
        "matrices that AdamW updates instead: those with one of these names in their path",
        fixed=True,
    ),
    "momentum": Field(
        0.95,
        "decay of the running mean of the gradient",
        at_least=0.0,
        below=1.0,
        fixed=True,
    ),
    "momentum_start": Field(
        None,
        "momentum at the first step, from which it rises linearly; none: start at momentum",
        kind=float,
        at_least=0.0,
        below=1.0,
        fixed=True,
    ),
    "momentum_warmup_steps": Field(
        0,
        "number of steps in which the momentum rises from momentum_start to momentum",
        at_least=0,
        fixed=True,
    ),
    "momentum_final": Field(
        None,
        "momentum at the last step, towards which it goes linearly during the warm-down; none: stay at momentum",
        kind=float,
        at_least=0.0,
        below=1.0,
        fixed=True,
    ),
    "row_normalize": Field(
        False,
        "give all outputs of a matrix the same norm before the orthogonalisation (MuonEq)",
        fixed=True,
    ),
    "iteration": Field(
        "quintic",
        "coefficients of the orthogonalisation: quintic (Jordan 2024) or polar_express (Amsel et al. 2025)",
        choices=tuple(ITERATIONS),
        fixed=True,
    ),
    "sweeps": Field(
        5,
        "number of iterations of the orthogonalisation",
        at_least=1,
        fixed=True,
    ),
    "dtype": Field(
        "bfloat16",
        "number format of the matrix products in the orthogonalisation; they are summed in float32",
        choices=("bfloat16", "float32"),
        fixed=True,
    ),
    "rescale": Field(
        False,
        "scale each orthogonalised matrix to the Frobenius norm sqrt(min(inputs, outputs))",
        fixed=True,
    ),
    "second_moment": Field(
        None,
        "decay of the running mean square of the update, per output or per input (NorMuon); none: off",
        kind=float,
        at_least=0.0,
        below=1.0,
        fixed=True,
    ),
    "weight_decay": Field(
        0.0,
        "decoupled weight decay of the matrices; multiplied by their learning rate",
        at_least=0.0,
        fixed=True,
    ),
    "weight_decay_schedule": Field(
        "constant",
        "weight decay over the run: constant, or a cosine that falls to zero at the last step",
        choices=("constant", "cosine"),
        fixed=True,
    ),
    "cautious": Field(
        False,
        "apply weight decay only to weights that the update also moves towards zero",
        fixed=True,
    ),
}


class MuonState(NamedTuple):
    """What Muon keeps between updates.

    Attributes:
      momentum: the running mean of the gradient of each matrix, [..., I, O].
      second_moment: the running mean squares of NorMuon, [..., I, 1] or [..., 1, O] for each matrix; None if it is off.
    """

    momentum: Any
    second_moment: Any | None


def scale_by_muon(options: Config, *, momentum: optax.Schedule, axes: Any) -> optax.GradientTransformationExtraArgs:
    """Turns gradients of matrices into directions, all float32 (steps 1 to 5 of nanochat's recipe).

    `update` takes the trainer's step as `step=`.

    Args:
      options: the values of FIELDS.
      momentum: the momentum as a function of the step.
      axes: a tree like the parameters with the logical names of the two axes of each matrix.
    """
    decay = options.second_moment

    def init(params):
        means = None if decay is None else jax.tree.map(lambda x: jnp.zeros_like(_mean_square(x)), params)
        return MuonState(momentum=jax.tree.map(jnp.zeros_like, params), second_moment=means)

    def update(grads, state, params=None, *, step, **_):
        mu = momentum(step)
        buffers = jax.tree.map(lambda buffer, grad: _lerp(buffer, grad, 1 - mu), state.momentum, grads)
        nesterov = jax.tree.map(lambda grad, buffer: _lerp(grad, buffer, mu), grads, buffers)
        directions = _orthogonal(nesterov, axes, options)
        if decay is None:
            return directions, MuonState(buffers, None)
        means = jax.tree.map(lambda mean, x: _lerp(mean, _mean_square(x), 1 - decay), state.second_moment, directions)
        return jax.tree.map(_normalized, directions, means), MuonState(buffers, means)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def add_decayed_weights(weight_decay: optax.Schedule, *, cautious: bool) -> optax.GradientTransformationExtraArgs:
    """Adds weights * weight_decay(step) to the directions; `cautious`: only where both have the same sign."""

    def update(directions, state, params, *, step, **_):
        decay = weight_decay(step)

        def add(x, weight):
            decayed = jnp.where(x * weight >= 0, weight, 0) if cautious else weight
            return x + decay * decayed

        return jax.tree.map(add, directions, params), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def scale_by_shape() -> optax.GradientTransformation:
    """Multiplies by sqrt(max(1, O / I)), since an orthogonal matrix with O > I has proportionally smaller outputs."""

    def scale(x):
        return x * max(1.0, x.shape[-1] / x.shape[-2]) ** 0.5

    return optax.stateless(lambda directions, _: jax.tree.map(scale, directions))


def orthogonalize(matrices: Any, axes: Any, *, iteration: str, sweeps: int, dtype: jnp.dtype) -> Any:
    """Replaces each matrix U S V^T by an approximation of U V^T.

    Each sweep maps every singular value s to s (a + b s^2 + c s^4), which brings them all close to one. On a mesh,
    each device orthogonalises whole matrices (`layer_exchange`).

    Args:
      matrices: a tree of arrays [..., I, O].
      axes: a tree like `matrices` with the logical names of I and O.
      iteration: a key of ITERATIONS.
      sweeps: the number of sweeps.
      dtype: of the factors of the matrix products; sums and the polynomial are float32.

    Returns:
      A tree like `matrices`, float32.
    """
    kind = ITERATIONS[iteration]
    coefficients_S3 = jnp.array([kind.sweeps[min(sweep, len(kind.sweeps) - 1)] for sweep in range(sweeps)])
    scaled = jax.tree.map(lambda x: (x / (kind.margin * _norm(x) + kind.eps)).astype(dtype), matrices)
    orthogonal = exchange_layers(lambda x_LIO: _iterate(x_LIO, coefficients_S3), scaled, axes)
    return jax.tree.map(lambda x: x.astype(jnp.float32), orthogonal)


def _iterate(x_LIO: jax.Array, coefficients_S3: jax.Array) -> jax.Array:
    """Runs the S sweeps, on the transpose if I > O, so that X X^T is as small as possible."""
    tall = x_LIO.shape[-2] > x_LIO.shape[-1]

    def product(a, b):
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    def sweep(x, coefficients):
        a, b, c = coefficients
        gram = product(x, x.mT)
        rounded = gram.astype(x.dtype)
        polynomial = (b * gram + c * product(rounded, rounded)).astype(x.dtype)
        return (a * x + product(polynomial, x)).astype(x.dtype), None

    x, _ = jax.lax.scan(sweep, x_LIO.mT if tall else x_LIO, coefficients_S3)
    return x.mT if tall else x


def _orthogonal(matrices: Any, axes: Any, options: Config) -> Any:
    """Steps 2 to 4 of nanochat's recipe."""
    if options.row_normalize:
        matrices = jax.tree.map(_row_normalized, matrices)
    dtype = jnp.dtype(options.dtype)
    orthogonal = orthogonalize(matrices, axes, iteration=options.iteration, sweeps=options.sweeps, dtype=dtype)
    return jax.tree.map(_rescaled, orthogonal) if options.rescale else orthogonal


def _row_normalized(x: jax.Array) -> jax.Array:
    """Gives every output the mean norm of the outputs."""
    norm = jnp.linalg.norm(x, axis=-2, keepdims=True)
    return x / jnp.maximum(norm, jnp.finfo(x.dtype).tiny) * jnp.mean(norm, axis=-1, keepdims=True)


def _rescaled(x: jax.Array) -> jax.Array:
    return x * (min(x.shape[-2:]) ** 0.5 / jnp.maximum(_norm(x), _SMALL))


def _mean_square(x: jax.Array) -> jax.Array:
    """The mean square per output, or per input if there are more inputs than outputs (step 5 of nanochat's recipe)."""
    inputs, outputs = x.shape[-2:]
    return jnp.mean(jnp.square(x), axis=-2 if outputs >= inputs else -1, keepdims=True)


def _normalized(x: jax.Array, mean_square: jax.Array) -> jax.Array:
    """Divides by the root of the mean squares, and restores the Frobenius norm."""
    divided = x * jax.lax.rsqrt(jnp.maximum(mean_square, _SMALL))
    return divided * (_norm(x) / jnp.maximum(_norm(divided), _SMALL))


def _norm(x: jax.Array) -> jax.Array:
    """The Frobenius norm of each matrix, [..., 1, 1]."""
    return jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)


def _lerp(a: Any, b: Any, share: Any) -> Any:
    """Moves from a to b by a share of the way."""
    return a + share * (b - a)
