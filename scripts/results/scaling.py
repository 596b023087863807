"""Measures whole training steps on one accelerator and on all accelerators of this host: speed, losses and memory.

    python -m scripts.results.scaling --configs=configs/mesanet.py:440m,configs/transformer.py:1b --data=DATA --out=DIR

This is weak scaling: every accelerator holds --rows rows at once, and one accelerator alone takes the same global batch
in as many turns as there are accelerators in all. All runs of a config begin with the same parameters and read the same
rows of DATA (written by mesanet_jax.prepare), so their losses can be compared step by step.

Every measurement has a process of its own, because the peak of memory is counted per process, and a record in
DIR/scaling.jsonl; running the command again measures what is missing. At the end it writes DIR/scaling.md and
DIR/scaling.png. --config.FIELD=VALUE sets a field of all configs.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import numpy as np

from mesanet_jax import cli, models
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax.data.loader import Batches
from mesanet_jax.reporting import plots
from mesanet_jax.reporting.tables import markdown_table
from mesanet_jax.schema import Config
from mesanet_jax.training import step as step_lib
from mesanet_jax.training.data import open_data
from scripts.results import records
from scripts.results.records import Record

UNTIMED = 3  # steps that are not timed; the first one compiles
ALONE = "one"  # the mesh of a single accelerator


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument("--configs", required=True, help="the configs to measure")
    flags.add_argument("--data", required=True, help="a directory written by mesanet_jax.prepare")
    flags.add_argument("--out", required=True, type=pathlib.Path, help="directory of the measurements")
    flags.add_argument("--rows", type=int, default=16, help="rows per device that it holds at once")
    flags.add_argument("--steps", type=int, default=13, help=f"updates per run; the first {UNTIMED} are not timed")
    flags.add_argument("--devices", type=int, help="accelerators to use (default: all)")
    flags.add_argument("--measure", help="(for a child process) the mesh that it measures")
    args, overrides = cli.parse(flags, argv)
    specs = args.configs.split(",")
    if args.measure:
        config = config_lib.load(specs[0], overrides | {"data.path": args.data})
        print(json.dumps(measure(config, args)))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    args.devices = args.devices or count_devices()
    path = args.out / "scaling.jsonl"
    values = cli.override_flags(overrides)
    good = True
    for spec, mesh in itertools.product(specs, meshes(args.devices)):
        key = {"config": spec, "mesh": mesh, "devices": args.devices, "rows": args.rows, "overrides": overrides}
        if records.has(path, key):
            continue
        child = [f"--configs={spec}", f"--data={args.data}", f"--out={args.out}", f"--measure={mesh}"]
        child += [f"--rows={args.rows}", f"--steps={args.steps}", f"--devices={args.devices}", *values]
        status, result = records.measured_by("scripts.results.scaling", child)
        good &= status == 0
        if status == 0:
            records.append(path, key | result)
            print(spec, mesh, f"{result['tokens_per_second']:,.0f} tokens/s", result["losses"], flush=True)
        else:
            print(f"{spec} {mesh}: ended with exit status {status}", file=sys.stderr, flush=True)
    if found := records.read(path):
        report(args.out, found)
    return 0 if good else 1


def count_devices() -> int:
    """Counts the accelerators in a child process, so that this process reserves none of their memory."""
    code = "import jax; print(jax.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout)


def meshes(devices: int) -> dict[str, tuple[int, ...]]:
    """Returns the meshes to measure: {name: (data, fsdp, tensor)}."""
    found = {ALONE: (1, 1, 1), f"data {devices}": (devices, 1, 1), f"fsdp {devices}": (1, devices, 1)}
    if devices % 2 == 0:
        rest = devices // 2
        found["tensor 2" + (f" x fsdp {rest}" if rest > 1 else "")] = (1, rest, 2)
    return found


def measure(config: Config, args: argparse.Namespace) -> Record:
    """Measures tokens/s of all devices together (median), the losses, and the peak of memory of the fullest device."""
    sizes = dict(zip(mesh_lib.AXES, meshes(args.devices)[args.measure]))
    devices = jax.devices()[: 1 if args.measure == ALONE else args.devices]
    config.data.batch_size, config.train.rows_per_device = args.rows * args.devices, args.rows
    rows, _ = open_data(config)
    mesh = mesh_lib.make_mesh(tuple(sizes.get(axis, 1) for axis in mesh_lib.AXES), devices)
    program = step_lib.compile_program(config, models.build(config.model), mesh)
    batches = Batches(rows, config.data.batch_size, seed=config.data.seed, steps=args.steps)
    losses, seconds = [], []
    with mesh_lib.use_mesh(mesh):
        state = program.init(jax.random.key(config.seed))
        for batch in mesh_lib.placed(batches.iterate(0), mesh):
            began = time.monotonic()
            state, metrics = program.train(state, batch)
            losses.append(round(float(metrics["loss"]), 5))
            seconds.append(time.monotonic() - began)
    tokens = config.data.batch_size * config.data.seq_len
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", np.nan) for device in devices]
    return {
        "tokens_per_second": tokens / statistics.median(seconds[UNTIMED:]),
        "used": len(devices),
        "losses": losses,
        "memory_gb": max(peaks) / 1e9,
        "turns": program.accumulation,
        "device": devices[0].device_kind,
    }


def report(out: pathlib.Path, found: list[Record]) -> None:
    """Writes `scaling.{md,png}`. Efficiency: tokens/s per device, relative to one device alone."""
    alone = {record["config"]: record for record in found if record["mesh"] == ALONE}
    rows, bars = [], {}
    for record in found:
        base = alone.get(record["config"])
        each = record["tokens_per_second"] / record["used"]
        efficiency = 100 * each / base["tokens_per_second"] if base else np.nan
        apart = max(map(abs, np.subtract(record["losses"], base["losses"]))) if base else np.nan
        name = records.short_name(record["config"])
        bars.setdefault(name, {})[record["mesh"]] = efficiency
        cells = {
            "config": f"`{name}`",
            "mesh": record["mesh"],
            "turns": f"{record['turns']}",
            "tokens / s": f"{record['tokens_per_second']:,.0f}",
            "tokens / s per device": f"{each:,.0f}",
            "efficiency": f"{efficiency:.1f} %",
            "peak GB per device": f"{record['memory_gb']:.1f}",
            "last loss": f"{record['losses'][-1]:.4f}",
            "largest difference in loss": f"{apart:.4f}",
        }
        rows.append(cells)
    header = list(rows[0])
    table = markdown_table(header, [[cells[name] for name in header] for cells in rows])
    (out / "scaling.md").write_text(table + "\n")
    draw(out / "scaling.png", bars)
    print((out / "scaling.md").read_text())


def draw(png: pathlib.Path, bars: dict[str, dict[str, float]]) -> None:
    """Draws the efficiency of each mesh, as one group of bars for each config."""
    plt = plots.pyplot()
    with plt.rc_context(plots.STYLE):
        figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
        names = list(dict.fromkeys(mesh for by_mesh in bars.values() for mesh in by_mesh))
        width = 0.8 / len(names)
        for index, (mesh, colour) in enumerate(zip(names, itertools.cycle(plots.COLOURS))):
            heights = [by_mesh.get(mesh, np.nan) for by_mesh in bars.values()]
            axis.bar(np.arange(len(bars)) + index * width, heights, width * 0.9, color=colour, label=mesh)
        axis.set_xticks(np.arange(len(bars)) + 0.4 - width / 2, list(bars))
        axis.set(ylabel="tokens/s per device, % of one device alone", ylim=(0, None))
        figure.legend(loc="outside right upper")
        plots.save(figure, png)


if __name__ == "__main__":
    cli.run(main)
