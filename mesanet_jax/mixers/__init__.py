"""The sequence mixers by name: what `model.pattern` may list.

A mixer is an `nnx.Module` with the options it declares in `FIELDS` and four calls that compute the same function:

    __call__(x_BTD, segment_ids_BT) -> y_BTD                 whole rows, documents kept apart (training)
    init_state(batch, max_length=, dtype=) -> state          the memory of an empty past
    extend(x_BTD, state) -> (y_BTD, state)                   a chunk of one document (prefill)
    step(x_BD, state) -> (y_BD, state)                       one token (decoding)

and `flops_per_token(seq_len)`, its `Flops`, and `check(model)`, which refuses impossible options. One that has something
to tell about its work has `observe(x_BTD, segment_ids_BT) -> (y_BTD, {name: array})` too. Adding one is a file here, a line below and a config.
"""

from mesanet_jax.mixers.attention import Attention
from mesanet_jax.mixers.delta import DeltaNet, GatedDeltaNet
from mesanet_jax.mixers.gla import GLA
from mesanet_jax.mixers.gss import GSS
from mesanet_jax.mixers.hawk import Hawk
from mesanet_jax.mixers.mamba2 import Mamba2
from mesanet_jax.mixers.mesa import Mesa
from mesanet_jax.mixers.mlstm import MLSTM
from mesanet_jax.mixers.sliding import Sliding

MIXERS = {
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
