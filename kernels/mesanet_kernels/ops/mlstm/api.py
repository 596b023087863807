"""The public functions `mlstm` and `mlstm_step`: checks, defaults, choice of implementation.

B batch, T time, H heads, K key size, V value size.
"""

from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.mlstm import reference, xla
from mesanet_kernels.ops.mlstm.sequence_parallel import SHARD_TRANSITION

type MlstmState = tuple[jax.Array, jax.Array, jax.Array]  # C, n and m

STATE_AXES = ("BHKV", "BHK", "BH")
IMPLEMENTATIONS = {"reference": reference.mlstm_reference, "xla": xla.mlstm_xla}


def mlstm(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    input_gate: jax.Array,
    forget_gate: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    initial_state: MlstmState | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, MlstmState]:
    """The matrix LSTM of xLSTM (arXiv 2405.04517, equations 19 to 27): an exponential input gate and a normaliser.

        f_t = sigmoid(forget_gate_t)          m_t = max(log f_t + m_{t-1}, input_gate_t)
        C_t = f_t e^{m_{t-1} - m_t} C_{t-1} + e^{input_gate_t - m_t} k_t v_t^T
        n_t = f_t e^{m_{t-1} - m_t} n_{t-1} + e^{input_gate_t - m_t} k_t
        o_t = C_t^T q_t / (max(|n_t^T q_t|, e^{-m_t}) + 1e-6)          with q_t / sqrt(K) in place of q_t

    The stabiliser m keeps every exponential at most 1 and changes o only through the 1e-6. It starts at 0 and is kept
    above -40, where e^{-m} would overflow. All floating inputs have gradients, including `initial_state`; the backward
    pass keeps only the inputs.

    Args:
      q, k: [B, T, H, K]; q is divided by sqrt(K) inside.
      v: [B, T, H, V].
      input_gate, forget_gate: [B, T, H], before the exponential and the sigmoid; -inf closes a gate.
      segment_ids: int [B, T], non-decreasing; the state starts from zero at each new document. Default: one document
        per row.
      initial_state: (C [B, H, K, V], n [B, H, K], m [B, H]); belongs to the document of the first token. Default: zero.
      chunk_size: tokens computed as one dense block, rounded up to a power of two. Does not change the result.
        Default: 64.
      implementation: "reference", "xla", or None for the fastest that supports the call.

    Returns:
      (o [B, T, H, V] in v's dtype, the state (C, n, m) after the last token, float32).

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: there is no such implementation.
    """
    run = dispatch.choose("mlstm", implementation, IMPLEMENTATIONS, default=xla.mlstm_xla)
    sizes = _check_arrays("mlstm", "BTH", q, k, v, input_gate, forget_gate, initial_state)
    segment_ids = checks.segments("mlstm", segment_ids, sizes)
    checks.check_positive("mlstm", chunk_size=chunk_size)

    dtype = checks.accumulation_dtype(q, k, v)
    empty_state = (jnp.zeros([sizes[axis] for axis in axes]) for axes in STATE_AXES)
    state = tuple(x.astype(dtype) for x in initial_state or empty_state)
    run = partial(run, chunks.pick_chunk(chunk_size, sequence_parallel.shard_length(sizes["T"])))
    rows = q, k, v, input_gate.astype(dtype), forget_gate.astype(dtype)
    return sequence_parallel.run_recurrent_op(run, SHARD_TRANSITION, rows, (), state, segment_ids)


def mlstm_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    input_gate: jax.Array,
    forget_gate: jax.Array,
    state: MlstmState,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, MlstmState]:
    """Computes one decoding step of `mlstm`: the same computation at T = 1.

    Args:
      q, k: [B, H, K].
      v: [B, H, V].
      input_gate, forget_gate: [B, H].
      state: (C, n, m) as in `mlstm`.
      implementation: as in `mlstm`.

    Returns:
      (o [B, H, V] in v's dtype, the new state).

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: there is no such implementation.
    """
    _check_arrays("mlstm_step", "BH", q, k, v, input_gate, forget_gate, state)
    q, k, v, input_gate, forget_gate = (x[:, None] for x in (q, k, v, input_gate, forget_gate))
    o, state = mlstm(q, k, v, input_gate, forget_gate, initial_state=state, implementation=implementation)
    return o[:, 0], state


def _check_arrays(op, rows, q, k, v, input_gate, forget_gate, state):
    """Checks shapes and dtypes and returns the size of each axis. `rows` are the leading axes: "BTH" or "BH"."""
    cell, normaliser, stabiliser = (None, None, None) if state is None else state
    axes = {
        "q": (q, rows + "K"),
        "k": (k, rows + "K"),
        "v": (v, rows + "V"),
        "input_gate": (input_gate, rows),
        "forget_gate": (forget_gate, rows),
        "state C": (cell, STATE_AXES[0]),
        "state n": (normaliser, STATE_AXES[1]),
        "state m": (stabiliser, STATE_AXES[2]),
    }
    sizes = checks.check_shapes(op, axes)
    checks.check_dtypes(op, jnp.floating, {name: array for name, (array, _) in axes.items()})
    return sizes
