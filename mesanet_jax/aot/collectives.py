"""Counts the collectives of a compiled program, by kind, and their bytes."""

import dataclasses

from mesanet_jax.aot import hlo

# How often a chip sends the bytes of a collective in a large ring; an all-reduce is a reduce-scatter and an all-gather.
SENT = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1, "collective-permute": 1}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of a kind, per step and chip.

    Attributes:
      count: how often they are executed.
      bytes: the size of the whole arrays that are gathered, scattered or reduced.
    """

    kind: str
    count: int
    bytes: int


def measure(module: hlo.Module) -> list[Traffic]:
    """Returns the collectives of a step. Those in a loop count once per iteration."""
    counts, sizes = dict.fromkeys(SENT, 0), dict.fromkeys(SENT, 0)
    for visit in hlo.walk(module):
        if not is_collective(visit.instruction):
            continue
        # The TPU compiler repeats an asynchronous collective at the place where it waits for it.
        if "AsyncCollectiveDone" in visit.computation.instructions[visit.computation.root].attributes:
            continue
        # It writes a reduce-scatter as an all-reduce and a slice, fused under this name.
        scattered = visit.computation.name.startswith("all-reduce-scatter")
        kind = "reduce-scatter" if scattered else visit.instruction.opcode.removesuffix("-start")
        counts[kind] += visit.times
        sizes[kind] += visit.times * _bytes(visit)
    return [Traffic(kind, counts[kind], sizes[kind]) for kind in SENT if counts[kind]]


def is_collective(instruction: hlo.Instruction) -> bool:
    return instruction.opcode.removesuffix("-start") in SENT


def _bytes(visit: hlo.Visit) -> int:
    operands = [visit.computation.instructions[name] for name in visit.instruction.operands]
    given, result = sum(hlo.size(operand.shape) for operand in operands), hlo.size(visit.instruction.shape)
    if visit.instruction.opcode.endswith("-start") and visit.instruction.opcode != "all-reduce-start":
        result -= given  # the shape of these operations includes the operands
    return max(given, result)


def sent(traffic: list[Traffic]) -> int:
    """Returns the bytes that one chip sends per step, at least."""
    return sum(SENT[each.kind] * each.bytes for each in traffic)
