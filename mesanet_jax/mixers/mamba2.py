"""Mamba2: gated linear attention without an input gate, G_t = gamma_t G_{t-1} + beta_t v_t k_t^T, o_t = G_t q_t.

As it stands, the form of MesaNet's Table 1: beta = 1. In the published Mamba2 (arXiv 2405.21060) the decay comes from a
step size, which scales what is written too; queries and keys (C and B) are shared by the heads and not normalised, a skip
adds the values (x) to the output, and a gate comes before a norm over all heads (`configs/mamba2.py:440m-published`).

H heads, V value size.
"""

import jax

from mesanet_jax.layers import param
from mesanet_jax.mixers.gates import DECAY_FIELDS, SoftplusDecay
from mesanet_jax.mixers.gla import GLA, KERNEL_FIELDS, NORMALIZE_FIELDS
from mesanet_jax.mixers.matrix_memory import PROJECTION_FIELDS
from mesanet_jax.schema import Field


class Mamba2(GLA):
    """Every token is written in full, or by its step size where the decay has one (`decay` softplus)."""

    SECTION = "mamba2"
    FIELDS = {
        **PROJECTION_FIELDS,
        **NORMALIZE_FIELDS,
        "skip": Field(False, "add D v to what is read, D a learned number a head", fixed=True),
        **DECAY_FIELDS,
        **KERNEL_FIELDS,
    }
    INPUT_GATE = False

    def _add_parameters(self, options, *, rngs):
        super()._add_parameters(options, rngs=rngs)
        self.D = param(rngs, jax.nn.initializers.ones, (self.heads,), ("heads",)) if options.skip else None

    def _gates(self, x):
        """log gamma, and the step size as beta where there is one."""
        log_decay, _ = super()._gates(x)
        return log_decay, self.decay_gate.step_size(x) if isinstance(self.decay_gate, SoftplusDecay) else None

    def _mix(self, q_BTHK, k_BTHK, v_BTHV, *gates, **options):
        o_BTHV, memory = super()._mix(q_BTHK, k_BTHK, v_BTHV, *gates, **options)
        return self._skipped(o_BTHV, v_BTHV), memory

    def _mix_token(self, q_BHK, k_BHK, v_BHV, *gates, **options):
        o_BHV, memory = super()._mix_token(q_BHK, k_BHK, v_BHV, *gates, **options)
        return self._skipped(o_BHV, v_BHV), memory

    def _skipped(self, o, v):
        return o if self.D is None else o + self.D[...].astype(v.dtype)[:, None] * v
