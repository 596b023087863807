"""What the repository says in prose: Markdown files, docstrings, comments and messages, and what they cite."""

import ast
import functools
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from tests.helpers.smoke import ROOT

CODE = ("mesanet_jax", "kernels", "configs", "scripts", "tests", "examples")
RESULTS = ROOT / "docs" / "results"  # what was measured, in the words of its time


class Passage(NamedTuple):
    """A piece of prose: the text with line breaks and comment signs removed, and where it begins."""

    path: pathlib.Path
    line: int
    text: str
    kind: str  # "markdown", "docstring", "comment", or "string" for any other literal

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


@functools.cache
def markdown_files() -> tuple[pathlib.Path, ...]:
    return (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))


@functools.cache
def code_files() -> tuple[pathlib.Path, ...]:
    return tuple(path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")))


@functools.cache
def passages() -> tuple[Passage, ...]:
    """Every passage, with the literals of tests left out: these name files and fields that must not exist."""
    found = [passage for path in markdown_files() for passage in _of_markdown(path)]
    for path in code_files():
        source = path.read_text()
        found += _comments(path, source)
        literals = path.relative_to(ROOT).parts[0] != "tests"
        found += [passage for passage in _strings(path, source) if literals or passage.kind == "docstring"]
    return tuple(found)


def _of_markdown(path: pathlib.Path) -> Iterator[Passage]:
    """Paragraphs, table rows and code blocks."""
    block, begin = [], 1
    for number, line in enumerate([*path.read_text().splitlines(), ""], start=1):
        if not block:
            begin = number
        if line.strip():
            block.append(line)
        elif block:
            yield Passage(path, begin, _joined("\n".join(block)), "markdown")
            block = []


def _comments(path: pathlib.Path, source: str) -> Iterator[Passage]:
    """Comments, those on successive lines as one."""
    block, begin, last = [], 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield Passage(path, begin, _joined(" ".join(block)), "comment")
            block = []
        if not block:
            begin = token.start[0]
        block.append(token.string.lstrip("#"))
        last = token.start[0]
    if block:
        yield Passage(path, begin, _joined(" ".join(block)), "comment")


def _strings(path: pathlib.Path, source: str) -> Iterator[Passage]:
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _leads(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = "docstring" if id(node) in docstrings else "string"
            yield Passage(path, node.lineno, _joined(node.value), kind)


def _leads(node) -> bool:
    """Whether the first statement of a definition is a literal, which is then its docstring."""
    return bool(node.body) and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)


def _joined(text: str) -> str:
    return " ".join(text.split())


@functools.cache
def headings(path: pathlib.Path) -> tuple[str, ...]:
    """The headings of a Markdown file, without their signs."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return tuple(heading.strip().replace("`", "") for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE))


def anchors(path: pathlib.Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(path)}


def module_problem(name: str) -> str | None:
    """Why a dotted name like `mesanet_jax.training.step.Program` cites nothing; None if it exists.

    What follows the module must occur in its file as a word.
    """
    first, *rest = name.split(".")
    here = (ROOT / "kernels" if first in ("mesanet_kernels", "benchmarks") else ROOT) / first
    while rest and ((here / rest[0]).is_dir() or (here / f"{rest[0]}.py").is_file()):
        here = here / rest.pop(0)
    file = here.with_suffix(".py") if here.with_suffix(".py").is_file() else here / "__init__.py"
    if not file.is_file():
        return None if here.is_dir() and not rest else f"no module {name}"
    if rest and not re.search(rf"\b{re.escape(rest[0])}\b", file.read_text()):
        return f"{file.relative_to(ROOT)} has no {rest[0]}"
    return None
