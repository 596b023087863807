"""nanochat (karpathy/nanochat 92d63d4): the Transformer whose recipe Maglev and LRT are built on.

Value embeddings, smear and backout are options. `model.pattern` lists full and sliding attention layers and is taken
literally: nanochat's own pattern is three sliding layers and a full one, and nanochat makes the last layer full in any
case, whatever the pattern says.

B batch, T time, V vocabulary.
"""

import jax
from flax import nnx

from mesanet_jax.flops import Flops
from mesanet_jax.models import nanochat_fields
from mesanet_jax.models.interface import Batch, LayerStats
from mesanet_jax.models.nanochat_backbone import NanochatBackbone, State
from mesanet_jax.schema import Config


class Nanochat(NanochatBackbone):
    """The model kind `nanochat` (a `Decoder`)."""

    MIXERS = nanochat_fields.LAYERS
    FIELDS = nanochat_fields.FIELDS

    @staticmethod
    def check(model: Config) -> None:
        """Raises UserError for a combination of fields that no such model can have."""
        nanochat_fields.check(model)

    def __init__(self, model: Config, *, rngs: nnx.Rngs):
        super().__init__(model, patterns=(model.pattern,), memory=False, rngs=rngs)

    def loss(self, batch: Batch) -> jax.Array:
        """The negative log-likelihood of each target in nats, times its weight: [B,T] float32."""
        x0_BTD, context = self.rows(batch["inputs"], batch["segment_ids"])
        hidden_BTD, _ = self.run(self.decoder, x0_BTD, context)
        return self.cross_entropy(hidden_BTD, batch)

    def objective(self, batch: Batch, share: jax.Array | float) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, which has no further terms."""
        return self.loss(batch), {}

    def scores(self, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
        """The loss alone: there is one way to compute the model."""
        return self.loss(batch), {}, {}

    def layer_stats(self, batch: Batch) -> LayerStats:
        """Empty: attention layers have no statistics."""
        return {}

    def extend(self, tokens_BT: jax.Array, state: State) -> tuple[jax.Array, State]:
        """Reads T further tokens of one document: (logits [B,T,V] float32, state)."""
        hidden_BTD, state = self.advance(tokens_BT, state)
        return self.vocabulary.logits(hidden_BTD, self.head), state

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`."""
        return self.decoder_flops(seq_len)
