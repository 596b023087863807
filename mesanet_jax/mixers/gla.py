"""Gated linear attention: G_t = G_{t-1} gamma_t + beta_t v_t k_t^T, o_t = G_t q_t.

As it stands, the form of MesaNet's Table 1, one decay a head. The published GLA (arXiv 2312.06635) forgets each key
channel by a gate of its own, in place of an input gate, and convolves and normalises nothing (`configs/gla.py:440m-published`).

B batch, T time, H heads, K key size, V value size.
"""

from mesanet_jax.flops import products
from mesanet_jax.layers import l2_normalize
from mesanet_jax.mixers.gates import VECTOR_DECAY_FIELDS
from mesanet_jax.mixers.matrix_memory import PARALLEL_FIELDS, PROJECTION_FIELDS, Controlled
from mesanet_jax.schema import Field
from mesanet_kernels import gated_linear_attention, gated_linear_attention_step

# A memory that only adds bears queries and keys of any length.
NORMALIZE_FIELDS = {"normalize_keys": Field(True, "L2-normalise queries and keys of a head", fixed=True)}

KERNEL_FIELDS = {
    **PARALLEL_FIELDS,
    "implementation": Field(None, "backend of the kernel library; none: the best that applies", kind=str, choices=("reference", "xla", "pallas_gpu", "pallas_tpu")),
}  # fmt: skip


class GLA(Controlled):
    """The controlled layer with both gates."""

    SECTION = "gla"
    FIELDS = {
        **PROJECTION_FIELDS,
        **NORMALIZE_FIELDS,
        "input_gate": Field(True, "beta, the strength of a write, is a sigmoid of the stream; without it, 1", fixed=True),
        **VECTOR_DECAY_FIELDS,
        **KERNEL_FIELDS,
    }  # fmt: skip

    def _make_input_gate(self, model, *, rngs):
        return super()._make_input_gate(model, rngs=rngs) if model.gla.input_gate else None

    def _add_parameters(self, options, *, rngs):
        self.normalize_keys = options.normalize_keys

    def _normalize(self, x):
        return l2_normalize(x) if self.normalize_keys else x

    def _mix(self, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, *, memory, segment_ids):
        return gated_linear_attention(
            q_BTHK, k_BTHK, v_BTHV, log_decay_BTH,
            beta=beta_BTH, segment_ids=segment_ids, initial_state=memory, **self.parallel,
        )  # fmt: skip

    def _mix_token(self, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, *, memory):
        return gated_linear_attention_step(q_BHK, k_BHK, v_BHV, log_decay_BH, memory, beta=beta_BH)

    def _op_flops(self, chunk):
        """Scores and their product with the values inside a chunk, a write to the state, a read of it."""
        inside, state = 2 * chunk * (self.key_size + self.value_size), 4 * self.key_size * self.value_size
        return products(self.heads * (inside + state))
