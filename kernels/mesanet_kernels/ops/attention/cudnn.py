"""Causal attention with cuDNN's fused kernel, called through `jax.nn.dot_product_attention`.

The kernel handles causality and the window itself. It has no segment ids, so documents are passed as a boolean mask,
which takes memory [B, 1, T, T]. The mask is constant, so no gradient is computed for it.

B batch, T time, H query heads, J key heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.dispatch import require
from mesanet_kernels.ops.attention.xla import AttentionOptions
from mesanet_kernels.partition import time_axes

DTYPES = (jnp.bfloat16, jnp.float16)


def attention_cudnn(options: AttentionOptions, q_BTHK, k_BTJK, v_BTJV, segment_ids_BT) -> jax.Array:
    """Computes `api.attention`. Raises NotImplementedError if cuDNN does not support the call."""
    require("attention", "cudnn", unsupported_reason(options, q_BTHK, k_BTJK, v_BTJV))
    mask_B1TT = None
    if not options.one_document:
        mask_B1TT = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
    # The window that JAX takes does not count the token itself.
    window = None if options.window is None else (options.window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BTJK,
        v_BTJV,
        mask=mask_B1TT,
        scale=options.scale,
        is_causal=True,
        local_window_size=window,
        implementation="cudnn",
    )


def unsupported_reason(options: AttentionOptions, q_BTHK, k_BTJK, v_BTJV, *_) -> str:
    """Returns why cuDNN cannot run this call; empty if it can."""
    dtypes = {q_BTHK.dtype, k_BTJK.dtype, v_BTJV.dtype}
    key_size, value_size = q_BTHK.shape[-1], v_BTJV.shape[-1]
    reasons = {
        "needs an NVIDIA GPU": jax.default_backend() != "gpu",
        "needs q, k and v all bfloat16 or all float16": len(dtypes) > 1 or dtypes.isdisjoint(map(jnp.dtype, DTYPES)),
        "needs K = V, a multiple of 8 and at most 128": key_size != value_size or key_size % 8 or key_size > 128,
        "needs rows that are not split over devices along time": bool(time_axes(q_BTHK.shape[1])),
        "needs an even T if segment_ids are given": q_BTHK.shape[1] % 2 and not options.one_document,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
