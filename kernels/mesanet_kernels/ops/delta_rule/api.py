"""The public functions `delta_rule` and `delta_rule_step`: checks, defaults, choice of implementation.

B batch, T time, H heads, K key size, V value size.
"""

from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.delta_rule import reference, xla
from mesanet_kernels.ops.delta_rule.sequence_parallel import advance, summarise

IMPLEMENTATIONS = {"reference": reference.delta_rule_reference, "xla": xla.delta_rule_xla}


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    *,
    log_decay: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The delta rule: each token corrects what its key recalls (DeltaNet, arXiv 2406.06484; gated, arXiv 2412.06464).

        S_t = exp(log_decay_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = S_t^T q_t

    All floating inputs have gradients, including `initial_state`; the backward pass keeps only the inputs.

    Args:
      q, k: [B, T, H, K]; k is L2-normalised by the caller; q is not scaled.
      v: [B, T, H, V].
      beta: [B, T, H], in [0, 1].
      log_decay: [B, T, H], at most 0; -inf is allowed. Given, this is Gated DeltaNet; None, without decay, DeltaNet.
      segment_ids: int [B, T], non-decreasing; the state starts from zero at each new document. Default: one document
        per row.
      initial_state: [B, H, K, V]; belongs to the document of the first token. Default: zero.
      chunk_size: tokens computed as one dense block, rounded up to a power of two. Does not change the result.
        Default: 64.
      implementation: "reference", "xla", or None for the fastest that supports the call.

    Returns:
      (o [B, T, H, V] in v's dtype, the state after the last token [B, H, K, V] float32).

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: there is no such implementation.
    """
    run = dispatch.choose("delta_rule", implementation, IMPLEMENTATIONS, default=xla.delta_rule_xla)
    sizes = _check_arrays("delta_rule", "BTH", q, k, v, beta, log_decay, initial_state)
    segment_ids = checks.segments("delta_rule", segment_ids, sizes)
    checks.check_positive("delta_rule", chunk_size=chunk_size)

    dtype = checks.accumulation_dtype(q, k, v)
    log_decay = jnp.zeros(beta.shape, dtype) if log_decay is None else log_decay.astype(dtype)
    state = jnp.zeros([sizes[axis] for axis in "BHKV"], dtype) if initial_state is None else initial_state.astype(dtype)
    chunk = chunks.pick_chunk(chunk_size, sequence_parallel.shard_length(sizes["T"]))
    transition = sequence_parallel.ShardTransition(partial(summarise, chunk), advance)
    per_token = q, k, v, beta.astype(dtype), log_decay
    return sequence_parallel.run_recurrent_op(partial(run, chunk), transition, per_token, (), state, segment_ids)


def delta_rule_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    log_decay: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes one decoding step of `delta_rule`: the same computation at T = 1.

    Args:
      q, k: [B, H, K].
      v: [B, H, V].
      beta: [B, H].
      state: [B, H, K, V].
      log_decay: [B, H], or None for no decay.
      implementation: as in `delta_rule`.

    Returns:
      (o [B, H, V] in v's dtype, the new state).

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: there is no such implementation.
    """
    _check_arrays("delta_rule_step", "BH", q, k, v, beta, log_decay, state)
    q, k, v, beta = (x[:, None] for x in (q, k, v, beta))
    log_decay = None if log_decay is None else log_decay[:, None]
    o, state = delta_rule(q, k, v, beta, log_decay=log_decay, initial_state=state, implementation=implementation)
    return o[:, 0], state


def _check_arrays(op, rows, q, k, v, beta, log_decay, state):
    """Checks shapes and dtypes and returns the size of each axis. `rows` are the leading axes: "BTH" or "BH"."""
    sizes = checks.check_shapes(
        op,
        {
            "q": (q, rows + "K"),
            "k": (k, rows + "K"),
            "v": (v, rows + "V"),
            "beta": (beta, rows),
            "log_decay": (log_decay, rows),
            "state": (state, "BHKV"),
        },
    )
    checks.check_dtypes(
        op, jnp.floating, {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "state": state}
    )
    return sizes
