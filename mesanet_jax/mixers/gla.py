"""Gated linear attention with one decay a head: G_t = gamma_t G_{t-1} + beta_t v_t k_t^T, o_t = G_t q_t.

The form of MesaNet's Table 1; the published GLA (arXiv 2312.06635) decays each key channel by its own gate.

B batch, T time, H heads, K head size.
"""

from mesanet_jax.flops import products
from mesanet_jax.mixers.controlled import DECAY_FIELDS, PARALLEL_FIELDS, PROJECTION_FIELDS, Controlled
from mesanet_kernels import gated_linear_attention, gated_linear_attention_step


class GLA(Controlled):
    """The controlled layer with both gates."""

    SECTION = "gla"
    FIELDS = {**PROJECTION_FIELDS, **DECAY_FIELDS, **PARALLEL_FIELDS}

    def _mix(self, q_BTHK, k_BTHK, v_BTHK, log_decay_BTH, beta_BTH, *, memory, segment_ids):
        return gated_linear_attention(
            q_BTHK, k_BTHK, v_BTHK, log_decay_BTH,
            beta=beta_BTH, segment_ids=segment_ids, initial_state=memory, **self.parallel,
        )  # fmt: skip

    def _mix_token(self, q_BHK, k_BHK, v_BHK, log_decay_BH, beta_BH, *, memory):
        return gated_linear_attention_step(q_BHK, k_BHK, v_BHK, log_decay_BH, memory, beta=beta_BH)

    def _op_flops(self, chunk):
        """Scores and their product with the values inside a chunk, a write to the state, a read of it."""
        size, width = self.head_dim, self.heads * self.head_dim
        return products(4 * chunk * width + 4 * size * width)
