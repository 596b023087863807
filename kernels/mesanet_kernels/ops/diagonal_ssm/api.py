"""Public `diagonal_ssm` and its step: checks, defaults, choice of implementation.

B batch, T time, H channels, N modes.
"""

from functools import partial

import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.ops.diagonal_ssm import fft, reference, xla
from mesanet_kernels.ops.diagonal_ssm.sequence_parallel import advance, summarise

IMPLEMENTATIONS = {"reference": reference.diagonal_ssm, "xla": xla.diagonal_ssm, "fft": fft.diagonal_ssm}
DEFAULT_CHUNK = 32  # the work inside a chunk grows with it, the number of states kept for the backward pass shrinks


def diagonal_ssm(
    u, log_rate, log_frequency, c_re, c_im, skip,
    *, segment_ids=None, initial_state=None, chunk_size=None, implementation=None,
):  # fmt: skip
    """A diagonal linear state space in every channel (DSS, arXiv 2203.14343; in GSS, arXiv 2206.13947).

        Lambda = -exp(log_rate) + i exp(log_frequency)
        s_t = e^Lambda s_{t-1} + (e^Lambda - 1) / Lambda u_t        y_t = Re(C s_t) + skip u_t

    The N modes are shared by all channels. Complex numbers come in and go out as their real and imaginary parts, so
    that gradients are those of real numbers and no optimizer or checkpoint meets a complex one. Computed in float32
    (float64 where u is). All inputs have gradients, `initial_state` too; the backward pass keeps only the inputs.

    Args:
      u: [B, T, H].
      log_rate, log_frequency: [N], Lambda as above, clipped to -40 ... 40.
      c_re, c_im: [H, N], the parts of C.
      skip: [H], D of the state-space literature.
      segment_ids: int [B, T], non-decreasing; the state starts from zero at each new document.
      initial_state: (real, imaginary), each [B, H, N]; belongs to the first token's document. Default zero.
      chunk_size: tokens convolved as one dense block ("xla"); does not change the result. Default 32.
      implementation: "reference"; "xla", in chunks; "fft", one convolution over the row, without `segment_ids`, and
        causal but for rounding; None for the best, the chunks.

    Returns:
      (y [B, T, H] in u's dtype, final state (real, imaginary), each [B, H, N] float32).

    Raises:
      ValueError: shapes or dtypes that do not fit. NotImplementedError: the implementation lacks what is asked.
    """
    run = dispatch.choose("diagonal_ssm", implementation, IMPLEMENTATIONS, default=xla.diagonal_ssm)
    arrays = dict(u=u, c_re=c_re, c_im=c_im, log_frequency=log_frequency, log_rate=log_rate, skip=skip)
    sizes = _check_arrays("diagonal_ssm", "BTH", arrays, initial_state)
    if implementation == "fft" and segment_ids is not None:
        raise NotImplementedError("diagonal_ssm: 'fft' has no segment_ids, a transform mixes documents; 'xla' has")
    segment_ids = checks.segments("diagonal_ssm", segment_ids, sizes)
    checks.check_positive("diagonal_ssm", chunk_size=chunk_size)

    dtype = checks.accumulation_dtype(u)
    if initial_state is None:
        initial_state = [jnp.zeros([sizes[axis] for axis in "BHN"], dtype)] * 2
    state = tuple(x.astype(dtype) for x in initial_state)
    system = tuple(x.astype(dtype) for x in (log_rate, log_frequency, c_re, c_im, skip))
    chunk = min(chunk_size or DEFAULT_CHUNK, sequence_parallel.span_length(sizes["T"]))
    memory = sequence_parallel.Memory(partial(summarise, chunk), advance)
    return sequence_parallel.recurrent(partial(run, chunk), memory, (u,), system, state, segment_ids)


def diagonal_ssm_step(u, log_rate, log_frequency, c_re, c_im, skip, state, *, implementation=None):
    """One token of `diagonal_ssm`, the same computation at T = 1.

    Args:
      u: [B, H]; log_rate, log_frequency, c_re, c_im, skip: as in `diagonal_ssm`; state: (real, imaginary), [B, H, N].

    Returns:
      (y [B, H], new state).
    """
    arrays = dict(u=u, c_re=c_re, c_im=c_im, log_frequency=log_frequency, log_rate=log_rate, skip=skip)
    _check_arrays("diagonal_ssm_step", "BH", arrays, state)
    y, state = diagonal_ssm(
        u[:, None], log_rate, log_frequency, c_re, c_im, skip, initial_state=state, implementation=implementation
    )
    return y[:, 0], state


def _check_arrays(op, rows, arrays, state):
    axes = dict(u=rows, c_re="HN", c_im="HN", log_frequency="N", log_rate="N", skip="H")
    real, imaginary = (None, None) if state is None else state
    arguments = {name: (array, axes[name]) for name, array in arrays.items()}
    arguments |= {"state (real)": (real, "BHN"), "state (imaginary)": (imaginary, "BHN")}
    sizes = checks.check_shapes(op, arguments)
    checks.check_dtypes(op, jnp.floating, {name: array for name, (array, _) in arguments.items()})
    return sizes
