"""Sequence parallelism: if rows are split over devices, every token's loss and the gradient are those of one device.

B rows, T time.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import hawk_mesa, mesanet
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models
from mesanet_jax.errors import UserError
from tests.helpers.smoke import ragged_batch, relative_distances
from tests.test_golden_configs import CONFIGS
from tests.training.test_step import assert_same_update, first_update

LENGTH = 88  # parts of 44 or 22 tokens, which are no multiples of a chunk; no other dimension has this size
ROWS = 4
MESHES = [(1, 1, 1, 2), (1, 1, 1, 4), (2, 2, 1, 2), (1, 1, 2, 4)]  # data, fsdp, tensor, sequence
RECURRENT = {"deltanet", "gated_deltanet", "gla", "gss", "hawk", "mamba2", "mesa", "mlstm"}


def segment_ids():
    """A document as long as the row; one that starts with a device's part and spans three; and rows of short ones."""
    segments_BT = np.cumsum(np.random.default_rng(0).random((ROWS, LENGTH)) < 0.06, axis=1)
    segments_BT[0] = 0
    segments_BT[1] = np.arange(LENGTH) >= LENGTH // 4
    return segments_BT.astype(np.int32)


def awake(params):
    """Replaces weights that start at zero by noise, since nothing behind them would have a gradient."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: leaf if leaf.any() else 0.1 * rng.normal(size=leaf.shape).astype(leaf.dtype), params
    )


class Family:
    """A config's model, a batch, and its loss and gradient on any mesh."""

    def __init__(self, config):
        config.data.seq_len, config.data.batch_size = LENGTH, ROWS
        config.model.norm_eps = 1e-2  # keeps the first outputs of a document well-conditioned
        config_lib.validate(config)
        self.pattern = config.model.pattern
        self.model = models.build(config.model)
        self.batch = ragged_batch(config) | {"segment_ids": segment_ids()}
        self.params = awake(jax.jit(self.model.init)(jax.random.key(0)))
        self.wanted = jax.device_get(jax.jit(self._run)(self.params, self.batch))

    def _run(self, params, batch):
        def mean(params):
            nats_BT, _ = self.model.objective(params, batch)
            return jnp.sum(nats_BT) / jnp.sum(batch["weights"]), nats_BT

        gradient, nats_BT = jax.grad(mean, has_aux=True)(params)
        return nats_BT, gradient

    def assert_same_on(self, sizes) -> str:
        """Compares with one device, up to the order of float32 sums; returns the text of the compiled program."""
        mesh = mesh_lib.make_mesh(sizes, jax.devices()[: np.prod(sizes)])
        split = mesh_lib.shardings(self.model.axes, self.model.shapes, mesh), mesh_lib.batch_sharding(mesh)
        with mesh_lib.use_mesh(mesh):
            arguments = jax.device_put(self.params, split[0]), mesh_lib.place_batch(self.batch, mesh)
            run = jax.jit(self._run, in_shardings=split, out_shardings=split[::-1]).lower(*arguments).compile()
            nats_BT, gradient = jax.device_get(run(*arguments))
        np.testing.assert_allclose(nats_BT, self.wanted[0], rtol=1e-5, atol=1e-6)
        distances = relative_distances(gradient, self.wanted[1])
        assert max(distances.values()) < 1e-5, distances
        return run.as_text()


def gathered_rows(program: str) -> list[str]:
    """The activations with the length of a whole row that devices are sent."""
    return re.findall(rf"= [^=]*f32\[[\d,]*\b{LENGTH}\b[^=]* all-(?:gather|to-all)[^(]*\(", program)


@functools.cache
def shipped(name):
    module, variant = CONFIGS[name]
    return Family(module.get_config(variant))


def test_a_recurrent_model_gathers_no_row():
    assert not gathered_rows(shipped("mesanet-smoke").assert_same_on((1, 2, 2, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", [name for name in CONFIGS if "-smoke" in name])
def test_every_family(name, sizes):
    family = shipped(name)
    program = family.assert_same_on(sizes)
    assert not gathered_rows(program) or not RECURRENT.issuperset(family.pattern)


@pytest.mark.slow
def test_what_the_backward_pass_recomputes():
    config = hawk_mesa.get_config("smoke")
    config.model.remat = "mixer"
    assert not gathered_rows(Family(config).assert_same_on((2, 2, 1, 2)))


@pytest.mark.slow
def test_an_accumulated_update():
    assert_same_update(first_update("mesanet"), first_update("mesanet", (2, 1, 1, 4), rows_per_device=1))


def test_batches_are_split_over_rows_and_time():
    mesh = mesh_lib.make_mesh((2, 1, 1, 4))
    inputs_BT = np.arange(6 * 8, dtype=np.int32).reshape(6, 8)
    placed = mesh_lib.place_batch({"inputs": inputs_BT}, mesh)["inputs"]
    assert mesh_lib.local_rows(mesh, 6) == list(range(6))
    np.testing.assert_array_equal(placed, inputs_BT)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(3, 2)}


def test_a_length_that_the_axis_does_not_divide():
    config = mesanet.get_config("smoke")
    config.mesh.sequence = 3
    with pytest.raises(UserError, match="config.data.seq_len=64: not a multiple of config.mesh.sequence=3"):
        config_lib.validate(config)
