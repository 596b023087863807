"""Tests everything that compiles nothing: topologies by name, meshes on them, prices, the search for what fits."""

import dataclasses

import jax
import numpy as np
import pytest

from mesanet_jax import mesh as mesh_lib
from mesanet_jax.aot import price, suggest, topology
from mesanet_jax.aot.build import read_shortage
from mesanet_jax.aot.chips import CHIPS, chips_in
from mesanet_jax.errors import UserError
from mesanet_jax.flops import PEAK_TFLOPS


@pytest.mark.parametrize(
    ("name", "slices", "said"),
    [
        ("v5p-128", 1, "here it is called v5p:4x4x4"),
        ("v5e-16", 1, "here it is called v5e:4x4"),
        ("v5p:4x4x5", 1, "the nearest are v5p:4x4x4"),
        ("v5e:32x32", 1, "the nearest are v5e:16x16"),
        ("v9:2x2", 1, "the chips are v5e, v5p, v6e and cpu"),
        ("cpu:none", 1, "no such slice"),
        ("cpu:8", 2, "CPU devices have no slices"),
        ("v5e:4x4", 0, "must be at least 1"),
    ],
)
def test_wrong_names_are_one_line(name, slices, said):
    with pytest.raises(UserError, match=said) as error:
        topology.parse(name, slices=slices)
    assert "\n" not in str(error.value)


def test_chips_table():
    assert topology.parse("v5p:8x8x8", slices=2) == ("v5p", "8x8x8")
    assert chips_in("8x8x8") == 512
    units = {"v5e": 4 * 128**2, "v5p": 2 * 4 * 128**2}  # multiply-adds per cycle, of two FLOPs each
    peaks = {"v5e": PEAK_TFLOPS["TPU v5 lite"], "v5p": PEAK_TFLOPS["TPU v5"]}
    assert {chip: 2e-3 * units[chip] * CHIPS[chip].clock for chip in units} == pytest.approx(peaks, rel=0.005)


def test_missing_compiler_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv(topology.COMPILER, str(tmp_path / "nowhere"))
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="the TPU compiler is in neither .*nowhere nor the environment"):
        topology.make("v5e:2x2")


def test_mesh_that_does_not_fit_proposes_one():
    with pytest.raises(
        UserError,
        match="data=3, fsdp=2, tensor=1, sequence=1: .* number of devices, 8; try .*data=-1 .*fsdp=2 .*tensor=1",
    ):
        mesh_lib.make_mesh((3, 2, 1), jax.devices()[:8])
    with pytest.raises(
        UserError, match="fsdp=6, tensor=3.*try --config.mesh.data=-1 --config.mesh.fsdp=2 --config.mesh.tensor=1"
    ):
        mesh_lib.make_mesh((-1, 6, 3), jax.devices()[:8])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO"
            " temporaries (45.50G) exceeds available HBM (15.75G).",
            {"temporaries": 45.5 * 2**30},
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.50G of 15.75G hbm.",
            {"total": 21.5 * 2**30},
        ),
        ("RESOURCE_EXHAUSTED: HBM, in words to come", {}),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 21.50M of 16.00M.", None),
        ("INTERNAL: something else", None),
    ],
)
def test_what_the_compiler_says_about_memory(message, said):
    assert read_shortage(message) == said


# The most rows that fit by policy, the setting of the config, the setting to find, and the number of compilations.
@pytest.mark.parametrize(
    ("fitting", "first", "answer", "count"),
    [
        ({"none": 16, "matmuls": 16, "mixer": 16, "full": 16}, ("mixer", 16), ("none", 16), 3),
        ({"none": 16, "matmuls": 16, "mixer": 16, "full": 16}, ("none", 2), ("none", 16), 6),
        ({"none": 1, "matmuls": 2, "mixer": 8, "full": 8}, ("mixer", 16), ("mixer", 8), 6),
        ({"none": 1, "matmuls": 2, "mixer": 8, "full": 16}, ("mixer", 16), ("full", 16), 3),
        ({"none": 1, "matmuls": 2, "mixer": 8, "full": 8}, ("mixer", 8), ("mixer", 8), 3),
        ({"none": 0, "matmuls": 0, "mixer": 1, "full": 4}, ("full", 16), ("full", 4), 4),
        ({"none": 0, "matmuls": 0, "mixer": 0, "full": 0}, ("mixer", 8), None, 4),
        ({"none": 0, "matmuls": 0, "mixer": 0, "full": 0}, ("full", 1), None, 1),
    ],
)
def test_suggestion_is_the_largest_that_fits(fitting, first, answer, count):
    attempt = lambda remat, rows: suggest.Candidate(remat, rows, rows <= fitting[remat], None)
    tried = suggest.search(16, attempt, first=attempt(*first))
    best = suggest.best(tried)
    assert (None if best is None else (best.remat, best.rows)) == answer
    assert len(tried) == count and len({(each.remat, each.rows) for each in tried}) == count


def test_fastest_is_of_those_that_fit():
    slow, fast, large = (suggest.Candidate("full", rows, rows < 9, 1 / rows) for rows in (1, 8, 16))
    assert suggest.fastest([slow, fast, large]) == fast
    assert suggest.fastest([dataclasses.replace(fast, seconds=None), large]) is None


def test_prices(tmp_path):
    shipped = {chip: price.load(price.PRICES, chip) for chip in CHIPS}
    assert all(each.source and each.date for each in shipped.values())
    assert dataclasses.replace(shipped["v5e"], dollars=3.6).per_billion_tokens(1e6, chips=16) == pytest.approx(16.0)
    assert price.load(price.PRICES, "cpu") is None
    table = tmp_path / "prices.toml"
    with pytest.raises(UserError, match="No such file"):
        price.load(table, "v5e")
    table.write_text("[v5e]\ndollars = 1\n")
    with pytest.raises(UserError, match="source"):
        price.load(table, "v5e")


@dataclasses.dataclass(frozen=True)
class Device:
    """One of two slices of four."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


def test_slices_split_the_data_axis_first():
    """fsdp and tensor stay inside a slice, where the links are fast."""
    devices = [Device(index, index // 4) for index in (5, 0, 4, 1, 7, 2, 6, 3)]
    mesh = mesh_lib.make_mesh((-1, 2, 1), devices)
    assert dict(mesh.shape) == {"data": 4, "fsdp": 2, "sequence": 1, "tensor": 1}
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert (slices[:2] == slices[0, 0, 0]).all() and (slices[2:] == slices[2, 0, 0]).all()
    assert slices[0, 0, 0] != slices[2, 0, 0]
    with pytest.raises(UserError, match="data is 1 and must be a multiple of the number of slices, 2; try .*fsdp=4 "):
        mesh_lib.make_mesh((-1, 8, 1), devices)
