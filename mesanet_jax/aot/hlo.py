"""The text of a compiled program (HLO), read as far as counting needs it: its instructions, and how often each runs."""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Instruction(NamedTuple):
    """`%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


class Computation(NamedTuple):
    name: str
    instructions: dict[str, Instruction]
    root: str


class Module(NamedTuple):
    computations: dict[str, Computation]
    entry: str


class Visit(NamedTuple):
    """An instruction on the way through the program, which runs `times` times a step (a loop of unknown length counts
    once). `fused`: it is a part of a fusion, and that is what is scheduled."""

    instruction: Instruction
    computation: Computation
    times: int
    fused: bool


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLS = {"while": "body", "call": "to_apply", "conditional": "branch_computations"}  # all others: "calls"
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def parse(text: str) -> Module:
    """The module of `compiled.as_text()`."""
    computations, entry, current = {}, "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = Computation(header[2], {}, "")
            entry = header[2] if header[1] else entry
        elif current is not None and line.startswith("}"):
            computations[current.name], current = current, None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            root, name, shape, opcode, rest = found.groups()
            inside, _, attributes = rest.partition(")")
            operands = (inside,) if opcode == "constant" else tuple(_NAME.findall(inside))
            current.instructions[name] = Instruction(name, shape, opcode, operands, attributes)
            current = current._replace(root=name) if root else current
    return Module(computations, entry)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """'(f32[2,3], s32[])' -> [('f32', (2, 3)), ('s32', ())]."""
    return [(kind, tuple(int(size) for size in sizes.split(",") if size)) for kind, sizes in _ARRAY.findall(shape)]


def dims(shape: str) -> tuple[int, ...]:
    """The dimensions of an array's shape."""
    return arrays(shape)[0][1]


def size(shape: str) -> int:
    """Bytes of a shape, all its arrays together, without padding."""
    total = 0
    for kind, sizes in arrays(shape):
        bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
        for length in sizes:
            bits *= length
        total += -(-bits // 8)
    return total


def walk(module: Module) -> Iterator[Visit]:
    """Every instruction that runs, loops by their trip counts; both branches of a conditional count."""
    yield from _walk(module, module.entry, times=1, fused=False)


def unknown_loops(module: Module) -> int:
    """Loops that end by their data: what is in them is counted once."""
    loops = (visit for visit in walk(module) if visit.instruction.opcode == "while")
    return sum(trip_count(module, visit.computation, visit.instruction) is None for visit in loops)


def _walk(module: Module, name: str, *, times: int, fused: bool) -> Iterator[Visit]:
    computation = module.computations[name]
    for instruction in computation.instructions.values():
        yield Visit(instruction, computation, times, fused)
        often = times * (trip_count(module, computation, instruction) or 1) if instruction.opcode == "while" else times
        for callee in called(instruction):
            yield from _walk(module, callee, times=often, fused=fused or instruction.opcode == "fusion")


def called(instruction: Instruction) -> list[str]:
    """The computations that an instruction runs: a loop's body, a fusion's parts, a conditional's branches."""
    key = _CALLS.get(instruction.opcode, "calls")
    found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%[\w.\-]+)", instruction.attributes)
    return _NAME.findall(found[1]) if found else []


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a `while` runs: what XLA noted, or what its condition says if that is `counter < constant`."""
    if known := _KNOWN_TRIPS.search(loop.attributes):
        return int(known[1])
    condition = module.computations[re.search(r"condition=%([\w.\-]+)", loop.attributes)[1]]
    test = condition.instructions[condition.root]
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, end = (condition.instructions[name] for name in test.operands)
    if counter.opcode != "get-tuple-element" or end.opcode != "constant":
        return None
    index = int(re.search(r"index=(\d+)", counter.attributes)[1])
    begin = computation.instructions[loop.operands[0]]
    while begin.opcode in ("tuple", "copy", "bitcast"):
        begin = computation.instructions[begin.operands[index if begin.opcode == "tuple" else 0]]
    return int(end.operands[0]) - int(begin.operands[0]) if begin.opcode == "constant" else None
