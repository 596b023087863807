"""Cross-entropy of a tied output layer as it is defined: all logits at once.

B batch, T time, D channels, V vocabulary.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.ops.softmax_cross_entropy.xla import CrossEntropyOptions


def softmax_cross_entropy_reference(
    options: CrossEntropyOptions, hidden_BTD, targets_BT, weights_BT, embedding_VD
) -> jax.Array:
    """Computes `api.softmax_cross_entropy`."""
    dtype = accumulation_dtype(hidden_BTD)
    logits_BTV = jnp.einsum(
        "btd,vd->btv", hidden_BTD.astype(dtype), embedding_VD.astype(dtype), precision=jax.lax.Precision.HIGHEST
    )
    if options.softcap is not None:
        logits_BTV = options.softcap * jnp.tanh(logits_BTV / options.softcap)
    log_probs_BTV = jax.nn.log_softmax(logits_BTV[..., : options.vocab_size])
    loss_BT = -jnp.take_along_axis(log_probs_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return loss_BT * weights_BT
