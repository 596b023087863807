"""The public functions `mesa` and `mesa_step`: checks, defaults, choice of implementation.

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
    """The result of `mesa` and `mesa_step`.

    Attributes:
      o: [B, T, H, V] in v's dtype; [B, H, V] for `mesa_step`.
      final_state: (h_kk [B, H, K, K], h_kv [B, H, K, V]), the states after the last token; float32, or float64 if an
        input is.
      iterations: int32 [B, T, H], how many iterations each token's solve took; [B, H] for `mesa_step`.
    """

    o: jax.Array
    final_state: tuple[jax.Array, jax.Array]
    iterations: jax.Array


def mesa(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    lam: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    initial_state: tuple[jax.Array, jax.Array] | None = None,
    max_iters: int = 30,
    tol: float = 0.0,
    solver: str = "cg",
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> MesaOutput:
    """Solves a ridge regression over the past for every token (MesaNet, arXiv 2506.05233, equations 4 and 8).

        H_t = exp(log_decay_t) H_{t-1} + beta_t k_t k_t^T      G_t = exp(log_decay_t) G_{t-1} + beta_t v_t k_t^T
        o_t = G_t (H_t + diag(lam))^{-1} q_t

    docs/mesa.md gives the mathematics. All floating inputs have gradients, including `initial_state`. The gradient is
    implicit, by a second solve with the same options.

    Args:
      q, k: [B, T, H, K], L2-normalised by the caller; not scaled here.
      v: [B, T, H, V].
      log_decay: [B, T, H], at most 0; -inf is allowed.
      beta: [B, T, H], in [0, 1].
      lam: [H, K], positive.
      segment_ids: int [B, T], non-decreasing; the states start from zero at each new document. Default: one document
        per row.
      initial_state: (h_kk [B, H, K, K], symmetric, h_kv [B, H, K, V]); belongs to the document of the first token.
        Default: zero.
      max_iters: the largest number of solver iterations, in the forward and in the backward pass.
      tol: 0 runs `max_iters` iterations; above 0, a token stops once the norm of its residual is at most `tol` times
        that of its starting point.
      solver: "cg", that of the paper (appendix C, algorithm 1), starting from q / diag(H + lam); or "pcg", starting
        from zero and preconditioned with the inverse of the chunk's mean matrix, which takes 3 to 6 iterations to a
        residual of 1e-4 where "cg" can take 30. The iterates of "pcg", though not their limit, depend on the chunk
        size.
      chunk_size: tokens computed as one dense block, rounded up to a power of two. Does not change the result, except
        with "pcg". Default: 64.
      implementation: "reference" (exact dense solve; ignores max_iters and tol and reports 0 iterations), "xla",
        "pallas_gpu" (NVIDIA Hopper, chunks of 64) or "pallas_tpu" (chunks of 128); the last two need solver "cg", q, k
        and v in bfloat16, and K and V of 64 or 128. None chooses the fastest that supports the call.

    Returns:
      `MesaOutput`.

    Raises:
      ValueError: shapes, dtypes or options that do not fit.
      NotImplementedError: there is no such implementation or solver, or the implementation cannot run this call.
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
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    lam: jax.Array,
    state: tuple[jax.Array, jax.Array],
    *,
    max_iters: int = 30,
    tol: float = 0.0,
    solver: str = "cg",
    implementation: str | None = None,
) -> MesaOutput:
    """Computes one decoding step of `mesa`: the same computation at T = 1.

    Training and decoding therefore agree at any `max_iters`, even before the solver has converged.

    Args:
      q, k: [B, H, K].
      v: [B, H, V].
      log_decay, beta: [B, H].
      lam: [H, K].
      state: (h_kk [B, H, K, K], h_kv [B, H, K, V]), as `mesa` returns it.
      max_iters, tol, solver: as in `mesa`.
      implementation: as in `mesa`; "pallas_gpu" is a single kernel (NVIDIA Hopper, K and V of 64 or 128, solver "cg",
        float32 state, q, k and v in any dtype).

    Returns:
      `MesaOutput` with o [B, H, V], the new state, and iterations [B, H].

    Raises:
      ValueError: shapes, dtypes or options that do not fit.
      NotImplementedError: there is no such implementation or solver, or the implementation cannot run this call.
    """
    _check_arrays("mesa_step", "BH", q, k, v, log_decay, beta, lam, state)
    _check_solver("mesa_step", solver, max_iters, tol)
    options = MesaOptions(solver, max_iters, float(tol), chunk=1)
    arrays = q, k, v, log_decay, beta, lam, *state

    table = {name: partial(_run_one_token, name) for name in IMPLEMENTATIONS}
    run = dispatch.choose(
        "mesa_step",
        implementation,
        table | {"pallas_gpu": step_gpu.mesa_step_pallas_gpu},
        default=partial(_run_one_token, None),
        kernels=STEP_KERNELS,
        static_arguments=1,
    )
    return MesaOutput(*run(options, *arrays))


def _run_one_token(implementation, options, q, k, v, log_decay, beta, lam, *state):
    """Returns (o, state, iterations) of `mesa_step` by way of `mesa` on a row of one token."""
    q, k, v, log_decay, beta = (x[:, None] for x in (q, k, v, log_decay, beta))
    o, state, iterations = mesa(
        q,
        k,
        v,
        log_decay,
        beta,
        lam,
        initial_state=state,
        max_iters=options.max_iters,
        tol=options.tol,
        solver=options.solver,
        implementation=implementation,
    )
    return o[:, 0], state, iterations[:, 0]


def _check_arrays(op, rows, q, k, v, log_decay, beta, lam, state):
    """Checks shapes and dtypes and returns the size of each axis. `rows` are the leading axes: "BTH" or "BH"."""
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
    """Raises an error for an unknown solver or for negative limits."""
    if solver not in SOLVERS:
        raise NotImplementedError(f"{op}: there is no solver {solver!r}; choose from {', '.join(map(repr, SOLVERS))}")
    if max_iters < 0 or tol < 0:
        raise ValueError(f"{op}: max_iters={max_iters} and tol={tol}; neither may be negative")


def _initial_state(sizes, dtype):
    """Returns (h_kk, h_kv) of zeros."""
    batch, heads, key, value = (sizes[axis] for axis in "BHKV")
    return jnp.zeros((batch, heads, key, key), dtype), jnp.zeros((batch, heads, key, value), dtype)
