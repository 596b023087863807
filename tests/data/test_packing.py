"""Packing loses no token and no boundary."""

import numpy as np
import pytest

from mesanet_jax.data import packing
from mesanet_jax.data.packing import Packer, row_dtype


def random_documents(seed: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, rng.choice([1, 3, 16, 17, 90])).astype(np.int32) for _ in range(count)]


def pack(documents, *, seq_len=16, every=None):
    """Returns all rows; with `every`, takes the full rows after every so many documents."""
    packer = Packer(row_dtype(seq_len=seq_len, vocab_size=1000), pad_id=7)
    rows = []
    for index, document in enumerate(documents):
        packer.add(document)
        if every and index % every == 0:
            rows.append(packer.take())
    return np.concatenate([*rows, packer.flush()])


@pytest.mark.parametrize("seed", range(10))
def test_rows_rejoin_to_the_documents(seed):
    documents = random_documents(seed, 30)
    rows = pack(documents)
    rejoined = packing.documents(rows)
    assert len(rejoined) == len(documents)
    assert all((one == other).all() for one, other in zip(rejoined, documents))
    assert rows["length"].sum() == sum(map(len, documents))
    assert (rows["length"][:-1] == 17).all() and 0 < rows["length"][-1] <= 17
    assert (rows["tokens"][-1, rows["length"][-1] :] == 7).all()


@pytest.mark.parametrize("every", [1, 2, 7])
def test_when_rows_are_taken_does_not_matter(every):
    documents = random_documents(0, 1000)
    assert pack(documents, every=every).tobytes() == pack(documents).tobytes()


def test_continued_document_has_one_start():
    packer = Packer(row_dtype(seq_len=3, vocab_size=300), pad_id=0)
    packer.add(np.array([1, 2, 3]))
    packer.add(np.array([4, 5, 6]), starts=False)
    packer.add(np.array([7]))
    rows = packer.flush()
    assert packing.document_starts(rows).tolist() == [[True, False, False, False], [False, False, True, False]]
    assert [document.tolist() for document in packing.documents(rows)] == [[1, 2, 3, 4, 5, 6], [7]]


def test_segments_are_numbered_from_zero_in_each_row():
    starts_RL = np.array([[True, False, True, False], [False, False, True, True], [False] * 4])
    segments_RL = packing.segment_ids(starts_RL)
    assert segments_RL.dtype == np.int32
    assert segments_RL.tolist() == [[0, 0, 1, 1], [0, 0, 1, 2], [0, 0, 0, 0]]


def test_nothing_gives_no_rows():
    packer = Packer(row_dtype(seq_len=3, vocab_size=300), pad_id=0)
    assert len(packer.take()) == len(packer.flush()) == 0


def test_token_width_follows_the_vocabulary():
    assert row_dtype(seq_len=8, vocab_size=1 << 16)["tokens"].base == np.uint16
    assert row_dtype(seq_len=8, vocab_size=(1 << 16) + 1)["tokens"].base == np.uint32


def test_rows_as_a_stream():
    """Padding disappears; a document that continues in the next row does not start there."""
    packer = Packer(row_dtype(seq_len=3, vocab_size=300), pad_id=0)
    for document in ([1, 2, 3, 4, 5], [6]):
        packer.add(np.array(document))
    rows = packer.flush()
    assert packing.valid(rows).tolist() == [[True] * 4, [True, True, False, False]]
    tokens_N, starts_N = packing.stream(rows)
    assert tokens_N.tolist() == [1, 2, 3, 4, 5, 6] and np.flatnonzero(starts_N).tolist() == [0, 5]
    assert packing.segment_ids(packing.document_starts(rows)).tolist() == [[0, 0, 0, 0], [0, 1, 1, 1]]
