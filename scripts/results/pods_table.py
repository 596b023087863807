"""Compiles every shipped config for two pods and writes docs/results/pods.md: `nice python -m scripts.results.pods_table`

A compilation takes minutes (all but seconds of it in XLA), so each leaves its record in docs/results/pods/, and a rerun
goes on with what is missing (delete a record to have it made anew). v5p goes first: from what it needs the rows that fit
v5e are guessed, so that most rows of the table take one compilation. `--page` writes the page from the records that there
are. Needs the TPU compiler (`make .venv/tpu-compiler`).
"""

import argparse
import json
import pathlib
import subprocess
import sys

from mesanet_jax.aot.chips import CHIPS
from scripts.results.parameter_table import shipped

ROOT = pathlib.Path(__file__).parents[2]

RECORDS = ROOT / "docs" / "results" / "pods"
PAGE = RECORDS.with_suffix(".md")
FIRST = ("mesanet", "transformer")
PODS = {"v5e:4x4": "v5e-16", "v5p:4x4x4": "v5p-128"}
SMALL, LARGE = PODS  # the memory of a chip
# Data parallel, the configs' own mesh, but for what leaves v5e's 16 GiB no room beside its parameters and moments.
MESH = {("v5e:4x4", "1b"): ("--config.mesh.data=1", "--config.mesh.fsdp=16")}
# Rows of a device of v5e at most, by size, the smaller sizes first.
ROWS = {"90m": 16, "125m": 16, "140m": 16, "180m": 16, "d12": 16, "440m": 8, "d20": 8, "1b": 8}
GIBIBYTE = 2**30
HBM_OF_SMALL, CHIPS_OF_SMALL = CHIPS["v5e"].hbm, 16
WINDOWED_EINSUM = """
## What compiling found: products in pieces

`transformer:140m` on v5e-16 with all 16 chips on fsdp (2026-11-30; first with `COMPILER_OPTIONS` of `mesanet_jax/training/step.py`
emptied, then as it is):

```
python -m mesanet_jax.compile --config=configs/transformer.py:140m --topology=v5e:4x4 --config.mesh.data=1 --config.mesh.fsdp=16
```

| | estimated seconds a step | temporaries GB | compiled TFLOP | collective-permutes a step |
| --- | ---: | ---: | ---: | ---: |
| XLA's default: products with split weights become loops ("windowed einsum") | 3.02 | 8.1 | 75.1 | 10,425 |
| turned off in `COMPILER_OPTIONS`: weights are gathered whole | 1.19 | 4.7 | 50.5 | 0 |""".splitlines()
NOT_FITTING = 1  # the command's exit status


def tasks() -> list[tuple[str, str]]:
    """(spec, topology) of every row: smaller models first, of a size the families that most is asked about."""
    specs = sorted(shipped(ROWS).items(), key=lambda item: (list(ROWS).index(item[1]), not item[0].startswith(FIRST)))
    return [(spec, pod) for spec, _ in specs for pod in (LARGE, SMALL)]


def record_of(spec: str, pod: str) -> pathlib.Path:
    return RECORDS / f"{spec.replace(':', '-')}-{PODS[pod]}.json"


def guess(spec: str, size: str) -> int:
    """The power of two of rows for a chip of v5e, by what v5p needs; `compile_row` halves it where that was too many.

    Gradients are there whatever the rows, everything else among the temporaries grows with them.
    """
    facts = json.loads(record_of(spec, LARGE).read_text())
    held = {kind: facts["memory"][kind] for kind in ("parameters", "optimizer state")}
    split = 1 if (SMALL, size) not in MESH else CHIPS_OF_SMALL
    row = (facts["memory"]["temporaries"] - held["parameters"]) / (facts["batch_size"] / facts["chips"])
    free = HBM_OF_SMALL * GIBIBYTE - (sum(held.values()) + held["parameters"]) / split
    return next((rows for rows in (16, 8, 4, 2) if rows <= ROWS[size] and rows * row <= free), 1)


def compile_row(spec: str, pod: str) -> None:
    """Compiles with as many rows a device as fit, and leaves the record."""
    family, _, variant = spec.partition(":")
    size = variant.partition("-")[0]
    rows, record = guess(spec, size) if pod == SMALL else 16, record_of(spec, pod)
    partial = record.with_suffix(".partial")
    while True:
        command = [sys.executable, "-m", "mesanet_jax.compile", f"--config=configs/{family}.py:{variant}",
                   f"--topology={pod}", f"--json={partial}", f"--config.train.rows_per_device={rows}", *MESH.get((pod, size), ())]  # fmt: skip
        status = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
        if status == 0 or (status == NOT_FITTING and rows == 1):
            break
        if status != NOT_FITTING:
            raise SystemExit(f"exit status {status}: {' '.join(command)}")
        rows //= 2
    partial.replace(record)


