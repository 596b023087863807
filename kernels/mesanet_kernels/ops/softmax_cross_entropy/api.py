"""Public `softmax_cross_entropy`: checks, defaults, choice of implementation.

B batch, T time, D channels, V vocabulary.
"""

from functools import partial

import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.ops.softmax_cross_entropy import reference, xla

IMPLEMENTATIONS = {"reference": reference.softmax_cross_entropy, "xla": xla.softmax_cross_entropy}


def softmax_cross_entropy(
    hidden, embedding, targets, *, softcap=None, weights=None, vocab_size=None, block_size=512, implementation=None
):
    """Per-token negative log-likelihood, in nats, of a head tied to the embedding; never all logits at once.

        loss_t = weight_t (logsumexp(z_t) - z_t[target_t]),   z_t = softcap tanh(embedding hidden_t / softcap)

    Args:
      hidden: [B, T, D]; products take operands of this dtype and accumulate in float32.
      embedding: [V, D]; its gradient is accumulated in float32.
      targets: int [B, T], in [0, vocab_size).
      softcap: bound on the logits' size; None leaves them.
      weights: [B, T]; 0 gives a loss of exactly 0 and no gradient. Default 1.
      vocab_size: rows of the embedding from here on are padding, of probability 0. Default V.
      block_size: time steps whose logits exist at a time ("xla").
      implementation: "reference", "xla", or None for the best.

    Returns:
      [B, T] float32.

    Raises:
      ValueError: shapes, dtypes or numbers that do not fit. NotImplementedError: unknown implementation.
    """
    run = dispatch.choose("softmax_cross_entropy", implementation, IMPLEMENTATIONS, default=xla.softmax_cross_entropy)
    sizes = checks.check_shapes(
        "softmax_cross_entropy",
        {
            "hidden": (hidden, "BTD"),
            "embedding": (embedding, "VD"),
            "targets": (targets, "BT"),
            "weights": (weights, "BT"),
        },
    )
    checks.check_dtypes(
        "softmax_cross_entropy", jnp.floating, {"hidden": hidden, "embedding": embedding, "weights": weights}
    )
    checks.check_dtypes("softmax_cross_entropy", jnp.integer, {"targets": targets})
    checks.check_positive("softmax_cross_entropy", block_size=block_size, vocab_size=vocab_size)
    vocab_size = sizes["V"] if vocab_size is None else vocab_size
    if vocab_size > sizes["V"]:
        raise ValueError(f"softmax_cross_entropy: vocab_size is {vocab_size}; embedding has only {sizes['V']} rows")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softmax_cross_entropy: softcap is {softcap}; it must be positive, or None")

    dtype = checks.accumulation_dtype(hidden)
    weights = jnp.ones(targets.shape, dtype) if weights is None else weights.astype(dtype)
    options = xla.Options(softcap, vocab_size, min(block_size, sequence_parallel.span_length(sizes["T"])))
    return sequence_parallel.by_token(partial(run, options), (hidden, targets, weights), (embedding,))
