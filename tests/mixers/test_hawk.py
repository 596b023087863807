"""What only Hawk has: its initial decays, the scale of a document's first token, the bounded gradient of the root."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from mesanet_jax import config as config_lib
from mesanet_jax.mixers import hawk


def mixer(**options):
    model = config_lib.default_config(("hawk",)).model
    model.dim, model.layers, model.heads = 1600, 2, 4
    model.hawk.update(options)
    return hawk.Hawk(model, rngs=nnx.Rngs(params=0))


@pytest.mark.parametrize(("kind", "power"), [("griffin", 8), ("recurrentgemma", 2)])
def test_initial_decays(kind, power):
    """A power of the decay is uniform: a^8, the decay of an open gate, in the paper; a^2 in its published code."""
    low, high = {"griffin": (0.9, 0.999), "recurrentgemma": (0.9**2, 0.999**2)}[kind]
    a_R = jax.nn.sigmoid(mixer(decay_init=kind).lambda_raw[...])
    assert stats.kstest(np.asarray(a_R) ** power, "uniform", (low, high - low)).pvalue > 0.01


def test_a_document_begins_unscaled():
    """With gates whose weights and biases are zero, i = r = 1/2: h_1 = x_1 / 2, and later inputs have sqrt(1 - a^2)."""
    layer = mixer()
    for gate in (layer.recurrence_gate, layer.input_gate):
        gate.kernel.set_value(jnp.zeros_like(gate.kernel[...]))
    x_TR = jnp.ones((2, 2000))
    gated_TR, decay_TR = layer._recurrence(x_TR, jnp.array([[True], [False]]))
    a_R = jax.nn.sigmoid(layer.lambda_raw[...])
    np.testing.assert_allclose(decay_TR, jnp.broadcast_to(a_R**4, (2, 2000)), rtol=1e-4)
    np.testing.assert_allclose(gated_TR[0], 0.5)
    np.testing.assert_allclose(gated_TR[1], 0.5 * jnp.sqrt(1 - a_R**8), rtol=1e-3)


def test_root_has_a_bounded_gradient():
    value, gradient = jax.vmap(jax.value_and_grad(hawk._bounded_sqrt))(jnp.array([0.0, 1e-12, 0.04]))
    np.testing.assert_allclose(value, [0.0, 1e-6, 0.2], rtol=1e-6)
    np.testing.assert_allclose(gradient, [1000.0, 1000.0, 2.5], rtol=1e-6)
