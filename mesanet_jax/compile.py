"""Compiles a run's training step for a pod, without one: does it fit, what does it compute and send, what might it cost?

python -m mesanet_jax.compile --config=configs/mesanet.py:1b --topology=v5p:4x4x4 --config.mesh.fsdp=4

Exit status: 0 it fits, 1 it does not, 2 a mistake in the command.
"""

import json
import pathlib

import jax

from mesanet_jax import cli
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax.aot import executable, memory, price, report, suggest, topology
from mesanet_jax.aot.build import Build, build
from mesanet_jax.errors import UserError
from mesanet_jax.formatting import duration


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument("--config", required=True, help="config file and size, as in configs/mesanet.py:140m")
    flags.add_argument("--topology", required=True, help="chip and shape of a slice, as in v5p:8x8x8; cpu:8 to try")
    flags.add_argument("--slices", type=int, default=1, help="slices that the data axis spans")
    flags.add_argument("--suggest", action="store_true", help="look for the rows a device and the remat policy to use")
    flags.add_argument("--prices", type=pathlib.Path, default=price.PRICES, help="table of dollars a chip and hour")
    flags.add_argument("--json", type=pathlib.Path, help="file for all that is printed, in bytes and seconds")
    flags.add_argument("--save", type=pathlib.Path, help="file for the compiled step: train's config.train.executable")
    args, overrides = cli.parse(flags, argv)
    jax.config.update("jax_platforms", "cpu")  # no device is needed, not even where there are some
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


def suggestion(config, where: topology.Topology, built: Build, facts: dict) -> dict:
    """Compiles candidates, prints each and the best: {"tried": [...], "best": {...} or None, "fastest": likewise}.

    `built` and `facts` are what `config` itself came to.
    """
    share = config.data.batch_size // mesh_lib.batch_shards(built.program.mesh)
    seconds = []

    def attempt(remat: str, rows: int) -> suggest.Candidate:
        trial = config.copy_and_resolve_references()
        trial.model.remat, trial.train.rows_per_device = remat, rows
        other = build(trial, where)
        seconds.append(other.seconds)
        told = report.record(other, None)
        print(report.line(told), flush=True)
        return suggest.Candidate(remat, rows, told["fits"], report.slowest(told))

    print(f"\n{report.line(facts)}", flush=True)
    rows = share // built.program.accumulation
    own = suggest.Candidate(config.model.remat, rows, facts["fits"], report.slowest(facts))
    tried = suggest.search(share, attempt, first=own)
    best, fastest = suggest.best(tried), suggest.fastest(tried)
    print(f"{len(seconds)} more compilations, {duration(sum(seconds))}")
    if best is None:
        print("nothing fits: a larger config.mesh.fsdp or tensor splits the parameters over more chips")
    else:
        print(f"suggested: {_flags(best)}")
    if fastest not in (None, best):
        print(f"the fastest of these by the estimate: {_flags(fastest)} ({fastest.seconds:#.3g} s a step)")
    as_dict = lambda candidate: None if candidate is None else vars(candidate)
    return {"tried": [vars(each) for each in tried], "best": as_dict(best), "fastest": as_dict(fastest)}


def _flags(candidate: suggest.Candidate) -> str:
    return f"--config.model.remat={candidate.remat} --config.train.rows_per_device={candidate.rows}"


def write_json(path: pathlib.Path, facts: dict) -> None:
    try:
        path.write_text(json.dumps(facts, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json={path}: {error.strerror or error}") from error


if __name__ == "__main__":
    cli.run(main)
