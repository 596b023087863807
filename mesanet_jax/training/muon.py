"""Muon: the momentum of each matrix, orthogonalised (Jordan 2024), and what nanochat adds to it, each by a field.

L layers of a stack, I inputs and O outputs of a matrix. Kernels are [..., I, O]; the papers' matrices are [O, I], so what
they call rows are the outputs here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mesanet_jax.schema import Field
from mesanet_jax.training.layer_exchange import on_whole_matrices


class Iteration(NamedTuple):
    """X <- aX + (bA + cA^2)X, A = XX^T, by its coefficients (a, b, c) of each sweep; the last goes on.

    X begins as x / (margin |x| + eps), |x| the Frobenius norm, so that its singular values are at most one.
    """

    sweeps: tuple[tuple[float, float, float], ...]
    margin: float
    eps: float


ITERATIONS = {
    "quintic": Iteration(((3.4445, -4.7750, 2.0315),), margin=1.0, eps=1e-7),  # Jordan 2024
    "polar_express": Iteration(  # Amsel et al. 2025, as nanochat has it
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

_SMALL = 1e-10  # keeps zero gradients from dividing zero by zero

FIELDS = {
    "learning_rate": Field(0.02, "peak learning rate of a matrix, times sqrt(max(1, outputs / inputs))", at_least=0.0, fixed=True),
    "excluded": Field(("conv",), "matrices that AdamW updates, by a component of their path", fixed=True),
    "momentum": Field(0.95, "decay of the gradient's mean", at_least=0.0, below=1.0, fixed=True),
    "momentum_start": Field(None, "momentum of the first step; none: momentum", kind=float, at_least=0.0, below=1.0, fixed=True),
    "momentum_warmup_steps": Field(0, "steps from momentum_start to momentum", at_least=0, fixed=True),
    "momentum_final": Field(None, "momentum at the end, from the warm-down on; none: momentum", kind=float, at_least=0.0, below=1.0, fixed=True),
    "row_normalize": Field(False, "MuonEq: all outputs of a matrix get the same norm before it is orthogonalised", fixed=True),
    "iteration": Field("quintic", "coefficients of the orthogonalisation", choices=tuple(ITERATIONS), fixed=True),
    "sweeps": Field(5, "sweeps of the orthogonalisation", at_least=1, fixed=True),
    "dtype": Field("bfloat16", "dtype of the orthogonalisation's products", choices=("bfloat16", "float32"), fixed=True),
    "rescale": Field(False, "give the orthogonalised matrix the Frobenius norm sqrt(min(inputs, outputs))", fixed=True),
    "second_moment": Field(None, "NorMuon: decay of the mean square of an input's or output's update; none: off", kind=float, at_least=0.0, below=1.0, fixed=True),
    "weight_decay": Field(0.0, "decoupled weight decay, times the matrix's learning rate", at_least=0.0, fixed=True),
    "weight_decay_schedule": Field("constant", "cosine: it falls to zero at the last step", choices=("constant", "cosine"), fixed=True),
    "cautious": Field(False, "decay a weight only where the update has its sign", fixed=True),
}  # fmt: skip


class MuonState(NamedTuple):
    """Of each matrix the momentum [..., I, O] and, of NorMuon, the mean squares [..., I, 1] or [..., 1, O]."""

    momentum: Any
    second_moment: Any | None


def scale_by_muon(options, *, momentum: optax.Schedule, axes) -> optax.GradientTransformationExtraArgs:
    """Gradients of matrices to directions (nanochat's steps 1 to 5), all float32.

    `update` takes the trainer's `step=`.

    Args:
      options: the values of FIELDS.
      momentum: of a step.
      axes: the logical names of the two axes of each matrix, a tree like the parameters.
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
        return jax.tree.map(_divided, directions, means), MuonState(buffers, means)

    return optax.GradientTransformationExtraArgs(init, update)


def add_decayed_weights(weight_decay: optax.Schedule, *, cautious: bool) -> optax.GradientTransformationExtraArgs:
    """Adds the weights times the decay of the `step=`; cautious: only those of their direction's sign."""

    def update(directions, state, params, *, step, **_):
        decay = weight_decay(step)
        decayed = lambda x, weight: jnp.where(x * weight >= 0, weight, 0) if cautious else weight
        return jax.tree.map(lambda x, weight: x + decay * decayed(x, weight), directions, params), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def scale_by_shape() -> optax.GradientTransformation:
    """Times sqrt(max(1, O / I)): of an orthogonal matrix with more outputs than inputs, the outputs are smaller."""
    scaled = lambda x: x * max(1.0, x.shape[-1] / x.shape[-2]) ** 0.5
    return optax.stateless(lambda directions, _: jax.tree.map(scaled, directions))


def orthogonalize(matrices, axes, *, iteration: str, sweeps: int, dtype):
    """U V^T, nearly, of each matrix U S V^T: a tree of [..., I, O] to one like it, float32.

    Each sweep takes every singular value s to s (a + b s^2 + c s^4), which are near one in the end. On a mesh, each device
    does whole matrices (`whole_matrices`).

    Args:
      axes: the logical names of I and O, a tree like that of the matrices.
      iteration: a name of ITERATIONS.
      dtype: of the factors of products; sums and the polynomial are float32.
    """
    kind = ITERATIONS[iteration]
    coefficients = [kind.sweeps[min(sweep, len(kind.sweeps) - 1)] for sweep in range(sweeps)]
    scaled = jax.tree.map(lambda x: (x / (kind.margin * _norm(x) + kind.eps)).astype(dtype), matrices)
    done = on_whole_matrices(lambda x_LIO: _iterate(x_LIO, jnp.array(coefficients)), scaled, axes)
    return jax.tree.map(lambda x: x.astype(jnp.float32), done)


def _iterate(x_LIO, coefficients_S3):
    """The sweeps, on the smaller side of the matrices."""
    tall = x_LIO.shape[-2] > x_LIO.shape[-1]
    product = lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32)

    def sweep(x, coefficients):
        a, b, c = coefficients
        gram = product(x, x.mT)
        rounded = gram.astype(x.dtype)
        polynomial = (b * gram + c * product(rounded, rounded)).astype(x.dtype)
        return (a * x + product(polynomial, x)).astype(x.dtype), None

    x, _ = jax.lax.scan(sweep, x_LIO.mT if tall else x_LIO, coefficients_S3)
    return x.mT if tall else x


