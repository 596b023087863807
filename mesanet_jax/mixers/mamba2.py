"""Mamba2: gated linear attention without an input gate, G_t = gamma_t G_{t-1} + beta_t v_t k_t^T, o_t = G_t q_t.

By default this is the form of MesaNet's Table 1, with beta = 1. The published Mamba2 (arXiv 2405.21060,
`configs/mamba2.py:440m-published`) differs: the decay comes from a step size, which is also beta; all heads share their
queries and keys (C and B), which are not normalised; a skip connection adds the values (x) to the output; and the
output is gated before a norm over all heads.

H heads, V value size.
"""

import jax

from mesanet_jax.flops import Flops
from mesanet_jax.layers import param
from mesanet_jax.mixers.gates import DECAY_FIELDS, SoftplusDecay
from mesanet_jax.mixers.gla import ADDITIVE_FIELDS, additive_flops
from mesanet_jax.mixers.matrix_memory import MatrixMemory
from mesanet_jax.schema import Field
from mesanet_kernels import gated_linear_attention, gated_linear_attention_step


class Mamba2(MatrixMemory):
    """Writes every token in full, or scaled by its step size where the decay has one (`decay` softplus)."""

    SECTION = "mamba2"
    FIELDS = {
        **ADDITIVE_FIELDS,
        **DECAY_FIELDS,
        "skip": Field(False, "add D v to what is read, where D is a learned scalar per head", fixed=True),
    }
    ROW_OP, TOKEN_OP = staticmethod(gated_linear_attention), staticmethod(gated_linear_attention_step)

    def _add_gates(self, model, options, *, rngs):
        self.normalize_keys = options.normalize_keys
        self.decay_gate = self._make_decay(model, options, rngs=rngs)
        self.D = param(rngs, jax.nn.initializers.ones, (self.heads,), ("heads",)) if options.skip else None

    def _call_op(self, op, x, q, k, v):
        step_size = self.decay_gate.step_size(x) if isinstance(self.decay_gate, SoftplusDecay) else None
        o, memory = op(q, k, v, self.decay_gate(x), beta=step_size)
        return o if self.D is None else o + self.D[...].astype(v.dtype)[:, None] * v, memory

    def _op_flops(self, chunk) -> Flops:
        return additive_flops(self.heads, self.key_size, self.value_size, chunk)
