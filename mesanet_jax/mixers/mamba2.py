"""Mamba2 as MesaNet's Table 1 has it: gated linear attention that writes every token in full, beta = 1.

The published Mamba2 (arXiv 2405.21060) differs around that: its decay and step size come from one gate, it has a skip
connection D and an output gate, and it does not normalise queries and keys.
"""

from mesanet_jax.mixers.gla import GLA


class Mamba2(GLA):
    """G_t = gamma_t G_{t-1} + v_t k_t^T, o_t = G_t q_t."""

    SECTION = "mamba2"
    INPUT_GATE = False
