"""Turns a name such as v5p:8x8x8 into devices that a program can be compiled for. Nothing can run on them."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

import jax

from mesanet_jax.aot.chips import CHIPS, Chip, chips_in
from mesanet_jax.errors import UserError

COMPILER = "MESANET_TPU_COMPILER"  # an environment variable: the directory in which libtpu is installed
# Without these, libtpu asks the cloud's metadata server about the machine, and allows one process per machine.
ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile for. `name` is as the user wrote it; `chip` is None on the CPU."""

    name: str
    chip_name: str
    chip: Chip | None
    slices: int
    devices: tuple[Any, ...]

    @property
    def platform(self) -> str:
        return "cpu" if self.chip is None else "tpu"


def parse(name: str, *, slices: int = 1) -> tuple[str, str]:
    """Returns the chip and the shape that `name` means, such as ('v5p', '8x8x8') or ('cpu', '8').

    Raises:
      UserError: there is no such slice; the error names the nearest ones.
    """
    chip, _, shape = name.partition(":")
    if slices < 1:
        raise UserError(f"--slices={slices}: must be at least 1")
    if chip == "cpu" and shape.isdigit() and int(shape) > 0:
        if slices > 1:
            raise UserError(f"--slices={slices}: CPU devices have no slices; leave the flag out")
        return chip, shape
    if chip in CHIPS and shape in CHIPS[chip].slices:
        return chip, shape
    raise UserError(f"--topology={name}: no such slice; {_hint(name)}")


def _hint(name: str) -> str:
    chip, _, shape = name.partition(":")
    for known, table in CHIPS.items():
        same = [slice_ for slice_ in table.slices if name == f"{known}-{chips_in(slice_) * table.cores}"]
        if same:
            return f"here it is called {known}:{same[0]}"
    if chip not in CHIPS:
        examples = ", ".join(f"{known}:{table.slices[0]}" for known, table in CHIPS.items())
        return f"the chips are {', '.join(CHIPS)} and cpu; examples: {examples}, cpu:8"
    sides = [int(side) for side in shape.split("x") if side.isdigit()]
    wanted = max(1, math.prod(sides))
    near = sorted(CHIPS[chip].slices, key=lambda slice_: abs(math.log(chips_in(slice_) / wanted)))[:3]
    return "the nearest are " + ", ".join(f"{chip}:{slice_}" for slice_ in near)


def make(name: str, *, slices: int = 1) -> Topology:
    """Returns the topology with its devices.

    Raises:
      UserError: there is no such slice, or the TPU compiler is not installed.
    """
    chip, shape = parse(name, slices=slices)
    if chip == "cpu":
        return Topology(name, chip, None, 1, _cpu_devices(int(shape)))
    _load_compiler()
    from jax.experimental import topologies

    several = {"num_slices": slices} if slices > 1 else {}
    described = topologies.get_topology_desc(topology_name=f"{chip}:{shape}", platform="tpu", **several)
    return Topology(name, chip, CHIPS[chip], slices, tuple(described.devices))


def _cpu_devices(count: int) -> tuple[Any, ...]:
    with contextlib.suppress(RuntimeError):  # jax has already started in this process, so its devices are used
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(f"--topology=cpu:{count}: this process already has {len(devices)} devices; start a new process")
    return tuple(devices[:count])


def _load_compiler() -> None:
    """Makes libtpu importable, from the environment or from a directory beside it.

    In the environment itself, libtpu would make every run of JAX look for a TPU.
    """
    os.environ.update(ENVIRONMENT)
    beside = pathlib.Path(os.environ.get(COMPILER, pathlib.Path(sys.prefix) / "tpu-compiler")).resolve()
    if beside.is_dir() and str(beside) not in sys.path:
        sys.path.insert(0, str(beside))
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"--topology: the TPU compiler is in neither {beside} nor the environment; `make .venv/tpu-compiler`"
            f" installs it (or: pip install --no-deps --target DIR libtpu, and set {COMPILER}=DIR)"
        )


def describe(devices: Iterable[Any]) -> dict[str, Any]:
    """Returns what must be equal where a program is compiled and where it runs: kind, number, slices, grid of chips."""
    devices = list(devices)
    grid = [list(device.coords) for device in devices if getattr(device, "coords", None) is not None]
    return {
        "kind": devices[0].device_kind,
        "devices": len(devices),
        "slices": len({getattr(device, "slice_index", None) for device in devices}),
        "grid": [1 + max(column) for column in zip(*grid, strict=True)],
    }
