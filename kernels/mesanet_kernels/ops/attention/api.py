"""Public `attention`: checks, defaults, choice of implementation.

B batch, T time, H query heads, J key heads, K key size, V value size.
"""

import jax.numpy as jnp

from mesanet_kernels import checks, dispatch
from mesanet_kernels.dispatch import PlatformKernel
from mesanet_kernels.ops.attention import cudnn, reference, xla
from mesanet_kernels.ops.attention.cache import default_scale
from mesanet_kernels.ops.attention.sequence_parallel import attention as attention_on_span
from mesanet_kernels.partition import time_axes
from mesanet_kernels.sequence_parallel import split


def _xla(options, *arrays):
    """`xla.attention`; where devices share a row, each with its own span of the queries."""
    axes = time_axes(arrays[0].shape[1])
    if not axes:
        return xla.attention(options, *arrays)
    on_span = lambda rows, whole: (attention_on_span(options, axes, *rows), whole)
    return split(on_span, arrays, (), axes=axes)[0]


IMPLEMENTATIONS = {"reference": reference.attention, "xla": _xla, "cudnn": cudnn.attention}
# What None prefers on each platform, if the kernel supports the call.
KERNELS = {"cuda": PlatformKernel(cudnn.attention, cudnn.unsupported_reason)}


def attention(q, k, v, *, window=None, segment_ids=None, scale=None, implementation=None):
    """Causal softmax attention with grouped heads.

    Args:
      q: [B, T, H, K]; k: [B, T, J, K]; v: [B, T, J, V], H % J == 0; query head h reads key head h // (H / J).
      window: token t sees tokens t - window + 1 to t; None: all up to t.
      segment_ids: int [B, T], non-decreasing; a token sees its own document only.
      scale: factor on the scores; default 1 / sqrt(K).
      implementation: "reference"; "xla"; "cudnn" (NVIDIA GPUs, bfloat16 or float16, K = V, rows that no mesh splits);
        or None for the best that supports the call.

    Returns:
      o [B, T, H, V] in v's dtype; softmax in float32.

    Raises:
      ValueError: shapes or dtypes that do not fit. NotImplementedError: the implementation lacks what is asked.
    """
    run = dispatch.choose(
        "attention", implementation, IMPLEMENTATIONS, default=_xla, kernels=KERNELS, static_arguments=1
    )
    sizes = checks.check_shapes("attention", {"q": (q, "BTHK"), "k": (k, "BTJK"), "v": (v, "BTJV")})
    checks.check_dtypes("attention", jnp.floating, {"q": q, "k": k, "v": v})
    checks.check_groups("attention", sizes)
    checks.check_positive("attention", window=window)
    options = xla.Options(window, default_scale(q, scale), one_document=segment_ids is None)
    return run(options, q, k, v, checks.segments("attention", segment_ids, sizes))
