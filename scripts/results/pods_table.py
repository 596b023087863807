"""Compiles every shipped config for two pods and writes docs/results/pods.md:

    nice python -m scripts.results.pods_table

A compilation takes minutes, almost all of them in XLA. Each leaves a record in docs/results/pods.jsonl, so running the
command again compiles only what is missing; delete a record to have it made again. v5p is compiled first: the rows that
fit v5e are estimated from what v5p needs, so that most rows of the table take one compilation. --page compiles nothing
and writes the page from the existing records. Needs the TPU compiler (`make .venv/tpu-compiler`).
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable

from mesanet_jax.aot.chips import CHIPS
from mesanet_jax.aot.memory import GIBIBYTE
from scripts.results import records
from scripts.results.parameter_table import shipped
from scripts.results.records import Record

ROOT = pathlib.Path(__file__).parents[2]

RECORDS = ROOT / "docs" / "results" / "pods.jsonl"
PAGE = RECORDS.with_suffix(".md")
FIRST = ("mesanet", "transformer")  # the families that are compiled first
PODS = {"v5e:4x4": "v5e-16", "v5p:4x4x4": "v5p-128"}
SMALL, LARGE = PODS  # by the memory of a chip
# The configs' own mesh, which is data parallel, unless v5e's 16 GiB have no room for all parameters and their moments.
MESH = {("v5e:4x4", "1b"): ("--config.mesh.data=1", "--config.mesh.fsdp=16")}
# The most rows that a chip of v5e is tried with, by size, the smaller sizes first.
ROWS = {"90m": 16, "125m": 16, "140m": 16, "180m": 16, "d12": 16, "440m": 8, "d20": 8, "1b": 8}
HBM_OF_SMALL, CHIPS_OF_SMALL = CHIPS["v5e"].hbm, 16
NOT_FITTING = 1  # the exit status of mesanet_jax.compile for a step that does not fit
Key = tuple[str, str]  # (spec, topology)

HEADING = """\
# Every shipped config, compiled for two TPU pods

```
nice python -m scripts.results.pods_table
```
"""
EXPLANATION = """\
**Nothing here ran on a TPU.** The TPU compiler compiled the whole training step of each config on a machine without
one. The columns are:

- *rows x turns*: the rows that a chip holds at once, and the number of turns (gradient accumulation) in which it
  takes its share of the batch. The batch is {batches}. A chip holds at most 16 rows,
  on v5e at most 8 from 440m on; on v5e the number is a power of two estimated from what v5p needs, and halved until
  the step fits.
- *memory*: what the compiler assigned on each chip.
- *model TFLOP*: what the model needs per chip and step (`mesanet_jax/flops.py`); *compiled TFLOP*: the matrix products
  of the compiled program, including recomputation, without those inside Pallas kernels.
- *collectives GB*: the size of the results of all collectives per chip and step.
- *seconds per step*, *MFU* and *$ per billion tokens* are an **estimate**: the cycles that the compiler's cost model
  expects, with the transfers between chips all hidden, to the same with none hidden. Real steps may well be slower.
  Where "from" stands before the seconds, they are a lower bound (and MFU is an upper bound), because the compiler
  gives no cycles for Pallas kernels; `kernels/benchmarks/tpu_estimate.py` prints an estimate for each kernel alone. The
  prices are those of `mesanet_jax/aot/prices.toml`.
"""
NOTES = """
## Notes

These were compiled by hand on 2026-11-30, with other settings than the table, so they have no record in `pods.jsonl`.

**`nanochat:d20` on v5e-16** fits with its parameters split over the chips: with
`--config.mesh.data=1 --config.mesh.fsdp=16` it takes 2.7 GiB (4.0 to 7.3 estimated seconds per step).

**Products in pieces.** By default XLA turns products with split weights into loops ("windowed einsum"). The project
turns this off (`COMPILER_OPTIONS` in `mesanet_jax/training/step.py`), because the loops are slower by the compiler's
own estimate, here for `transformer:140m` on v5e-16 with all 16 chips on the fsdp axis:

```
python -m mesanet_jax.compile --config=configs/transformer.py:140m --topology=v5e:4x4 \\
    --config.mesh.data=1 --config.mesh.fsdp=16
```

| | estimated seconds per step | temporaries GB | compiled TFLOP | collective-permutes per step |
| --- | ---: | ---: | ---: | ---: |
| XLA's default (`COMPILER_OPTIONS` emptied): products become loops | 3.02 | 8.1 | 75.1 | 10,425 |
| as shipped: weights are gathered whole | 1.19 | 4.7 | 50.5 | 0 |
"""
COLUMNS = """\
| config | mesh | rows x turns | memory GiB | model TFLOP | compiled TFLOP | collectives GB | seconds per step | MFU % \
| $ per billion tokens |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def tasks() -> list[Key]:
    """Returns (spec, topology) of every row: smaller models first, and `FIRST` before other families of the size."""
    specs = sorted(shipped(ROWS).items(), key=lambda item: (list(ROWS).index(item[1]), not item[0].startswith(FIRST)))
    return [(spec, pod) for spec, _ in specs for pod in (LARGE, SMALL)]


def load() -> dict[Key, Record]:
    """Returns the records that exist."""
    return {(record["spec"], record["topology"]): record for record in records.read(RECORDS)}


def save(done: dict[Key, Record]) -> None:
    """Writes the records, sorted."""
    records.write(RECORDS, [done[key] for key in sorted(done)])


