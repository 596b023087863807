"""Which modules may import which: commands are not libraries, layers know only the layers below, and no cycles."""

import ast
import pathlib

import pytest

from tests.helpers.smoke import ROOT

PACKAGES = {  # name -> directory
    "mesanet_kernels": ROOT / "kernels" / "mesanet_kernels",
    "mesanet_jax": ROOT / "mesanet_jax",
    "configs": ROOT / "configs",
    "scripts": ROOT / "scripts",
}
# What must not be imported by each layer, from the lowest layer upwards.
RUNS = {
    f"mesanet_jax.{name}" for name in ("training", "runtime", "reporting", "inference", "aot", "comparing", "evals")
}
FORBIDDEN = {
    "mesanet_kernels": {"mesanet_jax", "configs", "scripts", "flax"},
    "mesanet_jax.data": RUNS | {"mesanet_jax.models", "mesanet_jax.mixers", "mesanet_kernels"},
    "mesanet_jax.mixers": RUNS | {"mesanet_jax.models", "mesanet_jax.data"},
    "mesanet_jax.models": RUNS | {"mesanet_jax.data"},
    "mesanet_jax.evals": RUNS - {"mesanet_jax.evals"},
    "mesanet_jax.inference": RUNS - {"mesanet_jax.inference"},
    "mesanet_jax.reporting": RUNS - {"mesanet_jax.reporting", "mesanet_jax.evals"},
    "mesanet_jax.runtime": RUNS - {"mesanet_jax.runtime"},
    "mesanet_jax": {"scripts", "configs", "tests"},
}


def module_name(package: str, path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join((package, *parts)).removesuffix(".__init__")


SOURCES = {
    module_name(package, path): path
    for package, directory in PACKAGES.items()
    for path in sorted(directory.rglob("*.py"))
}
COMMANDS = {
    name
    for name, path in SOURCES.items()
    if name.startswith("mesanet_jax.") and name.count(".") == 1 and "__main__" in path.read_text()
}


def imports(name: str) -> set[str]:
    """The modules that a module imports, also inside its functions; `from a import b` is a.b if that is a module."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in SOURCES else node.module)
    return found


IMPORTS = {name: imports(name) for name in SOURCES}


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_the_commands_are_found():
    names = ("train", "evaluate", "compare", "generate", "prepare", "recall", "compile")
    assert {f"mesanet_jax.{name}" for name in names} <= COMMANDS


def test_no_module_imports_a_command():
    wrong = {name: imported & COMMANDS for name, imported in IMPORTS.items() if imported & COMMANDS}
    assert not wrong


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_layers_import_only_what_is_below(layer):
    wrong = [
        f"{name} imports {imported}"
        for name, all_imported in IMPORTS.items()
        if inside(name, layer)
        for imported in sorted(all_imported)
        if any(inside(imported, package) for package in FORBIDDEN[layer])
    ]
    assert not wrong


def test_no_import_cycles():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for imported in sorted(IMPORTS[name] & SOURCES.keys()):
                visit(imported, (*path, name))
            done.add(name)

    for name in SOURCES:
        visit(name, ())
