"""Gated linear attention as Mosaic TPU kernels: in both interpreters, and compiled by the TPU compiler."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.linear_recurrence.tpu import weights
from mesanet_kernels.ops.gated_linear_attention import pallas_tpu
from mesanet_kernels.shapes import WIDE, example
from tests.helpers.op_cases import against_float64, assert_close, documents, evaluate, gated_linear_attention
from tests.kernels.test_op_tpu import compiler_topology

OP = "gated_linear_attention"
INPUTS = "q", "k", "v", "log_decay", "beta"
LIMIT = 5e-3  # with bfloat16 inputs (docs/kernels.md, "Public functions")
STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
run = partial(gated_linear_attention, implementation="pallas_tpu")


@pytest.fixture(params=[True, STRICT], ids=["lenient", "strict"])
def interpreted(request, monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=request.param))


@pytest.mark.parametrize(
    "sizes", [dict(B=2, T=300, H=2, K=64, V=128), dict(B=1, T=140, H=3, K=128, V=64)], ids=["pair", "odd"]
)
def test_outputs_and_gradients(sizes, interpreted):
    """Two heads per grid step or one; the last chunk is incomplete; documents start inside a chunk and with one."""
    found, wanted = against_float64(gated_linear_attention, "pallas_tpu", sizes, 20, 128)
    assert_close(found, wanted, limit=LIMIT)


def test_weights(interpreted):
    """Weights and gradients agree with plain XLA; small decays keep their precision between the largest ones."""
    sizes = dict(B=2, T=300, H=2, K=1, V=1)
    gates = {name: x for name, x in example(OP, sizes).items() if name in ("log_decay", "beta")}
    gates["log_decay"][0, ::5], gates["log_decay"][0, 1::5], gates["log_decay"][1, ::3] = -np.inf, -1e4, 0.0
    segment_ids = documents(sizes, 20, 128)
    of = lambda weigh: evaluate(lambda gates: weigh(gates["log_decay"], gates["beta"], segment_ids), gates)
    found, wanted = of(weights.chunk_weights_tpu), of(partial(chunks.chunk_weights, chunk=pallas_tpu.CHUNK))
    assert_close(found, wanted, limit=1e-6)


def test_says_what_it_does_not_support():
    with pytest.raises(NotImplementedError, match="'pallas_tpu' needs q, k and v in bfloat16"):
        run(example(OP, dict(B=1, T=8, H=1, K=64, V=64)))
    with pytest.raises(NotImplementedError, match="'pallas_tpu' needs one decay per head"):
        run(example(OP + "_vector", dict(B=1, T=8, H=1, K=64, V=64)))
    narrow = example(OP, dict(B=1, T=8, H=1, K=64, V=32))
    with pytest.raises(NotImplementedError, match="'pallas_tpu' needs key and value sizes in"):
        run({name: x if name in WIDE else jnp.asarray(x, jnp.bfloat16) for name, x in narrow.items()})


def lowered(sizes, device, implementation):
    """Returns the gradient of the op, lowered for TPUs."""
    sharding = device and jax.sharding.SingleDeviceSharding(device)
    dtype_of = lambda name: jnp.float32 if name in WIDE else jnp.bfloat16
    arguments = [
        jax.ShapeDtypeStruct(x.shape, dtype_of(name), sharding=sharding) for name, x in example(OP, sizes).items()
    ]

    def loss(*arrays):
        o, final = gated_linear_attention(dict(zip(INPUTS, arrays)), implementation=implementation)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(final)

    return jax.jit(jax.grad(loss, argnums=range(5))).trace(*arguments).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("length, kernels", [(128, 4), (127, 0)])
def test_is_chosen_on_tpus(length, kernels):
    """Weights, states, gradients and gradients of the weights; a row shorter than a chunk goes to plain XLA."""
    text = lowered(dict(B=1, T=length, H=2, K=64, V=64), None, None).as_text()
    assert text.count("@tpu_custom_call") == kernels


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    "heads, key_size, value_size",
    [(8, 128, 128), (4, 128, 256), (32, 128, 64), (5, 64, 64)],
    ids=["440m", "gla-published", "mamba2-published", "odd"],
)
def test_compiles(topology, heads, key_size, value_size):
    (device, *_) = compiler_topology(topology)
    lowered(dict(B=2, T=2048, H=heads, K=key_size, V=value_size), device, "pallas_tpu").compile()
