"""Public `linear_scan` and its step: checks, defaults, choice of implementation.

B batch, T time, D channels.
"""

import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.dispatch import PlatformKernel
from mesanet_kernels.ops.linear_scan import pallas_gpu, pallas_tpu, reference, xla
from mesanet_kernels.ops.linear_scan.sequence_parallel import MEMORY

IMPLEMENTATIONS = {
    "reference": reference.linear_scan,
    "xla": xla.linear_scan,
    "pallas_gpu": pallas_gpu.linear_scan,
    "pallas_tpu": pallas_tpu.linear_scan,
}
# What None prefers on each platform, if the kernel supports the call.
KERNELS = {
    "cuda": PlatformKernel(pallas_gpu.linear_scan, pallas_gpu.unsupported_reason, pallas_gpu.TURN),
    "tpu": PlatformKernel(pallas_tpu.linear_scan, pallas_tpu.unsupported_reason, pallas_tpu.ROWS),
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
    run = dispatch.choose(
        "linear_scan", implementation, IMPLEMENTATIONS, default=xla.linear_scan, kernels=KERNELS, static_arguments=0
    )
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
