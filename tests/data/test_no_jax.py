"""Data are prepared by spawned processes, which must neither import jax nor use a device."""

import re
import subprocess
import sys

from tests.helpers.data import ROOT

DATA = ROOT / "mesanet_jax" / "data"


def test_no_jax_where_workers_are_spawned():
    names = {path.stem for path in DATA.glob("*.py")} - {"__init__", "loader"}
    imports = "; ".join(f"import mesanet_jax.data.{name}" for name in names)
    check = f"import sys, mesanet_jax.prepare; {imports}; print({{'jax', 'flax', 'grain'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True).stdout == "set()\n"


def test_no_jax_in_the_sources():
    for path in DATA.glob("*.py"):
        imported = re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
        assert imported or path.name == "__init__.py"
        assert not {"jax", "flax"} & set(imported), path
