"""Public `mesa` and `mesa_step`: checks, defaults, choice of implementation.

B batch, T time, H heads, K key size, V value size.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.dispatch import PlatformKernel
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.mesa import pallas_gpu, pallas_tpu, reference, step_gpu, xla
from mesanet_kernels.ops.mesa.options import MESA_SOLUTION as MESA_SOLUTION  # public
from mesanet_kernels.ops.mesa.options import MesaOptions
from mesanet_kernels.ops.mesa.sequence_parallel import SHARD_TRANSITION

IMPLEMENTATIONS = {
    "reference": reference.mesa_reference,
    "xla": xla.mesa_xla,
    "pallas_gpu": pallas_gpu.mesa_pallas_gpu,
    "pallas_tpu": pallas_tpu.mesa_pallas_tpu,
}
# What None prefers on each platform, if the kernel supports the call.
KERNELS = {
    "cuda": PlatformKernel(pallas_gpu.mesa_pallas_gpu, pallas_gpu.unsupported_reason, pallas_gpu.CHUNK),
    "tpu": PlatformKernel(pallas_tpu.mesa_pallas_tpu, pallas_tpu.unsupported_reason, pallas_tpu.CHUNK),
}
# Decoding has one kernel, a single launch for one token; the other implementations run a row of one token.
STEP_KERNELS = {"cuda": PlatformKernel(step_gpu.mesa_step_pallas_gpu, step_gpu.unsupported_reason)}
SOLVERS = ("cg", "pcg")


class MesaOutput(NamedTuple):
    """o in v's dtype; final_state (h_kk [B,H,K,K], h_kv [B,H,K,V]) float32; iterations int32, solver steps a row."""

    o: jax.Array
    final_state: tuple[jax.Array, jax.Array]
    iterations: jax.Array


def mesa(
    q,
    k,
    v,
    log_decay,
    beta,
    lam,
    *,
    segment_ids=None,
    initial_state=None,
    max_iters=30,
    tol=0.0,
    solver="cg",
    chunk_size=None,
    implementation=None,
) -> MesaOutput:
    """The Mesa layer: at every token the ridge regression over all earlier ones (MesaNet, arXiv 2506.05233, eq. 4-8).

        H_t = exp(log_decay_t) H_{t-1} + beta_t k_t k_t^T      G_t = exp(log_decay_t) G_{t-1} + beta_t v_t k_t^T
        o_t = G_t (H_t + diag(lam))^{-1} q_t

    All inputs have gradients, `initial_state` too; the gradient is implicit, by a second solve.

    Args:
      q, k: [B, T, H, K], L2-normalised by the caller; not scaled here.
      v: [B, T, H, V].
      log_decay: [B, T, H], at most 0; any negative size works, -inf too.
      beta: [B, T, H], in [0, 1].
      lam: [H, K], positive.
      segment_ids: int [B, T], non-decreasing; the state starts from zero at each new document.
      initial_state: (h_kk [B, H, K, K], symmetric, h_kv [B, H, K, V]); belongs to the first token's document. Default zero.
      max_iters: most solver steps, forward and backward.
      tol: 0 runs `max_iters` steps; above 0 a row stops once its residual is at most `tol` times that of its
        starting point.
      solver: "cg", the paper's (Alg. 1), from q / diag(H + lam); "pcg", from zero, preconditioned by the inverse of the
        chunk's mean matrix: some 3 to 6 steps to 1e-4 where "cg" needs up to 30. Its steps, though not what they
        converge to, depend on the chunks.
      chunk_size: tokens computed as one dense block, rounded up to a power of two; does not change the result.
        Default 64.
      implementation: "reference" (exact dense solve; ignores max_iters and tol and reports 0 iterations), "xla",
        "pallas_gpu" (NVIDIA Hopper; chunks of 64), "pallas_tpu" (chunks of 128), both for "cg", q, k and v in bfloat16,
        K and V 64 or 128; or None for the best.

    Raises:
      ValueError: shapes or dtypes that do not fit. NotImplementedError: an unknown implementation or solver.
    """
    run = dispatch.choose(
        "mesa", implementation, IMPLEMENTATIONS, default=xla.mesa_xla, kernels=KERNELS, static_arguments=1
    )
    _check_solver("mesa", solver, max_iters, tol)
    sizes = _check_arrays("mesa", "BTH", q, k, v, log_decay, beta, lam, initial_state)
    segment_ids = checks.segments("mesa", segment_ids, sizes)
    checks.check_positive("mesa", chunk_size=chunk_size)

    dtype = checks.accumulation_dtype(q, k, v)
    state = _initial_state(sizes, dtype) if initial_state is None else tuple(s.astype(dtype) for s in initial_state)
    chunk = chunks.pick_chunk(chunk_size, sequence_parallel.shard_length(sizes["T"]))
    options = MesaOptions(solver, max_iters, float(tol), chunk)

    def outputs_and_state(*arrays):
        o, final_state, iterations = run(options, *arrays)
        return (o, iterations), final_state

    per_token = q, k, v, log_decay.astype(dtype), beta.astype(dtype)
    (o, iterations), state = sequence_parallel.run_recurrent_op(
        outputs_and_state, SHARD_TRANSITION, per_token, (lam.astype(dtype),), state, segment_ids
    )
    return MesaOutput(o, state, iterations)


