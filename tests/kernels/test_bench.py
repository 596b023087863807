"""The benchmark runs without an accelerator, and its errors are those of the call that it times."""

import json
import pathlib
import subprocess
import sys

BENCH = pathlib.Path(__file__).parents[2] / "kernels" / "benchmarks" / "bench.py"


def run(tmp_path, *arguments):
    command = [sys.executable, str(BENCH), "--repeats=1", f"--json={tmp_path / 'out.json'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "out.json").read_text())["rows"]


def test_a_row_for_each_implementation(tmp_path):
    rows = run(
        tmp_path, "--op=mesa", "--shape=tiny", "--implementation=all", "--keys=hard", "--tol=1e-3", "--max_iters=50"
    )
    (row,) = rows
    assert row["implementation"] == "xla" and row["forward_ms"] > 0 and row["gb_s"] > 0
    assert 1 < row["iterations"] < 50  # the solves stop early, and rates count the iterations that were needed
    assert 1e-6 < row["error"] < 1e-2 and row["gradient_error"] < 1e-2
