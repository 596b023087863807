"""Public `mesa` and `mesa_step`: checks, defaults, choice of implementation.

B batch, T time, H heads, K key size, V value size.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, sequence_parallel
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.mesa import pallas_gpu, pallas_tpu, reference, step_gpu, xla
from mesanet_kernels.ops.mesa.options import MESA_SOLUTION as MESA_SOLUTION  # public
from mesanet_kernels.ops.mesa.options import MesaOptions
from mesanet_kernels.ops.mesa.sequence_parallel import MEMORY

# What None chooses on a platform, where it can do what the call needs.
KERNELS = {"cuda": (pallas_gpu.mesa_pallas_gpu, pallas_gpu), "tpu": (pallas_tpu.mesa_pallas_tpu, pallas_tpu)}


def _automatic(options, q, k, v, *rest):
    """By the platform that is lowered for, which need not be the one that traces; short rows would fill no chunk."""
    run = {
        platform: partial(function, options)
        for platform, (function, kernel) in KERNELS.items()
        if not kernel.lacks(options, q, k, v) and q.shape[1] >= kernel.CHUNK
    }
    return jax.lax.platform_dependent(q, k, v, *rest, **run, default=partial(xla.mesa_xla, options))


IMPLEMENTATIONS = {
    "reference": reference.mesa_reference,
    "xla": xla.mesa_xla,
    "pallas_gpu": pallas_gpu.mesa_pallas_gpu,
    "pallas_tpu": pallas_tpu.mesa_pallas_tpu,
}
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
      initial_state: (h_kk [B, H, K, K], symmetric, h_kv [B, H, K, V]); belongs to the first token's document. Default
        zero.
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
    run = checks.choose("mesa", implementation, IMPLEMENTATIONS | {None: _automatic}, best=None)
    _check_solver("mesa", solver, max_iters, tol)
    sizes = _check_arrays("mesa", "BTH", q, k, v, log_decay, beta, lam, initial_state)
    segment_ids = checks.segments("mesa", segment_ids, sizes)
    checks.check_positive("mesa", chunk_size=chunk_size)

    dtype = checks.accumulation_dtype(q, k, v)
    state = _initial_state(sizes, dtype) if initial_state is None else tuple(s.astype(dtype) for s in initial_state)
    chunk = chunks.pick_chunk(chunk_size, sequence_parallel.span_length(sizes["T"]))
    options = MesaOptions(solver, max_iters, float(tol), chunk)

    def outputs_and_state(*arrays):
        o, final_state, iterations = run(options, *arrays)
        return (o, iterations), final_state

    rows, whole = (q, k, v, log_decay.astype(dtype), beta.astype(dtype)), (lam.astype(dtype),)
    (o, iterations), state = sequence_parallel.recurrent(outputs_and_state, MEMORY, rows, whole, state, segment_ids)
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
    fused = partial(step_gpu.mesa_step_pallas_gpu, options)

    def one_token_row(q, k, v, log_decay, beta, lam, *state):
        row = (x[:, None] for x in (q, k, v, log_decay, beta))
        settings = dict(max_iters=max_iters, tol=tol, solver=solver, implementation=implementation)
        o, state, iterations = mesa(*row, lam, initial_state=state, **settings)
        return o[:, 0], state, iterations[:, 0]

    if implementation == "pallas_gpu":
        return MesaOutput(*fused(*arrays))
    if implementation is None and not step_gpu.lacks(options, k, v, *state):
        return MesaOutput(*jax.lax.platform_dependent(*arrays, cuda=fused, default=one_token_row))
    return MesaOutput(*one_token_row(*arrays))


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
