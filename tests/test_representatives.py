"""The table of representatives names tests and cases that exist."""

import pathlib
import subprocess
import sys

from tests.representatives import REPRESENTATIVES

ROOT = pathlib.Path(__file__).parents[1]


def test_every_representative_is_a_case_of_a_test():
    files = sorted({f"tests/{test.partition('::')[0]}" for test in REPRESENTATIVES})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", "-m", "not gpu", *files]
    listed = subprocess.run([*command, "-o", "addopts="], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    cases: dict[str, set[str]] = {}
    for line in listed.splitlines():
        test, bracket, case = line.removeprefix("tests/").partition("[")
        cases.setdefault(test, set()).add(case.removesuffix("]") if bracket else "")
    unknown = [test for test in REPRESENTATIVES if test not in cases]
    unknown += [
        f"{test}[{case}]" for test in cases for case in REPRESENTATIVES.get(test, ()) if case not in cases[test]
    ]
    assert not unknown, f"tests/representatives.py names what no test has: {unknown}"
