"""The public function `softmax_cross_entropy`: checks, defaults and the choice of an implementation.

B batch, T time, D channels, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, dispatch, sequence_parallel
from mesanet_kernels.ops.softmax_cross_entropy import reference, xla

IMPLEMENTATIONS = {
    "reference": reference.softmax_cross_entropy_reference,
    "xla": xla.softmax_cross_entropy_xla,
}


def softmax_cross_entropy(
    hidden: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    *,
    softcap: float | None = None,
    weights: jax.Array | None = None,
    vocab_size: int | None = None,
    block_size: int = 512,
    implementation: str | None = None,
) -> jax.Array:
    """Computes the negative log-likelihood of each token, in nats, for an output layer tied to the embedding.

    The logits of all tokens never exist at once.

        loss_t = weight_t (logsumexp(z_t) - z_t[target_t]),   z_t = softcap tanh(embedding hidden_t / softcap)

    Args:
      hidden: [B, T, D]. Matrix products take operands of this dtype and accumulate in float32.
      embedding: [V, D]. Its gradient is accumulated in float32.
      targets: int [B, T], in [0, vocab_size).
      softcap: the bound on the absolute value of the logits; None for no bound.
      weights: [B, T]. A weight of 0 gives a loss of exactly 0 and no gradient. Default 1.
      vocab_size: the rows of the embedding from this one on are padding and have probability 0. Default V.
      block_size: the number of tokens of a row whose logits exist at a time ("xla").
      implementation: "reference", "xla", or None for "xla".

    Returns:
      float32 [B, T] (float64 if `hidden` is float64).

    Raises:
      ValueError: a shape, a dtype or a number is wrong.
      NotImplementedError: there is no such implementation.
    """
    run = dispatch.choose(
        "softmax_cross_entropy", implementation, IMPLEMENTATIONS, default=xla.softmax_cross_entropy_xla
    )
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
    options = xla.CrossEntropyOptions(softcap, vocab_size, min(block_size, sequence_parallel.shard_length(sizes["T"])))
    return sequence_parallel.run_per_token_op(partial(run, options), (hidden, targets, weights), (embedding,))
