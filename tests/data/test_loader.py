"""A batch depends only on the step; rows are read once per epoch, and the number of processes does not matter."""

import subprocess
import sys

import numpy as np
import pytest

from mesanet_jax.data import packing
from mesanet_jax.data.loader import Batches, eval_batches, to_batch
from mesanet_jax.data.packing import Packer, row_dtype
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.prepare import prepare
from tests.helpers.data import make_config, random_texts, write_jsonl


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    path = write_jsonl(folder / "in.jsonl", [text for text in random_texts(0, 60) if text.strip()])
    prepare(make_config(input=path, output=folder / "out", seq_len=32))
    return PackedRows(str(folder / "out"), "train")


def batches(rows, *, batch_size=8, seed=0, steps=1000, positions=None):
    return Batches(rows, batch_size, seed=seed, steps=steps, positions=positions)


def equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def test_each_row_is_read_once_per_epoch_in_another_order(rows):
    count = len(rows)
    order = np.array([batches(rows, batch_size=1).row_indices(step)[0] for step in range(3 * count)]).reshape(3, count)
    assert (np.sort(order) == np.arange(count)).all()
    assert all((order[i] != order[j]).any() for i, j in ((0, 1), (1, 2), (0, 2)))
    assert (order[0] != np.arange(count)).any()


def test_order_does_not_depend_on_the_batch_size(rows):
    small = [row for step in range(12) for row in batches(rows, batch_size=4).row_indices(step)]
    large = [row for step in range(4) for row in batches(rows, batch_size=12).row_indices(step)]
    assert small == large


def test_seeds_have_no_epoch_in_common(rows):
    orders = {
        tuple(batches(rows, batch_size=len(rows), seed=seed).row_indices(epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


@pytest.mark.parametrize("positions", [range(8), range(4, 8), [1, 2, 5]])
@pytest.mark.parametrize("step", [0, 7, 123_456_789])
def test_a_process_reads_its_rows_of_the_global_batch(rows, positions, step):
    whole = batches(rows, steps=10**9)[step]
    part = batches(rows, steps=10**9, positions=positions)[step]
    for key in whole:
        assert np.array_equal(part[key], whole[key][list(positions)])


def test_iterating_from_a_step_is_resuming(rows):
    from_start = list(batches(rows, steps=12).iterate())
    resumed = list(batches(rows, steps=12).iterate(5))
    assert len(from_start) == 12 and len(resumed) == 7
    assert all(equal(one, other) for one, other in zip(from_start[5:], resumed))
    assert all(equal(batch, batches(rows)[step]) for step, batch in enumerate(from_start))
    assert not list(batches(rows, steps=12).iterate(12))


def test_fresh_process_gives_the_same_batch(rows):
    program = (
        "import hashlib\n"
        "from mesanet_jax.data.loader import Batches\n"
        "from mesanet_jax.data.rows import PackedRows\n"
        f"batch = Batches(PackedRows({rows._directory.path!r}, 'train'), 8, seed=3, steps=10**6)[54321]\n"
        "print(hashlib.sha256(b''.join(batch[key].tobytes() for key in sorted(batch))).hexdigest())\n"
    )
    fresh = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    scope = {}
    exec(program.replace("print(", "checksum = ("), scope)
    assert fresh.strip() == scope["checksum"]


def test_order_is_pinned():
    """A run that is resumed with another version of Grain must read the same rows."""

    class Numbers:
        split = "train"

        def __len__(self):
            return 1000

    order = Batches(Numbers(), 10, seed=0, steps=1000)
    assert order.row_indices(0) == [233, 815, 962, 246, 407, 428, 821, 490, 945, 144]
    assert order.row_indices(150) == [466, 330, 730, 735, 188, 875, 910, 324, 621, 401]


def test_shapes_and_types(rows):
    batch = batches(rows)[0]
    assert {key: (value.shape, value.dtype.name) for key, value in batch.items()} == {
        "inputs": ((8, 32), "int32"),
        "targets": ((8, 32), "int32"),
        "segment_ids": ((8, 32), "int32"),
        "weights": ((8, 32), "float32"),
    }


def test_batch_of_known_rows():
    packer = Packer(row_dtype(seq_len=5, vocab_size=300), pad_id=9)
    for document in ([1, 11, 12], [1, 21, 22, 23, 24], [1, 31]):
        packer.add(np.array(document))
    batch = to_batch(packer.flush())
    assert batch["inputs"].tolist() == [[1, 11, 12, 1, 21], [23, 24, 1, 31, 9]]
    assert batch["targets"].tolist() == [[11, 12, 1, 21, 22], [24, 1, 31, 9, 9]]
    assert batch["segment_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]
    assert batch["weights"].tolist() == [[1, 1, 0, 1, 1], [1, 0, 1, 0, 0]]


def test_weights_and_segments_of_random_rows(rows):
    stored = rows.read(range(len(rows)))
    batch = to_batch(stored)
    steps = np.diff(batch["segment_ids"], axis=1)
    assert (batch["segment_ids"][:, 0] == 0).all() and ((steps == 0) | (steps == 1)).all()
    starts = packing.document_starts(stored)
    bos = rows.tokenizer.bos_id
    assert ((batch["targets"] == bos) == starts[:, 1:]).all()
    valid = np.arange(1, 33) < stored["length"][:, None]
    assert (batch["weights"] == (valid & (batch["targets"] != bos))).all()
    within = valid[:, :-1] & (batch["weights"][:, :-1] == 1)
    assert (steps[within] == 0).all()
    assert (batch["inputs"][:, 1:] == batch["targets"][:, :-1]).all()


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_sees_every_row_once_in_order(rows, batch_size, processes):
    shares = np.arange(batch_size * processes).reshape(processes, batch_size)
    batch_size *= processes
    expected = to_batch(rows.read(range(len(rows))))
    parts = [list(eval_batches(rows, batch_size, positions=share)) for share in shares]
    for key in expected:
        joined = np.concatenate([part[key] for step in zip(*parts) for part in step])
        assert np.array_equal(joined[: len(rows)], expected[key])
        assert len(joined) % batch_size == 0 and len(joined) - len(rows) < batch_size
        assert key != "weights" or not joined[len(rows) :].any()


def test_batches_that_cannot_be(rows):
    with pytest.raises(UserError, match=f"has {len(rows)} rows, fewer than a batch of 10000"):
        batches(rows, batch_size=10_000)
