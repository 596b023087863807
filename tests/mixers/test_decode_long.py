"""Long decoding: after 32,768 single steps, the outputs still equal those of the parallel form up to rounding.

B batch, T time, D model width.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mesanet_jax import config as config_lib
from mesanet_jax.mixers import MIXERS

LENGTH, D = 32_768, 16
LAST = 256  # number of tokens that are compared
# Decays are set so that memories last for thousands of tokens; few iterations and a small window save time.
OPTIONS = {
    "gla": {"decay_bias_init": 5.0, "decay_bias_init_last": 9.0},
    "mamba2": {"decay_bias_init": 5.0, "decay_bias_init_last": 9.0},
    "gss": {"init": "s4d"},
    "gated_deltanet": {"decay_bias_init": 5.0, "decay_bias_init_last": 9.0},
    "mlstm": {"decay_bias_init": 5.0, "decay_bias_init_last": 9.0},
    "mesa": {"decay_bias_init": 5.0, "decay_bias_init_last": 9.0, "decay_cap": 1.0, "max_iters": 4},
    "sliding": {"window": 64},
}


@pytest.mark.parametrize("name", sorted(MIXERS.keys() - {"attention"}))  # its state grows
def test_decoding_32768_tokens_does_not_drift(name):
    model = config_lib.default_config((name,)).model
    model.dim, model.layers, model.heads, model.head_dim, model.norm_eps = D, 2, 2, 8, 1e-3
    model[name].update(OPTIONS.get(name, {}))
    mixer = MIXERS[name](model, rngs=nnx.Rngs(params=0))
    x_BTD = jax.random.normal(jax.random.key(1), (1, LENGTH, D))

    @jax.jit
    def decode(x_BTD):
        def advance(state, x_BD):
            y_BD, state = mixer.decode_step(x_BD, state)
            return state, y_BD

        empty = mixer.init_state(1, max_length=LENGTH, dtype=jnp.float32)
        _, y_TBD = jax.lax.scan(advance, empty, jnp.moveaxis(x_BTD, 1, 0))
        return jnp.moveaxis(y_TBD[-LAST:], 0, 1)

    @jax.jit
    def parallel(x_BTD):
        return mixer(x_BTD, jnp.zeros(x_BTD.shape[:2], jnp.int32))[:, -LAST:]

    wanted_BTD = parallel(x_BTD)
    assert jnp.linalg.norm(decode(x_BTD) - wanted_BTD) < 1e-5 * jnp.linalg.norm(wanted_BTD)
