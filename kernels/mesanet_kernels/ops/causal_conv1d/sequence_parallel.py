"""What a span of tokens does to the inputs that a convolution remembers (sequence.py).

B batch, T time, D channels, W taps, X = W - 1 remembered inputs, L = min(T, X) of them from the span.
"""

import jax.numpy as jnp

from mesanet_kernels.ops.causal_conv1d.xla import last_inputs
from mesanet_kernels.sequence_parallel import Memory, where_rows


def summarise(x_BTD, w_WD, bias_D, segment_ids_BT):
    """Whether the first document is the last one too, [B], and the last inputs of the last one, [B, L, D]."""
    del bias_D
    batch, length, channels = x_BTD.shape
    kept = w_WD.shape[0] - 1
    last_BXD = last_inputs(x_BTD, jnp.zeros((batch, kept, channels), x_BTD.dtype), segment_ids_BT)
    return segment_ids_BT[:, 0] == segment_ids_BT[:, -1], last_BXD[:, max(kept - length, 0) :]


def advance(summary, tail_BXD):
    continues_B, last_BLD = summary
    known_BSD = jnp.concatenate([where_rows(continues_B, tail_BXD, 0), last_BLD], axis=1)
    return known_BSD[:, last_BLD.shape[1] :]


MEMORY = Memory(summarise, advance)
