"""The language model: scaled embedding, scanned blocks, final norm, soft-capped head, loss, and decoding.

B batch, T time, D model width, V vocabulary (padded to a multiple for sharding).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import Initializer, RMSNorm, param
from mesanet_jax.mesh import constrain
from mesanet_jax.mixers import MIXERS
from mesanet_jax.models.block import ACTIVATION, LOOKED_UP, Block, Group
from mesanet_jax.models.stack import Stack
from mesanet_jax.schema import Field
from mesanet_kernels import softmax_cross_entropy


class LanguageModel(Stack):
    """The backbone of the MesaNet paper (appendix E, G) around any mixers."""

    MIXERS = MIXERS  # what `model.pattern` may name
    FIELDS = {
        "vocab_size": Field(50_257, "tokens of the tokenizer; must be that of the data", at_least=2, fixed=True),
        "vocab_multiple": Field(128, "the vocabulary is padded to a multiple of this; padding has no loss and no probability", at_least=1, fixed=True),
        "dim": Field(768, "width of the residual stream", at_least=1, fixed=True),
        "layers": Field(14, "blocks, at least as many as the pattern has; it may end in the middle of the pattern", at_least=1, fixed=True),
        "heads": Field(6, "heads of the mixer", at_least=1, fixed=True),
        "head_dim": Field(128, "size of a head's keys, queries and values", at_least=1, fixed=True),
        "mlp_ratio": Field(3.0, "feed-forward width over dim, for each of SwiGLU's two branches", above=0.0, fixed=True),
        "norm_eps": Field(1e-6, "epsilon of every RMSNorm", above=0.0, fixed=True),
        "logit_softcap": Field(30.0, "c in c tanh(logits / c); none: no cap", kind=float, above=0.0, fixed=True),
        "tie_embeddings": Field(True, "the head is the embedding, transposed", fixed=True),
        "residual_init_scale": Field(2.0, "variance of weights into the residual stream, times layers times fan-in", above=0.0, fixed=True),
        "reset_at_documents": Field(True, "no state, tap or attention crosses a document; the paper lets them cross", fixed=True),
        "compute_dtype": Field("bfloat16", "dtype of activations; parameters are float32", choices=("bfloat16", "float32")),
        "remat": Field("mixer", "what the backward pass recomputes", choices=("none", "matmuls", "mixer", "full")),
        "scan_layers": Field(True, "layers in a loop; without one a step is faster, and its compilation longer with each layer"),
    }  # fmt: skip

    @staticmethod
    def check(model) -> None:
        """Raises UserError for a combination of fields that no model can have."""
        if model.layers < len(model.pattern):
            raise UserError(
                f"config.model.layers={model.layers}: fewer than the {len(model.pattern)} blocks of config.model.pattern"
            )

    @staticmethod
    def block_makers(model) -> tuple[Callable[..., nnx.Module], ...]:
        """One period of blocks: each a function of `rngs=` alone."""
        return tuple(partial(Block, model, mixer) for mixer in model.pattern)

    def __init__(self, model, *, rngs: nnx.Rngs):
        # Fan-in init (std 1/sqrt(D)) and a sqrt(D) on the way in give the stream unit variance (appendix G).
        self._make_tables(model, _table_init, _table_init, rngs=rngs)
        super().__init__(self.block_makers(model), model.layers, rngs=rngs)
        self.final_norm = RMSNorm(model.dim, rngs=rngs, eps=model.norm_eps)

    def _make_tables(self, model, embedding_init: Initializer, head_init: Initializer, *, rngs: nnx.Rngs) -> None:
        """The embedding, the head, and what the calls below read of the config."""
        self.vocab_size = model.vocab_size
        padded = -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple
        self.softcap, self.remat, self.looped = model.logit_softcap, model.remat, model.scan_layers
        self.resets, self.dtype = model.reset_at_documents, jnp.dtype(model.compute_dtype)
        table = lambda init: param(rngs, init, (padded, model.dim), ("vocab", "embed"))
        self.embedding = table(embedding_init)
        self.head = None if model.tie_embeddings else table(head_init)

    def _embed(self, tokens):
        scale = self.embedding[...].shape[-1] ** 0.5
        return self.embedding[...].astype(self.dtype)[tokens] * jnp.asarray(scale, self.dtype)

    def _head(self):
        return (self.embedding if self.head is None else self.head)[...]

    def hidden(self, tokens_BT, segment_ids_BT):
        """The normed stream before the head, [B,T,D]."""
        x_BTD, _ = self._blocks(lambda group, *args: (group(*args), None), tokens_BT, segment_ids_BT)
        return self.final_norm(x_BTD)

    def _blocks(self, call, tokens_BT, segment_ids_BT):
        """The stream after all blocks, and the pair of what else `call(group, x, segment_ids)` gives."""
        if not self.resets:
            segment_ids_BT = jnp.zeros_like(segment_ids_BT)
        x_BTD = constrain(constrain(self._embed(tokens_BT), LOOKED_UP), ACTIVATION)
        run = lambda group, x_BTD, _: call(group, x_BTD, segment_ids_BT)
        return self.scan(run, x_BTD, policy=self.remat, looped=self.looped)

    def observe(self, batch):
        """What the mixers tell about their work on a batch: name -> {layer: array}."""
        _, (of_groups, of_tail) = self._blocks(Group.observe, batch["inputs"], batch["segment_ids"])
        told: dict[str, dict[int, jax.Array]] = {}
        for block, seen in enumerate(of_groups):
            for name, x_G in seen.items():
                told.setdefault(name, {}).update({len(of_groups) * group + block: x for group, x in enumerate(x_G)})
        count = len(of_groups) * jax.tree.leaves(nnx.state(self.groups))[0].shape[0]
        for block, seen in enumerate(of_tail or ()):
            for name, x in seen.items():
                told.setdefault(name, {})[count + block] = x
        return told

    def loss(self, batch):
        """Negative log-likelihood in nats of each target, [B,T] float32, zero where its weight is zero."""
        return self._nats(self.hidden(batch["inputs"], batch["segment_ids"]), batch)

    def _nats(self, hidden_BTD, batch):
        return softmax_cross_entropy(
            hidden_BTD, self._head(), batch["targets"],
            softcap=self.softcap, weights=batch["weights"], vocab_size=self.vocab_size,
        )  # fmt: skip

    def objective(self, batch, share):
        """What training minimises, and its terms by name, as `mesanet_jax.models.Model`; here the loss alone."""
        return self.loss(batch), {}

    def scores(self, batch):
        """The loss, that of other modes of the model by name, and scalars about the computation."""
        return self.loss(batch), {}, {}

    def logits(self, hidden):
        """Soft-capped float32 logits over the true vocabulary."""
        head_VD = self._head()[: self.vocab_size].astype(hidden.dtype)
        logits = jnp.einsum("...d,vd->...v", hidden, head_VD, preferred_element_type=jnp.float32)
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def init_state(self, batch: int, *, max_length: int):
        """The decoding state of an empty past, a pair as `Stack` has it."""
        return self.init_states(lambda group: group.init_state(batch, max_length=max_length, dtype=self.dtype))

    def extend(self, tokens_BT, state):
        """Reads T tokens of one document: (logits [B,T,V] float32, state)."""
        return self._decode("extend", tokens_BT, state)

    def step(self, tokens_B, state):
        """Reads one token: (logits [B,V] float32, state)."""
        return self._decode("step", tokens_B, state)

    def _decode(self, call: str, tokens, state):
        x, state = self.scan(lambda group, x, state: getattr(group, call)(x, state), self._embed(tokens), state)
        return self.logits(self.final_norm(x)), state

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`: head included, embedding look-up not counted."""
        return self.blocks_flops(seq_len) + products(2 * self.vocab_size * self.embedding.shape[-1])

    def padding_parameters(self) -> int:
        """Parameters in rows that only pad the vocabulary."""
        padded, dim = self.embedding.shape
        return (padded - self.vocab_size) * dim * (1 if self.head is None else 2)


def _table_init(key, shape, dtype):
    return jax.random.normal(key, shape, dtype) / jnp.sqrt(shape[-1]).astype(dtype)
