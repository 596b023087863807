"""Causal attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`.

Causality and the window are the kernel's own. Documents are a boolean mask: the kernel knows no segment ids, and
takes a mask as a bias [B, 1, T, T] in memory (constant, so no gradient of it is computed).

B batch, T time, H query heads, J key heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.dispatch import require
from mesanet_kernels.partition import time_axes

DTYPES = (jnp.bfloat16, jnp.float16)


def attention(options, q_BTHK, k_BTJK, v_BTJV, segment_ids_BT):
    """Raises NotImplementedError where cuDNN lacks what the call needs."""
    require("attention", "cudnn", unsupported_reason(options, q_BTHK, k_BTJK, v_BTJV))
    mask_B1TT = None
    if not options.one_document:
        mask_B1TT = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]
    # JAX's window does not count the token itself.
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


def unsupported_reason(options, q_BTHK, k_BTJK, v_BTJV, *_):
    """Why cuDNN cannot run this call; empty if it can."""
    dtypes = {q_BTHK.dtype, k_BTJK.dtype, v_BTJV.dtype}
    key_size, value_size = q_BTHK.shape[-1], v_BTJV.shape[-1]
    reasons = {
        "needs an NVIDIA GPU": jax.default_backend() != "gpu",
        "needs q, k and v all bfloat16 or all float16": len(dtypes) > 1 or dtypes.isdisjoint(map(jnp.dtype, DTYPES)),
        "needs K = V, a multiple of 8, at most 128": key_size != value_size or key_size % 8 or key_size > 128,
        "needs whole rows on a device": bool(time_axes(q_BTHK.shape[1])),
        "needs an even T where there are documents": q_BTHK.shape[1] % 2 and not options.one_document,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
