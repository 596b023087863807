"""The public functions `diagonal_ssm` and `diagonal_ssm_step`: checks, defaults and the choice of an implementation.

B batch, T time, H channels, N modes.
"""

from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.ops.diagonal_ssm import fft, reference, xla
from mesanet_kernels.ops.diagonal_ssm.sequence_parallel import advance, summarise

IMPLEMENTATIONS = {
    "reference": reference.diagonal_ssm_reference,
    "xla": xla.diagonal_ssm_xla,
    "fft": fft.diagonal_ssm_fft,
}
# Tokens per chunk. With larger chunks, the work inside a chunk grows and fewer states are kept for the backward pass.
DEFAULT_CHUNK = 32


def diagonal_ssm(
    u: jax.Array,
    log_rate: jax.Array,
    log_frequency: jax.Array,
    c_re: jax.Array,
    c_im: jax.Array,
    skip: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    initial_state: tuple[jax.Array, jax.Array] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes a diagonal linear state space model in each channel (DSS, arXiv 2203.14343; GSS, arXiv 2206.13947).

        Lambda = -exp(log_rate) + i exp(log_frequency)
        s_t = e^Lambda s_{t-1} + (e^Lambda - 1) / Lambda u_t        y_t = Re(C s_t) + skip u_t

    All channels share the N modes. Complex arguments and results are pairs of real and imaginary part, so that
    optimizers and checkpoints handle real numbers only. The computation is in float32, or in float64 if u is float64.
    There are gradients of all inputs, including `initial_state`. The backward pass keeps only the inputs.

    Args:
      u: [B, T, H].
      log_rate, log_frequency: [N], which define Lambda; they are clipped to [-40, 40].
      c_re, c_im: [H, N], the real and the imaginary part of C.
      skip: [H], called D in the literature on state space models.
      segment_ids: int [B, T], the document of each token, non-decreasing along a row; each document starts from a zero
        state. Default: a row is one document.
      initial_state: (real part, imaginary part), each [B, H, N], of the first token's document. Default zero.
      chunk_size: the number of tokens that "xla" convolves as one dense block; it does not change the result.
        Default 32.
      implementation: "reference"; "xla", in chunks; "fft", one convolution over the row, which does not support
        `segment_ids` and is causal only up to rounding; or None for "xla".

    Returns:
      (y [B, T, H] in the dtype of u, the final state (real part, imaginary part), each [B, H, N] in float32, or float64
      if u is float64).

    Raises:
      ValueError: a shape, a dtype or the chunk size is wrong.
      NotImplementedError: there is no such implementation, or it does not support the call.
    """
    run = dispatch.choose("diagonal_ssm", implementation, IMPLEMENTATIONS, default=xla.diagonal_ssm_xla)
    arrays = dict(u=u, c_re=c_re, c_im=c_im, log_frequency=log_frequency, log_rate=log_rate, skip=skip)
    sizes = _check_arrays("diagonal_ssm", "BTH", arrays, initial_state)
    if implementation == "fft" and segment_ids is not None:
        raise NotImplementedError(
            "diagonal_ssm: 'fft' has no segment_ids, because its transform mixes documents; use 'xla'"
        )
    segment_ids = checks.segments("diagonal_ssm", segment_ids, sizes)
    checks.check_positive("diagonal_ssm", chunk_size=chunk_size)

    dtype = checks.accumulation_dtype(u)
    if initial_state is None:
        zeros_BHN = jnp.zeros([sizes[axis] for axis in "BHN"], dtype)
        initial_state = (zeros_BHN, zeros_BHN)
    state = tuple(x.astype(dtype) for x in initial_state)
    system = tuple(x.astype(dtype) for x in (log_rate, log_frequency, c_re, c_im, skip))
    chunk = min(chunk_size or DEFAULT_CHUNK, sequence_parallel.shard_length(sizes["T"]))
    transition = sequence_parallel.ShardTransition(partial(summarise, chunk), advance)
    return sequence_parallel.run_recurrent_op(partial(run, chunk), transition, (u,), system, state, segment_ids)


def diagonal_ssm_step(
    u: jax.Array,
    log_rate: jax.Array,
    log_frequency: jax.Array,
    c_re: jax.Array,
    c_im: jax.Array,
    skip: jax.Array,
    state: tuple[jax.Array, jax.Array],
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes one decoding step of `diagonal_ssm`.

    Args:
      u: [B, H].
      log_rate, log_frequency, c_re, c_im, skip, implementation: as in `diagonal_ssm`.
      state: (real part, imaginary part), each [B, H, N].

    Returns:
      (y [B, H] in the dtype of u, the new state).

    Raises:
      ValueError, NotImplementedError: as `diagonal_ssm`.
    """
    arrays = dict(u=u, c_re=c_re, c_im=c_im, log_frequency=log_frequency, log_rate=log_rate, skip=skip)
    _check_arrays("diagonal_ssm_step", "BH", arrays, state)
    y, state = diagonal_ssm(
        u[:, None], log_rate, log_frequency, c_re, c_im, skip, initial_state=state, implementation=implementation
    )
    return y[:, 0], state


def _check_arrays(op: str, u_axes: str, arrays: dict[str, jax.Array], state) -> dict[str, int]:
    axes = dict(u=u_axes, c_re="HN", c_im="HN", log_frequency="N", log_rate="N", skip="H")
    real, imaginary = (None, None) if state is None else state
    arguments = {name: (array, axes[name]) for name, array in arrays.items()}
    arguments |= {"state (real)": (real, "BHN"), "state (imaginary)": (imaginary, "BHN")}
    sizes = checks.check_shapes(op, arguments)
    checks.check_dtypes(op, jnp.floating, {name: array for name, (array, _) in arguments.items()})
    return sizes
