"""Smoke configs with the changes that a test makes, their programs, and batches for them.

B rows, T time.
"""

import pathlib
from types import SimpleNamespace

import jax
import numpy as np

from configs import mesanet, transformer
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models
from mesanet_jax.training import step as step_lib
from mesanet_jax.training.step import BATCH

ROOT = pathlib.Path(__file__).parents[2]  # the root of the repository, where the commands run
FAMILIES = {"mesanet": mesanet, "transformer": transformer}


def smoke_config(family: str, overrides: dict | None = None):
    """Returns the checked `smoke` config of a family with some values ({path: value}) changed."""
    config = FAMILIES[family].get_config("smoke")
    config.update_from_flattened_dict(overrides or {})
    config_lib.validate(config)
    return config


def build(config, sizes=(1, 1, 1)) -> SimpleNamespace:
    """Returns the program of a config on a mesh, with its config, mesh and model."""
    mesh = mesh_lib.make_mesh(sizes, jax.devices()[: np.prod(sizes)])
    model = models.build(config.model)
    with mesh_lib.use_mesh(mesh):
        program = step_lib.compile_program(config, model, mesh)
    return SimpleNamespace(config=config, mesh=mesh, model=model, program=program)


def fresh(run):
    """Returns the state that training starts with."""
    with mesh_lib.use_mesh(run.mesh):
        return run.program.init(jax.random.key(0))


def update(run, state, batch):
    """Returns (state, metrics) after an update."""
    with mesh_lib.use_mesh(run.mesh):
        return run.program.train(state, mesh_lib.place_batch(batch, run.mesh))


def ragged_batch(config, *, seed: int = 0) -> dict:
    """Returns random tokens in documents of random lengths; a share (r + 1) / B of the targets of row r is valid."""
    rng = np.random.default_rng(seed)
    rows, length = config.data.batch_size, config.data.seq_len
    share_B1 = (1 + np.arange(rows)[:, None]) / rows
    batch = {
        "inputs": rng.integers(0, config.model.vocab_size, (rows, length)),
        "targets": rng.integers(0, config.model.vocab_size, (rows, length)),
        "segment_ids": np.cumsum(rng.random((rows, length)) < 0.06, axis=1),
        "weights": rng.random((rows, length)) < share_B1,
    }
    return {name: x.astype(BATCH[name]) for name, x in batch.items()}


def relative_distances(one, other) -> dict[str, float]:
    """Returns {path: |one - other| / |other|} for the leaves of two trees, in L2 norms; |one| if the other is zero."""
    leaves = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True)
    return {
        jax.tree_util.keystr(path): float(np.linalg.norm(leaf - wanted) / (np.linalg.norm(wanted) or 1))
        for (path, leaf), wanted in leaves
    }


def assert_bitwise(one, other) -> None:
    """Compares two trees by paths, dtypes and bits; NaN equals NaN."""
    for (path, leaf), wanted in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(leaf, wanted, err_msg=jax.tree_util.keystr(path), strict=True)
