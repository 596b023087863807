"""The delta rules: each token corrects what its key recalls (DeltaNet, arXiv 2406.06484; Gated DeltaNet, 2412.06464).

By default these are the forms of MesaNet's Table 1. The published Gated DeltaNet has the decay of Mamba2, convolved
values that are twice as wide as its keys, and an output gate (`configs/gated_deltanet.py:440m-published`).

B batch, T time, H heads, K key size, V value size.
"""

from mesanet_jax.flops import Flops, products
from mesanet_jax.mixers.backends import implementation_field
from mesanet_jax.mixers.gates import DECAY_FIELDS
from mesanet_jax.mixers.matrix_memory import LAYER_FIELDS, MatrixMemory
from mesanet_kernels import delta_rule, delta_rule_step

DELTA_FIELDS = {**LAYER_FIELDS, "implementation": implementation_field("delta_rule")}


class DeltaNet(MatrixMemory):
    """G_t = G_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = G_t q_t."""

    SECTION = "deltanet"
    FIELDS = DELTA_FIELDS
    ROW_OP, TOKEN_OP = staticmethod(delta_rule), staticmethod(delta_rule_step)

    def _add_gates(self, model, options, *, rngs):
        self.input_gate = self._make_input_gate(model, rngs=rngs)

    def _call_op(self, op, x, q, k, v):
        return op(q, k, v, self.input_gate(x))

    def _op_flops(self, chunk) -> Flops:
        """Counts the work inside a chunk and on the state.

        Inside a chunk of C tokens: the overlaps of keys, the scores, the inverse applied to keys and values, and the
        readout. The inverse itself is computed recursively from the inverses of its two diagonal halves: two products
        of (C/2)^3, then a quarter of that work at each level below. On the state: what the keys recall, a write and a
        read.
        """
        size, wide = self.key_size, self.value_size
        inside = 2 * chunk * (3 * size + 2 * wide) + 2 * (chunk**2 - 1) / 3
        return products(self.heads * (inside + 3 * 2 * size * wide))


class GatedDeltaNet(DeltaNet):
    """G_t = gamma_t G_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = G_t q_t."""

    SECTION = "gated_deltanet"
    FIELDS = DELTA_FIELDS | DECAY_FIELDS

    def _add_gates(self, model, options, *, rngs):
        self.input_gate = self._make_input_gate(model, rngs=rngs)
        self.decay_gate = self._make_decay(model, options, rngs=rngs)

    def _call_op(self, op, x, q, k, v):
        return op(q, k, v, self.input_gate(x), log_decay=self.decay_gate(x))
