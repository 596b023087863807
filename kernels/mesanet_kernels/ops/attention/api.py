"""The public function `attention`: checks, defaults and the choice of an implementation.

B batch, T time, H query heads, J key heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, dispatch
from mesanet_kernels.dispatch import PlatformKernel
from mesanet_kernels.ops.attention import cudnn, reference, xla
from mesanet_kernels.ops.attention.cache import default_scale
from mesanet_kernels.ops.attention.sequence_parallel import attend_shard
from mesanet_kernels.partition import time_axes
from mesanet_kernels.sequence_parallel import map_shards


def _attention_xla(options: xla.AttentionOptions, *arrays: jax.Array) -> jax.Array:
    """Runs `xla.attention_xla`, or one shard of the queries on each device if the mesh splits the rows along time."""
    axes = time_axes(arrays[0].shape[1])
    if not axes:
        return xla.attention_xla(options, *arrays)
    return map_shards(lambda arrays, _: (attend_shard(options, axes, *arrays), ()), arrays, (), axes=axes)[0]


IMPLEMENTATIONS = {
    "reference": reference.attention_reference,
    "xla": _attention_xla,
    "cudnn": cudnn.attention_cudnn,
}
# What `implementation=None` prefers on each platform, if the kernel supports the call.
KERNELS = {"cuda": PlatformKernel(cudnn.attention_cudnn, cudnn.unsupported_reason)}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Computes causal softmax attention with grouped heads.

    A token sees itself and the earlier tokens of its document. The softmax is computed in float32.

    Args:
      q: [B, T, H, K], where H is a multiple of J; query head h reads key head h // (H / J).
      k: [B, T, J, K].
      v: [B, T, J, V].
      window: the number of tokens that a token sees, itself included; None for all earlier tokens.
      segment_ids: int [B, T], the document of each token, non-decreasing along a row. Default: a row is one document.
      scale: the factor applied to the scores. Default 1 / sqrt(K).
      implementation: "reference"; "xla"; "cudnn" (NVIDIA GPUs, bfloat16 or float16, K = V, rows that the mesh does not
        split along time); or None for the fastest that supports the call.

    Returns:
      o [B, T, H, V] in the dtype of v.

    Raises:
      ValueError: a shape, a dtype or the window is wrong.
      NotImplementedError: there is no such implementation, or it does not support the call.
    """
    run = dispatch.choose(
        "attention", implementation, IMPLEMENTATIONS, default=_attention_xla, kernels=KERNELS, static_arguments=1
    )
    sizes = checks.check_shapes("attention", {"q": (q, "BTHK"), "k": (k, "BTJK"), "v": (v, "BTJV")})
    checks.check_dtypes("attention", jnp.floating, {"q": q, "k": k, "v": v})
    checks.check_groups("attention", sizes)
    checks.check_positive("attention", window=window)
    options = xla.AttentionOptions(window, default_scale(q, scale), one_document=segment_ids is None)
    return run(options, q, k, v, checks.segments("attention", segment_ids, sizes))