def _orthogonal(matrices, axes, options):
    """nanochat's steps 2 to 4."""
    if options.row_normalize:
        matrices = jax.tree.map(_row_normalized, matrices)
    dtype = jnp.dtype(options.dtype)
    done = orthogonalize(matrices, axes, iteration=options.iteration, sweeps=options.sweeps, dtype=dtype)
    return jax.tree.map(_rescaled, done) if options.rescale else done


def _row_normalized(x):
    norm = jnp.linalg.norm(x, axis=-2, keepdims=True)
    return x / jnp.maximum(norm, jnp.finfo(x.dtype).tiny) * jnp.mean(norm, axis=-1, keepdims=True)


def _rescaled(x):
    return x * (min(x.shape[-2:]) ** 0.5 / jnp.maximum(_norm(x), _SMALL))


def _mean_square(x):
    """Of an output over its inputs, or where inputs are more, of an input over its outputs (nanochat's step 5)."""
    inputs, outputs = x.shape[-2:]
    return jnp.mean(jnp.square(x), axis=-2 if outputs >= inputs else -1, keepdims=True)


def _divided(x, mean_square):
    """x over the root of its mean squares, with the norm it had."""
    divided = x * jax.lax.rsqrt(jnp.maximum(mean_square, _SMALL))
    return divided * (_norm(x) / jnp.maximum(_norm(divided), _SMALL))


def _norm(x):
    """The Frobenius norm of each matrix, [..., 1, 1]."""
    return jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)


def _lerp(a, b, share):
    return a + share * (b - a)
