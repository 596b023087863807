"""Public `linear_scan` and its step: checks, defaults, choice of implementation.

B batch, T time, D channels.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, sequence_parallel
from mesanet_kernels.ops.linear_scan import pallas_gpu, pallas_tpu, reference, xla
from mesanet_kernels.ops.linear_scan.sequence_parallel import MEMORY

KERNELS = {
    "cuda": (pallas_gpu, pallas_gpu.TURN),
    "tpu": (pallas_tpu, pallas_tpu.ROWS),
}  # and their shortest rows


def _automatic(x, a, *rest):
    """By the platform that is lowered for, which need not be the one that traces."""
    run = {
        platform: kernel.linear_scan
        for platform, (kernel, least) in KERNELS.items()
        if not kernel.lacks(x, a) and x.shape[1] >= least
    }
    return jax.lax.platform_dependent(x, a, *rest, **run, default=xla.linear_scan)


IMPLEMENTATIONS = {
    "reference": reference.linear_scan,
    "xla": xla.linear_scan,
    "pallas_gpu": pallas_gpu.linear_scan,
    "pallas_tpu": pallas_tpu.linear_scan,
}


def linear_scan(x, a, *, segment_ids=None, initial_state=None, implementation=None):
    """A linear recurrence in every channel, as in the RG-LRU of Hawk (arXiv 2402.19427, section 2.4).

        h_t = a_t h_{t-1} + x_t

    All inputs have gradients, `initial_state` too; the backward pass keeps a and h.

    Args:
      x: [B, T, D].
      a: [B, T, D], decays between -1 and 1; larger ones grow without bound. Best float32 where x is bfloat16.
      segment_ids: int [B, T], non-decreasing; the state starts from zero at each new document.
      initial_state: [B, D]; belongs to the first token's document. Default zero.
      implementation: "reference", "xla", "pallas_gpu" (NVIDIA Hopper, at least 128 channels, a multiple of 8; float32
        sums), "pallas_tpu" (float32 sums), or None for the best that supports the call.

    Returns:
      (h [B, T, D] in x's dtype, final state [B, D] float32).

    Raises:
      ValueError: shapes or dtypes that do not fit. NotImplementedError: the implementation lacks what is asked.
    """
    run = checks.choose("linear_scan", implementation, IMPLEMENTATIONS | {None: _automatic}, best=None)
    sizes = _check_arrays("linear_scan", "BTD", x, a, initial_state)
    segment_ids = checks.segments("linear_scan", segment_ids, sizes)
    dtype = checks.accumulation_dtype(x, a)
    state = jnp.zeros((sizes["B"], sizes["D"]), dtype) if initial_state is None else initial_state.astype(dtype)
    return sequence_parallel.recurrent(run, MEMORY, (x, a), (), state, segment_ids)


def linear_scan_step(x, a, state, *, implementation=None):
    """One token of `linear_scan`, the same computation at T = 1.

    Args:
      x, a, state: [B, D].

    Returns:
      (h [B, D] in x's dtype, new state [B, D]).
    """
    _check_arrays("linear_scan_step", "BD", x, a, state)
    h, state = linear_scan(x[:, None], a[:, None], initial_state=state, implementation=implementation)
    return h[:, 0], state


def _check_arrays(op, rows, x, a, state):
    sizes = checks.check_shapes(op, {"x": (x, rows), "a": (a, rows), "state": (state, "BD")})
    checks.check_dtypes(op, jnp.floating, {"x": x, "a": a, "state": state})
    return sizes