def row(spec: str, pod: str) -> str:
    facts = json.loads(record_of(spec, pod).read_text())
    memory = f"{sum(facts['memory'].values()) / GIBIBYTE:.1f}" + ("" if facts["fits"] else " (does not fit)")
    mesh = " x ".join(f"{axis} {ways}" for axis, ways in facts["mesh"].items() if ways > 1)
    rows = facts["batch_size"] // (facts["mesh"]["data"] * facts["mesh"]["fsdp"] * facts["accumulation"])
    start = f"| `{spec}` | {mesh} | {rows} x {facts['accumulation']} | {memory} | {facts['model_flops'] / 1e12:.1f} "
    if "estimate" not in facts:
        return start + "| | | | | |"
    guess, sent = facts["estimate"], sum(each["bytes"] for each in facts["collectives"].values())
    between = lambda values, form: " to ".join(dict.fromkeys(form.format(value) for value in sorted(values)))
    return start + (
        f"| {facts['matmul_flops'] / 1e12:.1f} | {sent / 1e9:.1f} | {'from ' * bool(guess['kernels_without'])}{between(guess['step_seconds'], '{:.2f}')} "
        f"| {between([100 * share for share in guess['mfu']], '{:.0f}')} "
        f"| {between(guess['dollars_per_billion_tokens'], '{:.0f}')} |"
    )


def page() -> str:
    done = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]
    versions = sorted({", ".join(f"{name} {version}" for name, version in facts["versions"].items()) for facts in done})
    dates = sorted({facts["date"] for facts in done})
    total = len(tasks())
    lines = [
        "# Every config compiled for two pods, without one",
        "",
        "```",
        "nice python -m scripts.results.pods_table",
        "```",
        "",
        f"{len(done)} of {total} rows are compiled"
        + ("." if len(done) == total else "; the command goes on with the others (some minutes each on two cores)."),
        f"Compiled on {', '.join(dates)} with {'; '.join(versions)}.",
        "",
        "**Nothing here ran on a TPU.** Memory is what the TPU compiler assigned on each chip. Rows x turns: rows a device",
        "holds at once (at most 16, on v5e 8 from 440m; a power of two by what v5p needs, halved until they fit) and in how",
        "many turns it takes its share of the batch (256 rows; 512 of PHA, whose rows are of 1024 tokens, and of nanochat:d20).",
        "TFLOP are of a chip and step: those the model needs (`mesanet_jax/flops.py`) and those of the compiled matrix",
        "products, recomputation included. GB: results of the collectives of a chip and step. Seconds, MFU and dollars are",
        "an **estimate**: the cycles that the compiler's cost model expects, with the transfers between chips all hidden to",
        'none hidden; real steps may well be slower. Dollars by `mesanet_jax/aot/prices.toml`. "from": the compiler gives no cycles',
        "for Pallas kernels, so that the seconds are a lower bound (and MFU an upper one); the kernels' products are not in the",
        "compiled TFLOP either. `kernels/benchmarks/tpu_estimate.py` has what it expects of each kernel alone.",
        "",
        "`nanochat:d20` does not fit v5e-16 with one row a chip; with `--config.mesh.data=1 --config.mesh.fsdp=16` it takes",
        "2.7 GiB (compiled on 2026-11-30; 4.0 to 7.3 estimated seconds a step).",
    ]
    for pod, name in PODS.items():
        lines += [
            "",
            f"## {name} (`--topology={pod}`)",
            "",
            "| config | mesh | rows x turns | memory GiB | model TFLOP | compiled TFLOP | GB | seconds a step | MFU % | $ per billion tokens |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            *(row(spec, each) for spec, each in tasks() if each == pod and record_of(spec, each).exists()),
        ]
    return "\n".join([*lines, *WINDOWED_EINSUM]) + "\n"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--page", action="store_true", help="compile nothing")
    args = flags.parse_args()
    RECORDS.mkdir(parents=True, exist_ok=True)
    for spec, pod in tasks():
        if not args.page and not record_of(spec, pod).exists():
            compile_row(spec, pod)
            PAGE.write_text(page())
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
