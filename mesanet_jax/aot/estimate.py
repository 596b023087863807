"""Estimates the time of a step with the TPU compiler's own cost model. It is an estimate, never a measurement.

The compiler writes the cycles that it expects for every scheduled operation into the program; operations in a loop
count once per iteration. It gives no cycles for transfers between chips; they count as their bytes at the full speed
of the chip's links. The estimate is a range: from all transfers hidden behind computation, to none hidden.
"""

import dataclasses
import re

from mesanet_jax.aot import collectives, hlo
from mesanet_jax.aot.build import Build
from mesanet_jax.flops import peak_flops

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_WORK = ("fusion", "convolution", "dot", "gather", "scatter", "sort")  # operations that should have an estimate
_KERNEL = 'custom_call_target="tpu_custom_call"'  # a Pallas kernel; all other custom calls take no time


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated time of a step on a chip.

    Attributes:
      computing: seconds of computation.
      transfers: seconds of transfers at full link speed.
      kernels: executions of Pallas kernels, for which the compiler gives no cycles; with any of them the seconds are a
        lower bound.
      others: executions of gathers, scatters and sorts that the compiler gives no cycles for.
    """

    computing: float
    transfers: float
    kernels: int
    others: int

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds per step with all transfers hidden, and with none hidden."""
        return max(self.computing, self.transfers), self.computing + self.transfers


def estimate(build: Build, module: hlo.Module) -> Estimate | None:
    """Returns the estimate; None on the CPU, whose compiler gives no cycles, and for a chip of unknown clock."""
    chip = build.topology.chip
    if chip is None or chip.clock is None:
        return None
    cycles = kernels = others = 0
    for visit in hlo.walk(module):
        if visit.fused:
            continue
        if found := _CYCLES.search(visit.instruction.attributes):
            cycles += visit.times * int(found[1])
        elif _KERNEL in visit.instruction.attributes:
            kernels += visit.times
        elif _is_work(module, visit.instruction):
            others += visit.times
    return Estimate(
        computing=cycles / (chip.clock * 1e9),
        transfers=collectives.sent(collectives.measure(module)) / (chip.link * 1e9),
        kernels=kernels,
        others=others,
    )


def _is_work(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    """Whether an instruction should have cycles; a fusion around a collective should not, as its bytes are counted."""
    if instruction.opcode not in _WORK:
        return False
    parts = [part for name in hlo.called(instruction) for part in module.computations[name].instructions.values()]
    return not any(collectives.is_collective(part) for part in parts)


def utilisation(build: Build, seconds: float) -> float | None:
    """Returns the model FLOPs utilisation of a step that takes `seconds`; None if the chip's peak is not known."""
    peak = peak_flops(build.topology.devices[0])
    return None if peak is None else build.flops / (seconds * peak * len(build.topology.devices))
