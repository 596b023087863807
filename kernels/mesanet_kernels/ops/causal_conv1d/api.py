"""The public functions `causal_conv1d` and `causal_conv1d_step`: checks, defaults, the choice of an implementation.

B batch, T time, D channels, W taps.
"""

from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.dispatch import PlatformKernel
from mesanet_kernels.ops.causal_conv1d import pallas_gpu, reference, xla
from mesanet_kernels.ops.causal_conv1d.sequence_parallel import SHARD_TRANSITION

IMPLEMENTATIONS = {
    "reference": reference.causal_conv1d_reference,
    "xla": xla.causal_conv1d_xla,
    "pallas_gpu": pallas_gpu.causal_conv1d_pallas_gpu,
}
# What `implementation=None` prefers on each platform, if the kernel supports the call.
KERNELS = {
    "cuda": PlatformKernel(pallas_gpu.causal_conv1d_pallas_gpu, pallas_gpu.unsupported_reason, pallas_gpu.BLOCK_TOKENS)
}


def causal_conv1d(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes a causal depthwise convolution over time.

        y_t = activation(bias + sum_j w_j x_{t - W + 1 + j})

    The last tap multiplies the current token. Sums are computed in float32. Inputs of other documents count as zero.

    Args:
      x: [B, T, D].
      w: [W, D].
      bias: [D]. Default 0.
      activation: None or "silu".
      segment_ids: int [B, T], the document of each token, non-decreasing along a row. Default: a row is one document.
      initial_state: [B, W-1, D], the inputs before the first one, of the first token's document. Default zero.
      implementation: "reference"; "xla"; "pallas_gpu" (NVIDIA Hopper, at least 128 channels per device, 2 to 8 taps,
        no float64); or None for the fastest that supports the call.

    Returns:
      (y [B, T, D], the final state [B, W-1, D]), both in the dtype of x. The final state contains the last W-1 inputs
      of the last document, with zeros before its start.

    Raises:
      ValueError: a shape, a dtype or the activation is wrong.
      NotImplementedError: there is no such implementation, or it does not support the call.
    """
    run = dispatch.choose(
        "causal_conv1d",
        implementation,
        IMPLEMENTATIONS,
        default=xla.causal_conv1d_xla,
        kernels=KERNELS,
        static_arguments=1,
    )
    sizes = checks.check_shapes("causal_conv1d", {"x": (x, "BTD"), "w": (w, "WD"), "bias": (bias, "D")})
    segment_ids = checks.segments("causal_conv1d", segment_ids, sizes)
    checks.check_dtypes("causal_conv1d", jnp.floating, {"x": x, "w": w, "bias": bias, "initial_state": initial_state})
    if activation not in xla.ACTIVATIONS:
        raise ValueError(f"causal_conv1d: activation is {activation!r}; it must be one of {list(xla.ACTIVATIONS)}")
    tail_shape = sizes["B"], sizes["W"] - 1, sizes["D"]
    tail = jnp.zeros(tail_shape, x.dtype) if initial_state is None else initial_state
    if tail.shape != tail_shape:
        raise ValueError(f"causal_conv1d: the state has shape {tail.shape}; it needs [B, W-1, D] = {tail_shape}")
    bias = jnp.zeros(w.shape[1:], w.dtype) if bias is None else bias
    tail = tail.astype(x.dtype)
    return sequence_parallel.run_recurrent_op(
        partial(run, activation), SHARD_TRANSITION, (x,), (w, bias), tail, segment_ids
    )


def causal_conv1d_step(
    x: jax.Array,
    w: jax.Array,
    state: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes one decoding step of `causal_conv1d`.

    Args:
      x: [B, D].
      state: [B, W-1, D], the inputs before x.
      w, bias, activation, implementation: as in `causal_conv1d`.

    Returns:
      (y [B, D], the new state).

    Raises:
      ValueError, NotImplementedError: as `causal_conv1d`.
    """
    checks.check_shapes("causal_conv1d_step", {"x": (x, "BD")})
    y, state = causal_conv1d(
        x[:, None], w, bias, activation=activation, initial_state=state, implementation=implementation
    )
    return y[:, 0], state
