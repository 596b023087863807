"""Compiles a run's training step for a TPU pod on a machine without one:

    python -m mesanet_jax.compile --config=configs/mesanet.py:1b --topology=v5p:4x4x4 --config.mesh.fsdp=4

Prints whether the step fits the chips' memory, its FLOPs and its transfers, and an estimate of its speed and cost.
docs/ahead-of-time.md explains the output.

Exit status: 0 if the step fits, 1 if it does not fit, 2 for a mistake in the command.
"""

import json
import pathlib
from typing import Any

import jax

from mesanet_jax import cli
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax.aot import executable, memory, price, report, suggest, topology
from mesanet_jax.aot.build import Build, build
from mesanet_jax.errors import UserError
from mesanet_jax.formatting import duration
from mesanet_jax.schema import Config


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument("--config", required=True, help="config file and size, such as configs/mesanet.py:140m")
    flags.add_argument("--topology", required=True, help="chip and shape of a slice, such as v5p:8x8x8; cpu:8 to try")
    flags.add_argument("--slices", type=int, default=1, help="the number of slices, over which the data axis is split")
    flags.add_argument("--suggest", action="store_true", help="look for the best rows per device and remat policy")
    flags.add_argument("--prices", type=pathlib.Path, default=price.PRICES, help="a table of dollars per chip and hour")
    flags.add_argument("--json", type=pathlib.Path, help="file for everything that is printed, in bytes and seconds")
    flags.add_argument("--save", type=pathlib.Path, help="file for the compiled step, for config.train.executable")
    args, overrides = cli.parse(flags, argv)
    jax.config.update("jax_platforms", "cpu")  # no accelerator is needed, even if there is one
    config = config_lib.load(args.config, overrides)
    where = topology.make(args.topology, slices=args.slices)
    cost = price.load(args.prices, where.chip_name)

    built = build(config, where)
    facts = report.record(built, cost)
    print(report.page(facts), flush=True)
    if args.save is not None and built.executable is not None:
        executable.save(args.save, built.executable, config, built.program.mesh)
        print(f"\nsaved: train with --config.train.executable={args.save}")
    if args.suggest:
        facts["suggestion"] = suggestion(config, where, built, facts)
    if args.json is not None:
        write_json(args.json, facts)
    return 0 if memory.fits(built) else 1


def suggestion(config: Config, where: topology.Topology, built: Build, facts: report.Facts) -> dict[str, Any]:
    """Compiles candidates and prints each of them and the best.

    Args:
      built: the build of `config` itself.
      facts: its record.

    Returns:
      {"tried": [...], "best": {...} or None, "fastest": {...} or None}.
    """
    share = config.data.batch_size // mesh_lib.batch_shards(built.program.mesh)
    seconds = []

    def attempt(remat: str, rows: int) -> suggest.Candidate:
        trial = config.copy_and_resolve_references()
        trial.model.remat, trial.train.rows_per_device = remat, rows
        other = build(trial, where)
        seconds.append(other.seconds)
        other_facts = report.record(other, None)
        print(report.line(other_facts), flush=True)
        return suggest.Candidate(remat, rows, other_facts["fits"], report.slowest(other_facts))

    print(f"\n{report.line(facts)}", flush=True)
    rows = share // built.program.accumulation
    own = suggest.Candidate(config.model.remat, rows, facts["fits"], report.slowest(facts))
    tried = suggest.search(share, attempt, first=own)
    best, fastest = suggest.best(tried), suggest.fastest(tried)
    print(f"{len(seconds)} more compilations, {duration(sum(seconds))}")
    if best is None:
        print("nothing fits; a larger config.mesh.fsdp or config.mesh.tensor splits the parameters over more chips")
    else:
        print(f"suggested: {_flags(best)}")
    if fastest is not None and fastest != best:
        print(f"fastest by the estimate: {_flags(fastest)} ({fastest.seconds:#.3g} s per step)")
    chosen = {"best": best, "fastest": fastest}
    return {"tried": [vars(each) for each in tried]} | {name: each and vars(each) for name, each in chosen.items()}


def _flags(candidate: suggest.Candidate) -> str:
    return f"--config.model.remat={candidate.remat} --config.train.rows_per_device={candidate.rows}"


def write_json(path: pathlib.Path, facts: report.Facts) -> None:
    """Writes the record for --json."""
    try:
        path.write_text(json.dumps(facts, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json={path}: {error.strerror or error}") from error


if __name__ == "__main__":
    cli.run(main)
