"""The sequence mixers by name: what `model.pattern` may list.

`interface.py` describes the calls of a mixer. To add one, write its file here, add two lines below and write a config
(docs/adding-a-family.md).
"""

from mesanet_jax.mixers.attention import Attention
from mesanet_jax.mixers.delta import DeltaNet, GatedDeltaNet
from mesanet_jax.mixers.gla import GLA
from mesanet_jax.mixers.gss import GSS
from mesanet_jax.mixers.hawk import Hawk
from mesanet_jax.mixers.interface import Mixer
from mesanet_jax.mixers.mamba2 import Mamba2
from mesanet_jax.mixers.mesa import Mesa
from mesanet_jax.mixers.mlstm import MLSTM
from mesanet_jax.mixers.sliding import Sliding

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "gla": GLA,
    "gss": GSS,
    "hawk": Hawk,
    "mamba2": Mamba2,
    "mesa": Mesa,
    "mlstm": MLSTM,
    "sliding": Sliding,
}
