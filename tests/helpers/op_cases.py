"""The ops under test with one common signature, and helpers to compute their gradients and errors."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mesanet_kernels as mk
from mesanet_kernels import shapes

GOLDEN = Path(__file__).parents[1] / "golden"
ITERATIONS = 30


def mesa(inputs, *, segment_ids=None, state=None, max_iters=ITERATIONS, **options):
    return mk.mesa(**inputs, segment_ids=segment_ids, initial_state=state, max_iters=max_iters, **options)[:2]


def gated_linear_attention(inputs, *, segment_ids=None, state=None, **options):
    return mk.gated_linear_attention(**inputs, segment_ids=segment_ids, initial_state=state, **options)


def delta_rule(inputs, *, segment_ids=None, state=None, **options):
    return mk.delta_rule(**inputs, segment_ids=segment_ids, initial_state=state, **options)


def causal_conv1d(inputs, *, segment_ids=None, state=None, **options):
    return mk.causal_conv1d(**inputs, activation="silu", segment_ids=segment_ids, initial_state=state, **options)


def mlstm(inputs, *, segment_ids=None, state=None, **options):
    return mk.mlstm(**inputs, segment_ids=segment_ids, initial_state=state, **options)


def linear_scan(inputs, *, segment_ids=None, state=None, **options):
    return mk.linear_scan(**inputs, segment_ids=segment_ids, initial_state=state, **options)


def diagonal_ssm(inputs, *, segment_ids=None, state=None, **options):
    return mk.diagonal_ssm(**inputs, segment_ids=segment_ids, initial_state=state, **options)


def attention(inputs, *, segment_ids=None, window=None, **options):
    return mk.attention(**inputs, segment_ids=segment_ids, window=window, **options)


def softmax_cross_entropy(inputs, *, block_size=4, **options):
    return mk.softmax_cross_entropy(**inputs, softcap=30.0, block_size=block_size, **options)


RECURRENT = {
    "mesa": mesa,
    "gated_linear_attention": gated_linear_attention,
    "gated_linear_attention_vector": gated_linear_attention,
    "delta_rule": delta_rule,
    "causal_conv1d": causal_conv1d,
    "linear_scan": linear_scan,
    "diagonal_ssm": diagonal_ssm,
    "mlstm": mlstm,
}
OVER_DOCUMENTS = RECURRENT | {"attention": attention}
ALL = OVER_DOCUMENTS | {"softmax_cross_entropy": softmax_cross_entropy}
LIMITS = {"mesa": 1e-4}  # the largest relative error in float32; 1e-5 for every other op


def random_state(op, sizes, *, seed=1):
    """Returns a random initial state of a recurrent op; for Mesa, h_kk is a sum of outer products, as it must be."""
    rng = np.random.default_rng(seed)
    if op == "causal_conv1d":
        return rng.standard_normal((sizes["B"], sizes["W"] - 1, sizes["D"])).astype(np.float32)
    if op == "linear_scan":
        return rng.standard_normal((sizes["B"], sizes["D"])).astype(np.float32)
    if op == "diagonal_ssm":
        return tuple(rng.standard_normal((2, sizes["B"], sizes["H"], sizes["N"])).astype(np.float32))
    kv = rng.standard_normal((sizes["B"], sizes["H"], sizes["K"], sizes["V"])).astype(np.float32)
    if op in ("gated_linear_attention", "gated_linear_attention_vector", "delta_rule"):
        return kv
    if op == "mlstm":
        normaliser, stabiliser = (rng.standard_normal(kv.shape[:ndim]).astype(np.float32) for ndim in (3, 2))
        return kv, normaliser, stabiliser
    keys = rng.standard_normal((sizes["B"], sizes["H"], 5, sizes["K"])).astype(np.float32) / np.sqrt(sizes["K"])
    return np.einsum("bhnk,bhnj->bhkj", keys, keys), kv


def documents(sizes, *boundaries):
    """Returns segment_ids [B, T] with a new document at each of `boundaries`, shifted by one more token in each row."""
    time = np.arange(sizes["T"])
    rows = [sum((time >= b + row) for b in boundaries) for row in range(sizes["B"])]
    return np.array(rows, np.int32).reshape(sizes["B"], sizes["T"])


def evaluator(function, *, dtype=None):
    """Returns a compiled `run(inputs, state=None, cotangents=None)` that computes `function` and its gradients.

    Args:
      function: takes (inputs, state=...) and returns a tree of outputs; `state` is left out if it is None.
      dtype: float64 casts the inputs and computes in float64; bfloat16 casts all inputs except those in `shapes.WIDE`;
        None leaves them unchanged.

    Returns:
      `run`. It returns (outputs, (gradients of the floating inputs, gradient of the state)) as numpy arrays. Its
      argument `cotangents` is a list with one array for each output array; by default they are random.
    """
    wide = dtype == jnp.float64

    @jax.jit
    def compiled(changed, state, fixed, cotangents):
        def call(changed, state):
            return function(fixed | changed, **({} if state is None else {"state": state}))

        outputs, gradients_of = jax.vjp(call, changed, state)
        flat, tree = jax.tree.flatten(outputs)
        cotangents = random_cotangents(flat) if cotangents is None else cotangents
        cotangents = [jnp.asarray(c, x.dtype) for c, x in zip(cotangents, flat, strict=True)]
        return outputs, gradients_of(jax.tree.unflatten(tree, cotangents))

    def run(inputs, *, state=None, cotangents=None):
        with jax.enable_x64(wide):
            changed = cast_floating(inputs, dtype)
            fixed = {name: x for name, x in inputs.items() if name not in changed}
            state = jax.tree.map(lambda x: jnp.asarray(x, dtype if wide else None), state)
            result = compiled(changed, state, fixed, cotangents)
            return jax.tree.map(lambda x: np.asarray(x, np.float64 if wide else np.float32), result)

    return run


def evaluate(function, inputs, *, dtype=None, **options):
    """Computes `function` and its gradients once; see `evaluator`."""
    return evaluator(function, dtype=dtype)(inputs, **options)


def cast_floating(inputs, dtype):
    """Returns only the floating inputs, as jax arrays of `dtype`; those in `shapes.WIDE` never become bfloat16."""
    kept = shapes.WIDE if dtype == jnp.bfloat16 else ()
    return {
        name: jnp.asarray(x, None if name in kept else dtype)
        for name, x in inputs.items()
        if np.issubdtype(x.dtype, np.floating)
    }


def random_cotangents(flat, *, seed=3):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(x.shape).astype(np.float32) for x in flat]


def rounded(inputs):
    """Returns the inputs cast to bfloat16 and back, for the float64 reference of a run in bfloat16."""
    return inputs | {name: np.asarray(x, np.float32) for name, x in cast_floating(inputs, jnp.bfloat16).items()}


def relative_errors(got, wanted):
    """Returns the relative L2 error of each array of a tree, by its path."""
    return {
        jax.tree_util.keystr(path): float(np.linalg.norm(np.asarray(a, np.float64) - b) / (np.linalg.norm(b) or 1))
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    }


def against_float64(op, implementation, sizes, *boundaries):
    """Runs an implementation in bfloat16 and the reference in float64, with documents and an initial state.

    Returns:
      (results of the implementation, results of the reference), each as `evaluator` returns them.
    """
    inputs, state = rounded(shapes.example(op.__name__, sizes)), random_state(op.__name__, sizes)
    run = lambda x, state, name: op(x, segment_ids=documents(sizes, *boundaries), state=state, implementation=name)
    wanted = evaluate(partial(run, name="reference"), inputs, state=state, dtype=jnp.float64)
    return evaluator(partial(run, name=implementation), dtype=jnp.bfloat16)(inputs, state=state), wanted


def assert_close(got, wanted, *, limit):
    """Asserts that the relative errors of outputs are below `limit` and those of gradients below twice that."""
    for part, part_limit in zip((0, 1), (limit, 2 * limit)):
        errors = relative_errors(got[part], wanted[part])
        assert max(errors.values()) < part_limit, (("outputs", "gradients")[part], errors)


def while_loops(program):
    """Counts the while loops of a jaxpr, nested ones included, whose results are read or that have side effects."""
    read = {id(x) for eqn in program.eqns for x in eqn.invars} | {id(x) for x in program.outvars}
    count = 0
    for eqn in program.eqns:
        if eqn.effects or any(id(x) in read for x in eqn.outvars):
            nested = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(eqn.params)]
            count += sum(while_loops(x) for x in nested if hasattr(x, "eqns")) + (eqn.primitive.name == "while")
    return count
