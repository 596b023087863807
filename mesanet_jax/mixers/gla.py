"""Gated linear attention: G_t = gamma_t G_{t-1} + beta_t v_t k_t^T, o_t = G_t q_t.

By default this is the form of MesaNet's Table 1, with one decay per head. The published GLA (arXiv 2312.06635,
`configs/gla.py:440m-published`) has a decay for each key channel instead of an input gate, and neither convolves its
queries, keys and values nor normalises its queries and keys.

B batch, T time, H heads, K key size, V value size.
"""

from mesanet_jax.flops import Flops, products
from mesanet_jax.mixers.backends import implementation_field
from mesanet_jax.mixers.gates import VECTOR_DECAY_FIELDS
from mesanet_jax.mixers.matrix_memory import LAYER_FIELDS, MatrixMemory
from mesanet_jax.schema import Field
from mesanet_kernels import gated_linear_attention, gated_linear_attention_step

# Options of the families whose memory only adds up writes (GLA, Mamba2): it works with queries and keys of any length.
ADDITIVE_FIELDS = {
    **LAYER_FIELDS,
    "normalize_keys": Field(True, "L2-normalise the queries and keys of each head", fixed=True),
    "implementation": implementation_field("gated_linear_attention"),
}


def additive_flops(heads: int, key_size: int, value_size: int, chunk: int) -> Flops:
    """Returns the FLOPs per token of gated linear attention in chunks of `chunk` tokens.

    Inside a chunk: scores and their product with the values. On the state: a write and a read.
    """
    inside, state = 2 * chunk * (key_size + value_size), 4 * key_size * value_size
    return products(heads * (inside + state))


class GLA(MatrixMemory):
    """Gated linear attention with a decay and an input gate."""

    SECTION = "gla"
    FIELDS = {
        **ADDITIVE_FIELDS,
        **VECTOR_DECAY_FIELDS,
        "input_gate": Field(
            True,
            "scale what is written by beta, a sigmoid of the stream; without the gate, beta is 1",
            fixed=True,
        ),
    }
    ROW_OP, TOKEN_OP = staticmethod(gated_linear_attention), staticmethod(gated_linear_attention_step)

    def _add_gates(self, model, options, *, rngs):
        self.normalize_keys = options.normalize_keys
        self.input_gate = self._make_input_gate(model, rngs=rngs) if options.input_gate else None
        self.decay_gate = self._make_decay(model, options, rngs=rngs)

    def _call_op(self, op, x, q, k, v):
        beta = None if self.input_gate is None else self.input_gate(x)
        return op(q, k, v, self.decay_gate(x), beta=beta)

    def _op_flops(self, chunk) -> Flops:
        return additive_flops(self.heads, self.key_size, self.value_size, chunk)
