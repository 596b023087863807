"""Compiles the real training step of a config for a topology; nothing is allocated, and nothing runs."""

import contextlib
import dataclasses
import re
import sys
import threading
import time
from typing import Any

import jax

from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models
from mesanet_jax.aot.topology import Topology
from mesanet_jax.formatting import duration
from mesanet_jax.training import step as step_lib

_SHORTAGES = {
    "temporaries": re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT])\)"),
    "total": re.compile(r"Used ([\d.]+)([KMGT]) of"),
}


@dataclasses.dataclass(frozen=True)
class Build:
    """A compiled step, or, with `executable` None, one that the compiler found too large for the chip.

    `flops`: of the model, in a step, over all chips. `shortage`: what the compiler then said, {"temporaries": bytes} or
    {"total": bytes} of a chip, if it did. `seconds`: what compiling took.
    """

    config: Any
    topology: Topology
    program: step_lib.Program
    flops: float
    executable: jax.stages.Compiled | None
    shortage: dict[str, int] | None
    seconds: float


def build(config, topology: Topology) -> Build:
    """Compiles `config`'s step; a step that the compiler finds too large for the chip is a Build too.

    Raises:
      UserError: the mesh or the batch does not fit the topology's number of devices.
    """
    mesh = mesh_lib.make_mesh(tuple(config.mesh[axis] for axis in mesh_lib.AXES), topology.devices)
    model = models.build(config.model)
    program = step_lib.compile_program(config, model, mesh)
    tokens = config.data.batch_size * config.data.seq_len
    began, executable, shortage = time.monotonic(), None, None
    about = (
        f"compiling {config.name} for {topology.name}, {config.train.rows_per_device} rows, remat {config.model.remat}"
    )
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
    """What an error of the TPU compiler says about the chip's memory; None if that is not what it complains about."""
    if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
        return None
    found = {kind: pattern.search(message) for kind, pattern in _SHORTAGES.items()}
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return {kind: int(float(said[1]) * units[said[2]]) for kind, said in found.items() if said}


@contextlib.contextmanager
def elapsed(about: str):
    """Says on stderr how long the block has taken: a running clock on a terminal, elsewhere a line every minute."""
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
