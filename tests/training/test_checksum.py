"""Checksums detect single changes and swaps, and do not depend on the sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_jax import mesh as mesh_lib
from mesanet_jax.training.checksum import checksums


@pytest.mark.parametrize("dtype", ["uint8", "int32", "bfloat16", "float32"])
def test_single_changes_and_swaps_are_detected(dtype):
    x = np.random.default_rng(0).integers(0, 250, 16).astype(jnp.dtype(dtype)).reshape(4, 4)
    whole = int(checksums(x))
    for index in np.ndindex(x.shape):
        changed = x.copy()
        changed[index] += np.asarray(1, x.dtype)
        assert int(checksums(changed)) != whole
    for other in range(1, 4):
        if (x[0] != x[other]).any():
            swapped = x.copy()
            swapped[[0, other]] = swapped[[other, 0]]
            assert int(checksums(swapped)) != whole


def test_a_sharded_array_has_the_same_checksum():
    mesh = mesh_lib.make_mesh((2, 2, 2))
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    split = jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp", "tensor")))
    assert int(checksums(split)) == int(checksums(x))
