"""Reads the text of a compiled program (HLO): its instructions, and how often each of them runs."""

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
    """A named list of instructions, such as the body of a loop or a fusion."""

    name: str
    instructions: dict[str, Instruction]
    root: str


class Module(NamedTuple):
    """A program: its computations, and the name of the one where it begins."""

    computations: dict[str, Computation]
    entry: str


class Visit(NamedTuple):
    """An instruction on the way through the program.

    Attributes:
      times: how often it runs per step; a loop of unknown length counts once.
      fused: whether it is a part of a fusion, which is scheduled as a whole.
    """

    instruction: Instruction
    computation: Computation
    times: int
    fused: bool


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLS = {
    "while": "body",
    "call": "to_apply",
    "conditional": "branch_computations",
}  # the attribute with the computations; "calls" for all other opcodes
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def parse(text: str) -> Module:
    """Parses the text of `compiled.as_text()`."""
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
    """Returns the arrays of a shape: [('f32', (2, 3)), ('s32', ())] for '(f32[2,3], s32[])'."""
    return [(kind, tuple(int(size) for size in sizes.split(",") if size)) for kind, sizes in _ARRAY.findall(shape)]


def dims(shape: str) -> tuple[int, ...]:
    """Returns the dimensions of the shape of one array."""
    return arrays(shape)[0][1]


def size(shape: str) -> int:
    """Returns the bytes of all arrays of a shape, without padding."""
    total = 0
    for kind, sizes in arrays(shape):
        bits = 8 if kind == "pred" else int(_group(r"(\d+)", kind))
        for length in sizes:
            bits *= length
        total += -(-bits // 8)
    return total


def walk(module: Module) -> Iterator[Visit]:
    """Yields every instruction that runs, with the number of times; both branches of a conditional count."""
    yield from _walk(module, module.entry, times=1, fused=False)


def unknown_loops(module: Module) -> int:
    """Returns the number of loops whose length depends on the data; their instructions count once."""
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
    """Returns the computations that an instruction runs: a loop's body, a fusion's parts, a conditional's branches."""
    key = _CALLS.get(instruction.opcode, "calls")
    found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%[\w.\-]+)", instruction.attributes)
    return _NAME.findall(found[1]) if found else []


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns how often a `while` runs: as XLA noted, or as its condition says if that is `counter < constant`."""
    if known := _KNOWN_TRIPS.search(loop.attributes):
        return int(known[1])
    condition = module.computations[_group(r"condition=%([\w.\-]+)", loop.attributes)]
    test = condition.instructions[condition.root]
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, end = (condition.instructions[name] for name in test.operands)
    if counter.opcode != "get-tuple-element" or end.opcode != "constant":
        return None
    index = int(_group(r"index=(\d+)", counter.attributes))
    begin = computation.instructions[loop.operands[0]]
    while begin.opcode in ("tuple", "copy", "bitcast"):
        begin = computation.instructions[begin.operands[index if begin.opcode == "tuple" else 0]]
    return int(end.operands[0]) - int(begin.operands[0]) if begin.opcode == "constant" else None


def _group(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"{text!r} does not match {pattern}"
    return found[1]
