"""The delta rules: each token corrects what its key recalls (DeltaNet, arXiv 2406.06484; Gated DeltaNet, 2412.06464).

As it stands, the form of MesaNet's Table 1. The published Gated DeltaNet differs around it: its decay is that of Mamba2,
values are convolved too and twice as wide as keys, and the output is gated (`configs/gated_deltanet.py:440m-published`).

B batch, T time, H heads, K key size, V value size.
"""

from mesanet_jax.flops import products
from mesanet_jax.mixers.gates import DECAY_FIELDS
from mesanet_jax.mixers.matrix_memory import PARALLEL_FIELDS, PROJECTION_FIELDS, Controlled
from mesanet_kernels import delta_rule, delta_rule_step


class DeltaNet(Controlled):
    """G_t = G_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = G_t q_t."""

    SECTION = "deltanet"
    FIELDS = {**PROJECTION_FIELDS, **PARALLEL_FIELDS}
    DECAY_GATE = False

    def _mix(self, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, *, memory, segment_ids):
        return delta_rule(
            q_BTHK, k_BTHK, v_BTHV, beta_BTH,
            log_decay=log_decay_BTH, segment_ids=segment_ids, initial_state=memory, **self.parallel,
        )  # fmt: skip

    def _mix_token(self, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, *, memory):
        return delta_rule_step(q_BHK, k_BHK, v_BHV, beta_BH, memory, log_decay=log_decay_BH)

    def _op_flops(self, chunk):
        """Of the chunk: overlaps of keys, scores, the inverse applied to keys and values, the readout; of the state: what
        keys recall, a write and a read; and the inverse, found by halves: two products of (C/2)^3, then a quarter of the
        work at each level below."""
        size, wide = self.key_size, self.value_size
        inside = 2 * chunk * (3 * size + 2 * wide) + 2 * (chunk**2 - 1) / 3
        return products(self.heads * (inside + 3 * 2 * size * wide))


class GatedDeltaNet(DeltaNet):
    """G_t = gamma_t G_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = G_t q_t."""

    SECTION = "gated_deltanet"
    FIELDS = {**PROJECTION_FIELDS, **DECAY_FIELDS, **PARALLEL_FIELDS}
    DECAY_GATE = True
