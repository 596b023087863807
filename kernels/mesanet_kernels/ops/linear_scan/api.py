"""The public functions `linear_scan` and `linear_scan_step`: checks, defaults and the choice of an implementation.

B batch, T time, D channels.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.dispatch import PlatformKernel
from mesanet_kernels.ops.linear_scan import pallas_gpu, pallas_tpu, reference, xla
from mesanet_kernels.ops.linear_scan.sequence_parallel import SHARD_TRANSITION

IMPLEMENTATIONS = {
    "reference": reference.linear_scan_reference,
    "xla": xla.linear_scan_xla,
    "pallas_gpu": pallas_gpu.linear_scan_pallas_gpu,
    "pallas_tpu": pallas_tpu.linear_scan_pallas_tpu,
}
# What `implementation=None` prefers on each platform, if the kernel supports the call.
KERNELS = {
    "cuda": PlatformKernel(pallas_gpu.linear_scan_pallas_gpu, pallas_gpu.unsupported_reason, pallas_gpu.GROUP),
    "tpu": PlatformKernel(pallas_tpu.linear_scan_pallas_tpu, pallas_tpu.unsupported_reason, pallas_tpu.TILE_TOKENS),
}


def linear_scan(
    x: jax.Array,
    a: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes a linear recurrence in each channel, as in the RG-LRU of Hawk (arXiv 2402.19427, section 2.4).

        h_t = a_t h_{t-1} + x_t

    There are gradients of all inputs, including `initial_state`. The backward pass keeps a and h.

    Args:
      x: [B, T, D].
      a: [B, T, D], the decays, between -1 and 1; with larger ones the state grows without bound. They should be float32
        even if x is bfloat16.
      segment_ids: int [B, T], the document of each token, non-decreasing along a row; each document starts from a zero
        state. Default: a row is one document.
      initial_state: [B, D], of the first token's document. Default zero.
      implementation: "reference"; "xla"; "pallas_gpu" (NVIDIA Hopper, at least 128 channels, a multiple of 8, no
        float64); "pallas_tpu" (no float64); or None for the fastest that supports the call.

    Returns:
      (h [B, T, D] in the dtype of x, the final state [B, D] in float32, or float64 if an input is float64).

    Raises:
      ValueError: a shape or a dtype is wrong.
      NotImplementedError: there is no such implementation, or it does not support the call.
    """
    run = dispatch.choose(
        "linear_scan", implementation, IMPLEMENTATIONS, default=xla.linear_scan_xla, kernels=KERNELS, static_arguments=0
    )
    sizes = _check_arrays("linear_scan", "BTD", x, a, initial_state)
    segment_ids = checks.segments("linear_scan", segment_ids, sizes)
    dtype = checks.accumulation_dtype(x, a)
    state = jnp.zeros((sizes["B"], sizes["D"]), dtype) if initial_state is None else initial_state.astype(dtype)
    return sequence_parallel.run_recurrent_op(run, SHARD_TRANSITION, (x, a), (), state, segment_ids)


def linear_scan_step(
    x: jax.Array, a: jax.Array, state: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes one decoding step of `linear_scan`.

    Args:
      x, a, state: [B, D].
      implementation: as in `linear_scan`.

    Returns:
      (h [B, D] in the dtype of x, the new state [B, D]).

    Raises:
      ValueError, NotImplementedError: as `linear_scan`.
    """
    _check_arrays("linear_scan_step", "BD", x, a, state)
    h, state = linear_scan(x[:, None], a[:, None], initial_state=state, implementation=implementation)
    return h[:, 0], state


def _check_arrays(op: str, axes: str, x, a, state) -> dict[str, int]:
    sizes = checks.check_shapes(op, {"x": (x, axes), "a": (a, axes), "state": (state, "BD")})
    checks.check_dtypes(op, jnp.floating, {"x": x, "a": a, "state": state})
    return sizes