def estimated_rows(large: Record, size: str) -> int:
    """Returns the rows, a power of two, that a chip of v5e should hold, by what v5p needs.

    `compile_row` halves them if they are too many. Gradients need the same memory whatever the rows; everything else
    among the temporaries grows with them.
    """
    held = {kind: large["memory"][kind] for kind in ("parameters", "optimizer state")}
    split = 1 if (SMALL, size) not in MESH else CHIPS_OF_SMALL
    row = (large["memory"]["temporaries"] - held["parameters"]) / (large["batch_size"] / large["chips"])
    free = HBM_OF_SMALL * GIBIBYTE - (sum(held.values()) + held["parameters"]) / split
    return next((rows for rows in (16, 8, 4, 2) if rows <= ROWS[size] and rows * row <= free), 1)


def compile_row(spec: str, pod: str, large: Record | None) -> Record:
    """Compiles a config with as many rows per chip as fit; `large` is its record on v5p."""
    family, _, variant = spec.partition(":")
    size = variant.partition("-")[0]
    rows = 16 if large is None else estimated_rows(large, size)
    with tempfile.TemporaryDirectory() as folder:
        facts = pathlib.Path(folder) / "facts.json"
        while True:
            command = [
                *(sys.executable, "-m", "mesanet_jax.compile", f"--config=configs/{family}.py:{variant}"),
                *(f"--topology={pod}", f"--json={facts}", f"--config.train.rows_per_device={rows}"),
                *MESH.get((pod, size), ()),
            ]
            status = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
            if status == 0 or (status == NOT_FITTING and rows == 1):
                return json.loads(facts.read_text()) | {"spec": spec}
            if status != NOT_FITTING:
                raise SystemExit(f"exit status {status}: {' '.join(command)}")
            rows //= 2


def row(facts: Record) -> str:
    """Returns a record as a row of the table."""
    memory = f"{sum(facts['memory'].values()) / GIBIBYTE:.1f}" + ("" if facts["fits"] else " (does not fit)")
    mesh = " x ".join(f"{axis} {ways}" for axis, ways in facts["mesh"].items() if ways > 1)
    rows = facts["batch_size"] // (facts["mesh"]["data"] * facts["mesh"]["fsdp"] * facts["accumulation"])
    cells = [f"`{facts['spec']}`", mesh, f"{rows} x {facts['accumulation']}", memory, _tera(facts["model_flops"])]
    if "estimate" in facts:
        estimate, sent = facts["estimate"], sum(each["bytes"] for each in facts["collectives"].values())
        bound = "from " if estimate["kernels_without"] else ""
        cells += [
            _tera(facts["matmul_flops"]),
            f"{sent / 1e9:.1f}",
            bound + _range(estimate["step_seconds"], "{:.2f}"),
            _range([100 * share for share in estimate["mfu"]], "{:.0f}"),
            _range(estimate["dollars_per_billion_tokens"], "{:.0f}"),
        ]
    else:
        cells += [""] * 5
    return f"| {' | '.join(cells)} |"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.1f}"


def _range(values: Iterable[float], form: str) -> str:
    return " to ".join(dict.fromkeys(form.format(value) for value in sorted(values)))


def _batches(done: dict[Key, Record]) -> str:
    """Returns the batch sizes in words; families are named as a whole where all of their configs have the same."""
    sizes = {spec: record["batch_size"] for (spec, _), record in done.items()}
    usual = max(set(sizes.values()), key=list(sizes.values()).count)
    text = f"{usual} rows"
    for size in sorted(set(sizes.values()) - {usual}):
        names = set()
        for spec in (spec for spec, found in sizes.items() if found == size):
            family = spec.partition(":")[0]
            whole = all(found == size for other, found in sizes.items() if other.partition(":")[0] == family)
            names.add(f"`{family}`" if whole else f"`{spec}`")
        text += f" ({size} for {' and '.join(sorted(names))})"
    return text


def page() -> str:
    """Returns the page of the records that exist."""
    done = load()
    versions = sorted(
        {", ".join(f"{name} {version}" for name, version in r["versions"].items()) for r in done.values()}
    )
    dates = sorted({record["date"] for record in done.values()})
    total = len(tasks())
    rest = "" if len(done) == total else " The command continues with the others (some minutes each on two cores)."
    large = [
        f"`{spec}` does not fit {PODS[pod]} with its own mesh, even with one row per chip."
        for (spec, pod), record in sorted(done.items())
        if not record["fits"]
    ]
    lines = [
        HEADING,
        f"{len(done)} of {total} rows are compiled.{rest}",
        f"Compiled on {', '.join(dates)} with {'; '.join(versions)}.",
        "",
        EXPLANATION.format(batches=_batches(done)),
        *large,
    ]
    for pod, name in PODS.items():
        rows = [row(done[key]) for key in tasks() if key[1] == pod and key in done]
        lines += ["", f"## {name} (`--topology={pod}`)", "", COLUMNS, *rows]
    return "\n".join(lines) + "\n" + NOTES


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--page", action="store_true", help="compile nothing; write the page from the existing records")
    args = flags.parse_args()
    for key in tasks():
        done = load()
        if not args.page and key not in done:
            spec, pod = key
            save(done | {key: compile_row(spec, pod, done[spec, LARGE] if pod == SMALL else None)})
            PAGE.write_text(page())
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
