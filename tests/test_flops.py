"""FLOPs against an independent count, and the chips' peaks."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from configs import mesanet, transformer
from mesanet_jax import flops, models


def model_of(config):
    return models.build(config.model)


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [("TPU v5 lite", 197), ("TPU v5", 459), ("TPU v6 lite", 918), ("TPU v4", 275), ("NVIDIA H100 80GB HBM3", 989),
     ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-80GB", 312)],
)  # fmt: skip
def test_peaks_by_device_kind(kind, tflops):
    assert flops.peak_flops(SimpleNamespace(device_kind=kind)) == tflops * 1e12


def test_unknown_chip_has_no_mfu():
    assert flops.mfu(1e6, flops_per_token=1e9, devices=jax.devices()) is None


def test_mfu_is_over_all_devices():
    devices = [SimpleNamespace(device_kind="TPU v5 lite")] * 4
    assert flops.mfu(197e3, flops_per_token=1e9, devices=devices) == pytest.approx(0.25)


def test_transformer_count_is_that_of_the_compiler():
    """XLA counts the whole square of attention and elementwise work too: equal but for a few per cent."""
    config = transformer.get_config("smoke")
    config.model.dim, config.model.heads, config.model.head_dim = 128, 2, 64
    config.model.layers = 1  # XLA counts the body of the loop over layers once
    model, seq_len = model_of(config), 64
    tokens = jax.ShapeDtypeStruct((1, seq_len), jnp.int32)

    def logits(params, tokens_BT):
        bound = model.bind(params)
        return bound.logits(bound.hidden(tokens_BT, jnp.zeros_like(tokens_BT)))

    counted = jax.jit(logits).lower(model.shapes, tokens).compile().cost_analysis()["flops"] / seq_len
    span = config.model.heads * config.model.head_dim
    causal_half = 4 * span * (seq_len - (seq_len + 1) / 2)
    assert model.flops_per_token(seq_len).forward + causal_half == pytest.approx(counted, rel=0.05)


def test_training_is_three_forwards_of_the_products_and_two_of_the_solves():
    config = mesanet.get_config("smoke")

    def count(iterations):
        config.model.mesa.max_iters = iterations
        return model_of(config).flops_per_token(64)

    few, more, most = count(10), count(20), count(30)
    solve = more.forward - few.forward  # ten iterations
    assert solve > 0 and most.forward - more.forward == pytest.approx(solve)
    assert more.training - few.training == pytest.approx(2 * solve)
    attention = model_of(transformer.get_config("smoke")).flops_per_token(64)
    assert attention.training == pytest.approx(3 * attention.forward)


def test_transformer_140m_is_six_times_its_parameters_and_attention():
    """The usual estimate: 6 FLOPs a parameter of the matrices, and causal attention."""
    config = transformer.get_config("140m")
    model, seq_len = model_of(config), 2048
    width = config.model.heads * config.model.head_dim
    estimate = 6 * model.parameter_count() + 3 * config.model.layers * 4 * width * (seq_len + 1) / 2
    assert model.flops_per_token(seq_len).training == pytest.approx(estimate, rel=0.01)
