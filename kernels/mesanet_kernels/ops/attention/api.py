"""Public `attention`: checks, defaults, choice of implementation.

B batch, T time, H query heads, J key heads, K key size, V value size.
"""

import jax.numpy as jnp

from mesanet_kernels import checks
from mesanet_kernels.ops.attention import reference, xla
from mesanet_kernels.ops.attention.cache import default_scale

IMPLEMENTATIONS = {"reference": reference.attention, "xla": xla.attention}


def attention(q, k, v, *, window=None, segment_ids=None, scale=None, implementation=None):
    """Causal softmax attention with grouped heads.

    Args:
      q: [B, T, H, K]; k: [B, T, J, K]; v: [B, T, J, V], H % J == 0; query head h reads key head h // (H / J).
      window: token t sees tokens t - window + 1 to t; None: all up to t.
      segment_ids: int [B, T], non-decreasing; a token sees its own document only.
      scale: factor on the scores; default 1 / sqrt(K).
      implementation: "reference", "xla", or None for the best that supports the call.

    Returns:
      o [B, T, H, V] in v's dtype; softmax in float32.

    Raises:
      ValueError: shapes or dtypes that do not fit. NotImplementedError: the implementation lacks what is asked.
    """
    run = checks.choose("attention", implementation, IMPLEMENTATIONS, best="xla")
    sizes = checks.check_shapes("attention", {"q": (q, "BTHK"), "k": (k, "BTJK"), "v": (v, "BTJV")})
    checks.check_dtypes("attention", jnp.floating, {"q": q, "k": k, "v": v})
    checks.check_groups("attention", sizes)
    checks.check_positive("attention", window=window)
    segment_ids = checks.segments("attention", segment_ids, sizes)
    return run(xla.Options(window, default_scale(q, scale)), q, k, v, segment_ids)
