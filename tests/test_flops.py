"""FLOPs against the compiler's count, and the peaks of chips."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import mesanet, transformer
from mesanet_jax import config as config_lib
from mesanet_jax import flops, models
from mesanet_jax.flops import Flops, products
from mesanet_jax.mixers import MIXERS
from mesanet_jax.training.step import BATCH


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


# Wide heads and little else, so that each product of a mixer is several per cent of the total, unlike elementwise work.
WIDE = {
    "dim": 768,
    "heads": 4,
    "head_dim": 256,
    "layers": 2,
    "mlp_ratio": 0.25,
    "vocab_size": 256,
    "remat": "none",
    "scan_layers": False,
}
ROWS = 8  # work that is done once for all rows is not counted per token
LENGTH = 192  # three chunks, since XLA removes the products with the zero state of the first
CASES = {mixer: (mixer,) for mixer in MIXERS} | {"hawk_mesa": ("hawk", "mesa")}
OPTIONS = {
    "mesa": {"max_iters": 3},  # they are unrolled
    "gss": {"expansion": 4.0, "chunk_size": 64},
    "hawk": {"expansion": 4.0, "num_blocks": 1},
    "attention": {"implementation": "reference"},  # the others compute the scores twice
    "sliding": {"implementation": "reference", "window": 32},
}


def wide_model(pattern):
    model = config_lib.default_config(pattern).model
    model.update(WIDE)
    for mixer in set(pattern) & OPTIONS.keys():
        model[mixer].update(OPTIONS[mixer])
    return models.build(model)


def masked_products(pattern) -> Flops:
    """The products that reference attention computes in vain, for pairs of tokens that are masked."""
    total = Flops()
    for mixer in set(pattern) & {"attention", "sliding"}:
        window = OPTIONS[mixer].get("window", LENGTH)
        visible = np.tri(LENGTH) - np.tri(LENGTH, k=-window)
        masked = LENGTH - visible.sum() / LENGTH
        total += products(4 * WIDE["heads"] * WIDE["head_dim"] * masked) * (WIDE["layers"] / len(pattern))
    return total


@pytest.fixture
def unrolled(monkeypatch):
    """Unrolls every loop over blocks, chunks and iterations, since XLA counts the body of a loop once."""
    for loop in ("scan", "fori_loop"):
        monkeypatch.setattr(jax.lax, loop, partial(getattr(jax.lax, loop), unroll=True))


# Their parts are tested in other cases, so these run only with the slow tests.
OF_OTHERS = ("hawk_mesa", "gated_deltanet", "mamba2")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in OF_OTHERS)) for case in CASES])
def test_flops_are_those_the_compiler_counts(case, unrolled):
    """Counts the loss of a whole model and its gradient.

    XLA also counts elementwise work, one or two per cent here. Recomputation is not counted: in the unrolled program,
    XLA merges what an op's backward pass computes again with its first computation.
    """
    model = wide_model(CASES[case])
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), dtype) for name, dtype in BATCH.items()}

    def counted(function):
        return jax.jit(function).lower(model.shapes, batch).compile().cost_analysis()["flops"] / (ROWS * LENGTH)

    loss = lambda params, batch: jnp.sum(model.loss(params, batch))
    ours = model.flops_per_token(LENGTH) + masked_products(CASES[case])
    assert ours.forward == pytest.approx(counted(loss), rel=0.03)
    assert ours.training == pytest.approx(counted(jax.value_and_grad(loss)), rel=0.03)


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
    """The usual estimate: 6 FLOPs for each parameter of a matrix, plus causal attention."""
    config = transformer.get_config("140m")
    model, seq_len = model_of(config), 2048
    width = config.model.heads * config.model.head_dim
    estimate = 6 * model.parameter_count() + 3 * config.model.layers * 4 * width * (seq_len + 1) / 2
    assert model.flops_per_token(seq_len).training == pytest.approx(estimate, rel=0.01)
