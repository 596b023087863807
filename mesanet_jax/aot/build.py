"""Compiles the training step of a config for a topology. Nothing is allocated, and nothing runs."""

import contextlib
import dataclasses
import re
import sys
import threading
import time
from collections.abc import Iterator

import jax

from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models
from mesanet_jax.aot.topology import Topology
from mesanet_jax.formatting import duration
from mesanet_jax.schema import Config
from mesanet_jax.training import step as step_lib

_SHORTAGES = {
    "temporaries": re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT])\)"),
    "total": re.compile(r"Used ([\d.]+)([KMGT]) of"),
}


@dataclasses.dataclass(frozen=True)
class Build:
    """A compiled step, or a step that the compiler found too large for the chip.

    Attributes:
      flops: FLOPs of the model per step, over all chips.
      executable: the compiled step; None if it is too large.
      shortage: what the compiler said about a step that is too large, {"temporaries": bytes} or {"total": bytes} per
        chip, or {}; None if the step was compiled.
      seconds: the time that compiling took.
    """

    config: Config
    topology: Topology
    program: step_lib.Program
    flops: float
    executable: jax.stages.Compiled | None
    shortage: dict[str, int] | None
    seconds: float


def build(config: Config, topology: Topology) -> Build:
    """Compiles the training step of `config`; returns a `Build` for a step that is too large for the chip too.

    Raises:
      UserError: the mesh or the batch does not fit the number of devices of the topology.
    """
    mesh = mesh_lib.make_mesh(tuple(config.mesh[axis] for axis in mesh_lib.AXES), topology.devices)
    model = models.build(config.model)
    program = step_lib.compile_program(config, model, mesh)
    tokens = config.data.batch_size * config.data.seq_len
    began, executable, shortage = time.monotonic(), None, None
    rows = config.train.rows_per_device
    about = f"compiling {config.name} for {topology.name}, {rows} rows per device, remat {config.model.remat}"
    with elapsed(about), mesh_lib.use_mesh(mesh):
        lowered = program.train.trace(program.state, program.batch).lower(lowering_platforms=(topology.platform,))
        try:
            executable = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            shortage = read_shortage(str(error))
            if shortage is None:
                raise
    return Build(
        config=config,
        topology=topology,
        program=program,
        flops=model.flops_per_token(config.data.seq_len).training * tokens,
        executable=executable,
        shortage=shortage,
        seconds=time.monotonic() - began,
    )


def read_shortage(message: str) -> dict[str, int] | None:
    """Returns what an error of the TPU compiler says about the chip's memory; None if it is another error."""
    if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
        return None
    found = {kind: pattern.search(message) for kind, pattern in _SHORTAGES.items()}
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return {kind: int(float(said[1]) * units[said[2]]) for kind, said in found.items() if said}


@contextlib.contextmanager
def elapsed(about: str) -> Iterator[None]:
    """Prints the time that the block takes to stderr: continuously on a terminal, elsewhere one line per minute."""
    live, done, began = sys.stderr.isatty(), threading.Event(), time.monotonic()

    def say(end: str) -> None:
        print(f"{about}: {duration(time.monotonic() - began)}", end=end, file=sys.stderr, flush=True)

    def clock() -> None:
        while not done.wait(1 if live else 60):
            say("\r" if live else "\n")

    threading.Thread(target=clock, daemon=True).start()
    try:
        yield
    finally:
        done.set()
        say("\n")
