"""Public `causal_conv1d` and its step: checks, defaults, choice of implementation.

B batch, T time, D channels, W taps.
"""

from functools import partial

import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.dispatch import PlatformKernel
from mesanet_kernels.ops.causal_conv1d import pallas_gpu, reference, xla
from mesanet_kernels.ops.causal_conv1d.sequence_parallel import MEMORY

IMPLEMENTATIONS = {
    "reference": reference.causal_conv1d,
    "xla": xla.causal_conv1d,
    "pallas_gpu": pallas_gpu.causal_conv1d,
}
# What None prefers on each platform, if the kernel supports the call.
KERNELS = {"cuda": PlatformKernel(pallas_gpu.causal_conv1d, pallas_gpu.unsupported_reason, pallas_gpu.SPAN)}


def causal_conv1d(x, w, bias=None, *, activation=None, segment_ids=None, initial_state=None, implementation=None):
    """Causal depthwise convolution over time: y_t = activation(bias + sum_j w_j x_{t - W + 1 + j}).

    The last tap multiplies the current token. Sums are float32. Taps do not cross documents.

    Args:
      x: [B, T, D].
      w: [W, D].
      bias: [D]; default 0.
      activation: None or "silu".
      segment_ids: int [B, T], non-decreasing.
      initial_state: [B, W-1, D], the inputs before the first, of the first token's document. Default zero.
      implementation: "reference", "xla", "pallas_gpu" (NVIDIA Hopper, at least 128 channels a device, 2 to 8 taps;
        float32 sums), or None for the best that supports the call.

    Returns:
      (y [B, T, D], final state [B, W-1, D]: the last W-1 inputs of the last document, zero where it is shorter),
      both in x's dtype.

    Raises:
      ValueError: shapes, dtypes or an activation that do not fit.
      NotImplementedError: the implementation lacks what is asked.
    """
    run = dispatch.choose(
        "causal_conv1d", implementation, IMPLEMENTATIONS, default=xla.causal_conv1d, kernels=KERNELS, static_arguments=1
    )
    sizes = checks.check_shapes("causal_conv1d", {"x": (x, "BTD"), "w": (w, "WD"), "bias": (bias, "D")})
    segment_ids = checks.segments("causal_conv1d", segment_ids, sizes)
    checks.check_dtypes("causal_conv1d", jnp.floating, {"x": x, "w": w, "bias": bias, "initial_state": initial_state})
    if activation not in xla.ACTIVATIONS:
        raise ValueError(f"causal_conv1d: activation is {activation!r}; it must be one of {list(xla.ACTIVATIONS)}")
    tail_shape = sizes["B"], sizes["W"] - 1, sizes["D"]
    if initial_state is None:
        initial_state = jnp.zeros(tail_shape, x.dtype)
    if initial_state.shape != tail_shape:
        raise ValueError(
            f"causal_conv1d: the state has shape {initial_state.shape}; it needs [B, W-1, D] = {tail_shape}"
        )
    bias = jnp.zeros(w.shape[1:], w.dtype) if bias is None else bias
    tail = initial_state.astype(x.dtype)
    return sequence_parallel.recurrent(partial(run, activation), MEMORY, (x,), (w, bias), tail, segment_ids)


def causal_conv1d_step(x, w, state, *, bias=None, activation=None, implementation=None):
    """One token of `causal_conv1d`.

    Args:
      x: [B, D]; w: [W, D]; state: [B, W-1, D], the inputs before x; bias, activation: as in `causal_conv1d`.

    Returns:
      (y [B, D], new state).
    """
    checks.check_shapes("causal_conv1d_step", {"x": (x, "BD")})
    y, state = causal_conv1d(
        x[:, None], w, bias, activation=activation, initial_state=state, implementation=implementation
    )
    return y[:, 0], state
