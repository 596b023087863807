"""Cross-entropy of a tied output layer in plain XLA, computed for one block of tokens at a time.

The logits of only one block exist at a time, and the backward pass computes them again. The target's logit is selected
by a comparison instead of a gather, so that a mesh can split the vocabulary.

B batch, T time, N blocks, C tokens of a block, D channels, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.chunks import pad_time

# The logit of a padding row. Its probability is exactly 0. It is not -inf, because -inf minus -inf is NaN.
MASKED = -1e30


class CrossEntropyOptions(NamedTuple):
    """The static settings of one call of `softmax_cross_entropy`.

    Attributes:
      softcap: the bound on the absolute value of the logits; None for no bound.
      vocab_size: the rows of the embedding from this one on are padding.
      block: the number of tokens of a row whose logits exist at a time.
    """

    softcap: float | None
    vocab_size: int
    block: int


def _cross_entropy(options: CrossEntropyOptions, hidden_BTD, targets_BT, weights_BT, embedding_VD) -> jax.Array:
    """Computes `api.softmax_cross_entropy`."""
    return _forward(options, hidden_BTD, targets_BT, weights_BT, embedding_VD)[0]


def _forward(options, hidden_BTD, targets_BT, weights_BT, embedding_VD):
    operand_VD = embedding_VD.astype(hidden_BTD.dtype)

    def block_loss(_, block):
        hidden_BCD, targets_BC = block
        logits_BCV = _logits(options, hidden_BCD, operand_VD)
        log_total_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        target_BC = jnp.sum(jnp.where(_is_target(targets_BC, logits_BCV), logits_BCV, 0), axis=-1)
        return None, (log_total_BC - target_BC, log_total_BC)

    blocks = [_blocks(options, x) for x in (hidden_BTD, targets_BT)]
    _, outputs = jax.lax.scan(block_loss, None, blocks)
    nll_BT, log_total_BT = (_unblock(x, hidden_BTD.shape[1]) for x in outputs)
    saved = hidden_BTD, targets_BT, weights_BT, embedding_VD, nll_BT, log_total_BT
    return nll_BT * weights_BT, saved


def _backward(options, saved, dloss_BT):
    hidden_BTD, targets_BT, weights_BT, embedding_VD, nll_BT, log_total_BT = saved
    dtype, sum_dtype = hidden_BTD.dtype, log_total_BT.dtype
    operand_VD = embedding_VD.astype(dtype)

    def block_gradient(dembedding_VD, block):
        hidden_BCD, targets_BC, log_total_BC, scale_BC = block
        logits_BCV = _logits(options, hidden_BCD, operand_VD)
        probs_BCV = jnp.exp(logits_BCV - log_total_BC[..., None])
        dlogits_BCV = scale_BC[..., None] * (probs_BCV - _is_target(targets_BC, logits_BCV))
        if options.softcap is not None:  # the derivative of c tanh(x / c); the gradient of masked logits is 0 already
            dlogits_BCV *= 1 - jnp.clip(logits_BCV / options.softcap, -1, 1) ** 2
        dlogits_BCV = dlogits_BCV.astype(dtype)
        dhidden_BCD = _matmul("bcv,vd->bcd", dlogits_BCV, operand_VD, sum_dtype).astype(dtype)
        return dembedding_VD + _matmul("bcv,bcd->vd", dlogits_BCV, hidden_BCD, sum_dtype), dhidden_BCD

    blocks = [_blocks(options, x) for x in (hidden_BTD, targets_BT, log_total_BT, dloss_BT * weights_BT)]
    dembedding_VD, dhidden_NBCD = jax.lax.scan(block_gradient, jnp.zeros(embedding_VD.shape, sum_dtype), blocks)
    dhidden_BTD = _unblock(dhidden_NBCD, hidden_BTD.shape[1])
    return dhidden_BTD, None, dloss_BT * nll_BT, dembedding_VD.astype(embedding_VD.dtype)


softmax_cross_entropy_xla = jax.custom_vjp(_cross_entropy, nondiff_argnums=(0,))
softmax_cross_entropy_xla.defvjp(_forward, _backward)


def _logits(options, hidden_BCD, embedding_VD):
    logits_BCV = _matmul("bcd,vd->bcv", hidden_BCD, embedding_VD, accumulation_dtype(hidden_BCD))
    if options.softcap is not None:
        logits_BCV = options.softcap * jnp.tanh(logits_BCV / options.softcap)
    return jnp.where(_vocabulary(logits_BCV) < options.vocab_size, logits_BCV, MASKED)


def _is_target(targets_BC, logits_BCV):
    return _vocabulary(logits_BCV) == targets_BC[..., None]


def _vocabulary(logits_BCV):
    return jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits_BCV.shape[-1]), 2)


def _matmul(equation, a, b, dtype):
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)


def _blocks(options: CrossEntropyOptions, x_BT: jax.Array) -> jax.Array:
    """Reshapes [B, T, ...] to [N, B, C, ...], padding T with zeros, so that the padding has a weight of 0."""
    x_BT = pad_time(x_BT, chunk=options.block)
    batch, time, *rest = x_BT.shape
    return jnp.moveaxis(x_BT.reshape(batch, time // options.block, options.block, *rest), 1, 0)


def _unblock(x_NBC: jax.Array, length: int) -> jax.Array:
    """Reshapes [N, B, C, ...] to [B, T, ...] with T = `length`; undoes `_blocks`."""
    x_BNC = jnp.moveaxis(x_NBC, 0, 1)
    batch, blocks, block, *rest = x_BNC.shape
    return x_BNC.reshape(batch, blocks * block, *rest)[:, :length]
