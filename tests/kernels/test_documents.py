"""Where documents start in packed rows, and where recurrent states are reset."""

import jax.numpy as jnp
import numpy as np

from mesanet_kernels.documents import document_starts, state_resets


def test_starts_and_resets():
    """They differ at the first token of a row alone, whose document may have begun before the row."""
    segment_ids_BT = jnp.array([[3, 3, 4, 4, 6], [0, 0, 0, 0, 0], [-1, 0, 1, 2, 3]])
    starts_BT = [[1, 0, 1, 0, 1], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    resets_BT = [[0, 0, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]
    np.testing.assert_array_equal(document_starts(segment_ids_BT), np.array(starts_BT, bool))
    np.testing.assert_array_equal(state_resets(segment_ids_BT), np.array(resets_BT, bool))


def test_a_row_of_one_token():
    assert document_starts(jnp.zeros((1, 1), jnp.int32)).all()
    assert not state_resets(jnp.zeros((1, 1), jnp.int32)).any()
