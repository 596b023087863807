"""Sliding-window attention as a mixer of its own, so that a pattern can alternate it with full attention."""

from mesanet_jax.mixers.attention import Attention
from mesanet_jax.schema import Field


class Sliding(Attention):
    """`Attention` whose tokens attend only to the last `window` tokens: the SWA baselines of MesaNet (section 4)."""

    SECTION = "sliding"
    FIELDS = Attention.FIELDS | {
        "window": Field(1024, "number of tokens that a token attends to, itself included", at_least=1, fixed=True)
    }
