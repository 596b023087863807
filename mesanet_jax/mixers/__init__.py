"""The sequence mixers by name: what `model.pattern` may list.

A mixer is an `nnx.Module` made by `Mixer(model, rngs=rngs)` from the model's config. It declares its own options in
`FIELDS`, a section of that config under the mixer's name, and `check(model)` refuses options that do not fit together.
Its calls all compute the same function:

    __call__(x_BTD, segment_ids_BT) -> y_BTD                 whole rows whose documents are kept apart (training)
    init_state(batch, max_length=, dtype=) -> state          the decoding state before the first token
    extend(x_BTD, state) -> (y_BTD, state)                   several tokens of one document (prefill)
    decode_step(x_BD, state) -> (y_BD, state)                one token (decoding)

`flops_per_token(seq_len)` returns its `Flops`. A mixer with statistics to report also has
`with_stats(x_BTD, segment_ids_BT) -> (y_BTD, {name: array})`.

To add a mixer, write its file here, add a line to `MIXERS` and write a config (docs/adding-a-family.md).
"""

from flax import nnx

from mesanet_jax.mixers.attention import Attention
from mesanet_jax.mixers.delta import DeltaNet, GatedDeltaNet
from mesanet_jax.mixers.gla import GLA
from mesanet_jax.mixers.gss import GSS
from mesanet_jax.mixers.hawk import Hawk
from mesanet_jax.mixers.mamba2 import Mamba2
from mesanet_jax.mixers.mesa import Mesa
from mesanet_jax.mixers.mlstm import MLSTM
from mesanet_jax.mixers.sliding import Sliding

MIXERS: dict[str, type[nnx.Module]] = {
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
