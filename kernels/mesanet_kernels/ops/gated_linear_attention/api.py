"""The public functions for gated linear attention: checks, defaults, choice of implementation.

B batch, T time, H heads, K key size, V value size.
"""

from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.dispatch import PlatformKernel
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.gated_linear_attention import pallas_gpu, pallas_tpu, reference, xla
from mesanet_kernels.ops.gated_linear_attention.sequence_parallel import SHARD_TRANSITION

IMPLEMENTATIONS = {
    "reference": reference.gated_linear_attention_reference,
    "xla": xla.gated_linear_attention_xla,
    "pallas_gpu": pallas_gpu.gated_linear_attention_pallas_gpu,
    "pallas_tpu": pallas_tpu.gated_linear_attention_pallas_tpu,
}
# What None prefers on each platform, if the kernel supports the call.
KERNELS = {
    "cuda": PlatformKernel(
        pallas_gpu.gated_linear_attention_pallas_gpu, pallas_gpu.unsupported_reason, pallas_gpu.CHUNK
    ),
    "tpu": PlatformKernel(
        pallas_tpu.gated_linear_attention_pallas_tpu, pallas_tpu.unsupported_reason, pallas_tpu.CHUNK
    ),
}


def gated_linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    beta: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Linear attention with a forget gate (GLA, arXiv 2312.06635; with one decay per head, "GLA" of MesaNet, table 1).

        S_t = exp(log_decay_t) S_{t-1} + beta_t k_t v_t^T        o_t = S_t^T q_t

    All floating inputs have gradients, including `initial_state`; the backward pass keeps only the inputs.

    Args:
      q, k: [B, T, H, K]; q is not scaled.
      v: [B, T, H, V].
      log_decay: at most 0; -inf is allowed. [B, T, H]: one decay per head; [B, T, H, K]: one per key channel.
      beta: [B, T, H], the input gate. Default: 1.
      segment_ids: int [B, T], non-decreasing; the state starts from zero at each new document. Default: one document
        per row.
      initial_state: [B, H, K, V]; belongs to the document of the first token. Default: zero.
      chunk_size: tokens computed as one dense block, rounded up to a power of two. Does not change the result.
        Default: 64.
      implementation: "reference", "xla", "pallas_gpu" (NVIDIA Hopper, chunks of 64, K and V of 64 or 128) or
        "pallas_tpu" (chunks of 128, K and V multiples of 64 up to 256); the last two need one decay per head, and q, k
        and v in bfloat16. None chooses the fastest that supports the call.

    Returns:
      (o [B, T, H, V] in v's dtype, the state after the last token [B, H, K, V] float32).

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: there is no such implementation, or it cannot run this call.
    """
    run = dispatch.choose(
        "gated_linear_attention",
        implementation,
        IMPLEMENTATIONS,
        default=xla.gated_linear_attention_xla,
        kernels=KERNELS,
        static_arguments=1,
    )
    sizes = _check_arrays("gated_linear_attention", "BTH", q, k, v, log_decay, beta, initial_state)
    segment_ids = checks.segments("gated_linear_attention", segment_ids, sizes)
    checks.check_positive("gated_linear_attention", chunk_size=chunk_size)

    dtype = checks.accumulation_dtype(q, k, v)
    beta = jnp.ones(q.shape[:3], dtype) if beta is None else beta.astype(dtype)
    state = jnp.zeros([sizes[axis] for axis in "BHKV"], dtype) if initial_state is None else initial_state.astype(dtype)
    run = partial(run, chunks.pick_chunk(chunk_size, sequence_parallel.shard_length(sizes["T"])))
    return sequence_parallel.run_recurrent_op(
        run, SHARD_TRANSITION, (q, k, v, log_decay.astype(dtype), beta), (), state, segment_ids
    )


def gated_linear_attention_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    state: jax.Array,
    *,
    beta: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes one decoding step of `gated_linear_attention`: the same computation at T = 1.

    Args:
      q, k: [B, H, K].
      v: [B, H, V].
      log_decay: [B, H] or [B, H, K].
      state: [B, H, K, V].
      beta: [B, H]. Default: 1.
      implementation: as in `gated_linear_attention`.

    Returns:
      (o [B, H, V] in v's dtype, the new state).

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: there is no such implementation, or it cannot run this call.
    """
    _check_arrays("gated_linear_attention_step", "BH", q, k, v, log_decay, beta, state)
    q, k, v, log_decay = (x[:, None] for x in (q, k, v, log_decay))
    beta = None if beta is None else beta[:, None]
    o, state = gated_linear_attention(q, k, v, log_decay, beta=beta, initial_state=state, implementation=implementation)
    return o[:, 0], state


def _check_arrays(op, rows, q, k, v, log_decay, beta, state):
    """Checks shapes and dtypes and returns the size of each axis. `rows` are the leading axes: "BTH" or "BH"."""
    decay_axes = rows + "K" if log_decay.ndim == len(rows) + 1 else rows
    sizes = checks.check_shapes(
        op,
        {
            "q": (q, rows + "K"),
            "k": (k, rows + "K"),
            "v": (v, rows + "V"),
            "log_decay": (log_decay, decay_axes),
            "beta": (beta, rows),
            "state": (state, "BHKV"),
        },
    )
    checks.check_dtypes(
        op, jnp.floating, {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "state": state}
    )
    return sizes
