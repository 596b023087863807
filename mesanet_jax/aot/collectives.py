"""What the chips say to each other in a step: collectives of the compiled program by kind, with their bytes."""

import dataclasses

from mesanet_jax.aot import hlo

# Times its bytes that a chip sends for each, in a ring of many: an all-reduce is a reduce-scatter and an all-gather.
SENT = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1, "collective-permute": 1}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """`count` executions a step and their `bytes` on one chip: of the whole array, so what is gathered or scattered."""

    kind: str
    count: int
    bytes: int


def measure(module: hlo.Module) -> list[Traffic]:
    """The collectives of a step, loops by their trip counts."""
    counts, sizes = dict.fromkeys(SENT, 0), dict.fromkeys(SENT, 0)
    for visit in hlo.walk(module):
        if not is_collective(visit.instruction):
            continue
        # The TPU compiler repeats an asynchronous collective where it waits for it ...
        if "AsyncCollectiveDone" in visit.computation.instructions[visit.computation.root].attributes:
            continue
        # ... and writes a reduce-scatter as an all-reduce and a slice, fused under this name.
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
        result -= given  # the shape of these lists the operands too
    return max(given, result)


def sent(traffic: list[Traffic]) -> int:
    """Bytes that one chip sends in a step, at least."""
    return sum(SENT[each.kind] * each.bytes for each in traffic)
