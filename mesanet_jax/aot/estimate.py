"""How long a step might take, by the TPU compiler's own cost model. An estimate, never a measurement.

The compiler writes the cycles that it expects of every scheduled operation into the program; loops are counted here by
their trip counts. Transfers between chips have none: they are their bytes over the chip's links at full speed. Between
"all transfers hidden behind computing" and "none hidden" lies the range that is reported.
"""

import dataclasses
import re

from mesanet_jax.aot import collectives, hlo
from mesanet_jax.aot.build import Build
from mesanet_jax.flops import peak_flops

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_WORK = ("fusion", "convolution", "dot", "gather", "scatter", "sort")  # what should have an estimate
_KERNEL = 'custom_call_target="tpu_custom_call"'  # Pallas; all other custom calls are bookkeeping


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a step on a chip: `computing`, and `transfers` at full link speed.

    What the compiler gives no cycles for counts as nothing: `kernels`, executions of Pallas kernels (with any, the
    seconds are a lower bound), and `others`, of gathers, scatters and sorts.
    """

    computing: float
    transfers: float
    kernels: int
    others: int

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a step: transfers all hidden, and none hidden."""
        return max(self.computing, self.transfers), self.computing + self.transfers


def estimate(build: Build, module: hlo.Module) -> Estimate | None:
    """None on the CPU, whose compiler estimates nothing, and for a chip whose clock is not known."""
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
    """Whether it should have an estimate; a fusion around a collective should not, whose bytes are counted."""
    if instruction.opcode not in _WORK:
        return False
    parts = [part for name in hlo.called(instruction) for part in module.computations[name].instructions.values()]
    return not any(collectives.is_collective(part) for part in parts)


def utilisation(build: Build, seconds: float) -> float | None:
    """The model FLOPs utilisation of a step of `seconds`."""
    peak = peak_flops(build.topology.devices[0])
    return None if peak is None else build.flops / (seconds * peak * len(build.topology.devices))