def mesa_step(
    q, k, v, log_decay, beta, lam, state, *, max_iters=30, tol=0.0, solver="cg", implementation=None
) -> MesaOutput:
    """One token of `mesa`: the same computation at T = 1, so that training and decoding agree at any `max_iters`.

    Args:
      q, k: [B, H, K]; v: [B, H, V]; log_decay, beta: [B, H]; lam: [H, K].
      state: (h_kk [B, H, K, K], h_kv [B, H, K, V]).
      max_iters, tol, solver, implementation: as in `mesa`; "pallas_gpu": one launch (NVIDIA Hopper, K and V 64 or 128,
        solver "cg", a float32 state), which None chooses where it can.

    Returns:
      MesaOutput with o [B, H, V], the new state, iterations [B, H].
    """
    _check_arrays("mesa_step", "BH", q, k, v, log_decay, beta, lam, state)
    _check_solver("mesa_step", solver, max_iters, tol)
    options = MesaOptions(solver, max_iters, float(tol), chunk=1)
    arrays = q, k, v, log_decay, beta, lam, *state

    def one_token_row(implementation, options, q, k, v, log_decay, beta, lam, *state):
        row = (x[:, None] for x in (q, k, v, log_decay, beta))
        settings = dict(max_iters=options.max_iters, tol=options.tol, solver=options.solver)
        o, state, iterations = mesa(*row, lam, initial_state=state, implementation=implementation, **settings)
        return o[:, 0], state, iterations[:, 0]

    table = {name: partial(one_token_row, name) for name in IMPLEMENTATIONS}
    run = dispatch.choose(
        "mesa_step", implementation, table | {"pallas_gpu": step_gpu.mesa_step_pallas_gpu},
        default=partial(one_token_row, None), kernels=STEP_KERNELS, static_arguments=1,
    )  # fmt: skip
    return MesaOutput(*run(options, *arrays))


def _check_arrays(op, rows, q, k, v, log_decay, beta, lam, state):
    h_kk, h_kv = (None, None) if state is None else state
    sizes = checks.check_shapes(
        op,
        {
            "q": (q, rows + "K"),
            "k": (k, rows + "K"),
            "v": (v, rows + "V"),
            "log_decay": (log_decay, rows),
            "beta": (beta, rows),
            "lam": (lam, "HK"),
            "h_kk": (h_kk, "BHKK"),
            "h_kv": (h_kv, "BHKV"),
        },
    )
    checks.check_dtypes(
        op,
        jnp.floating,
        {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "lam": lam, "h_kk": h_kk, "h_kv": h_kv},
    )
    if q.dtype != k.dtype:
        raise ValueError(f"{op}: q has dtype {q.dtype} and k {k.dtype}; they must be the same")
    return sizes


def _check_solver(op, solver, max_iters, tol):
    if solver not in SOLVERS:
        raise NotImplementedError(f"{op}: no solver {solver!r}; it has {', '.join(map(repr, SOLVERS))}")
    if max_iters < 0 or tol < 0:
        raise ValueError(f"{op}: max_iters={max_iters} and tol={tol}; neither may be negative")


def _initial_state(sizes, dtype):
    batch, heads, key, value = (sizes[axis] for axis in "BHKV")
    return jnp.zeros((batch, heads, key, key), dtype), jnp.zeros((batch, heads, key, value), dtype)
