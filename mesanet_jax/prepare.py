"""Turns text corpora into packed rows.

python -m mesanet_jax.prepare --config=configs/prepare.py:demo --config.output=DIR

Rerunning the same command goes on where it stopped. Neither the number of workers nor interruptions change the result.
"""

import functools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from mesanet_jax import cli, schema
from mesanet_jax.data import manifest, pack_unit, plan, pool, settings, tokenizer_training
from mesanet_jax.data.files import Directory
from mesanet_jax.data.hashing import sha256_of_json
from mesanet_jax.data.pack_unit import Job
from mesanet_jax.data.plan import Unit
from mesanet_jax.data.problems import Problems
from mesanet_jax.data.schema import SCHEMA
from mesanet_jax.schema import Config

Records = Iterator[tuple[int, dict[str, Any]]]  # a unit's index and what it gave


def prepare(config: Config) -> dict[str, Any]:
    """Runs a preparation to its end and returns its manifest. Raises UserError for what the user can mend."""
    settings.check(config)
    sources = settings.sources(config)
    chosen = settings.settings(config, sources)
    directory = Directory(config.output)
    directory.create()
    settings.claim(directory, chosen)
    if directory.read(manifest.NAME) is not None:
        print(f"{config.output}: already prepared")
        return manifest.read(directory)

    tokens = tokenizer_training.provide(config, sources, directory)
    job = _job(config, sha256_of_json([chosen, tokens.hash, manifest.COUNTS]))
    units = plan.units(
        sources,
        format=config.format,
        text_field=config.text_field,
        document=config.document,
        unit_mb=config.unit_mb,
    )
    records: dict[int, dict[str, Any]] = {}
    problems = Problems(on_error=config.on_error, max_errors=config.max_errors)
    with _Bar(len(units)) as bar:
        work = _limited if config.limit_documents else _all
        for index, record in work(config, job, units, bar):
            records[index] = record
            problems.merge(record["problems"])
            bar.unit_done()

    in_order = [record for _, record in sorted(records.items())]
    done = manifest.build(in_order, config=config, settings=chosen, tokens=tokens)
    directory.write(manifest.NAME, manifest.encode(done))
    _print_summary(config.output, done)
    return done


def _job(config: Config, settings_hash: str) -> Job:
    shared = {name: config[name] for name in Job.__dataclass_fields__ if name in SCHEMA}
    return Job(settings_hash=settings_hash, tokenizer_kind=config.tokenizer.kind, **shared)


def _all(config: Config, job: Job, units: list[Unit], bar: "_Bar") -> Records:
    """Every unit: those an earlier run finished, then the others, by a pool, as they finish."""
    sizes = Directory(job.output).sizes()
    todo = []
    for unit in units:
        record = pack_unit.finished(job, unit, sizes=sizes)
        if record:
            yield unit.index, record
        else:
            todo.append(unit)
    task = functools.partial(_indexed, job)
    workers = config.workers or len(os.sched_getaffinity(0))
    if workers == 1:
        yield from (task(unit, bar.report) for unit in todo)
    else:
        yield from pool.run(task, todo, workers=workers, report=bar.report)


def _indexed(job: Job, unit: Unit, report: pool.Report) -> tuple[int, dict[str, Any]]:
    return unit.index, pack_unit.pack_unit(job, unit, report)


def _limited(config: Config, job: Job, units: list[Unit], bar: "_Bar") -> Records:
    """The units of the first `limit_documents` training documents, one after the other; other splits whole."""
    left = config.limit_documents
    for unit in units:
        limit = left if unit.split == "train" else None
        if limit == 0:
            continue
        record = pack_unit.finished(job, unit, sizes=Directory(job.output).sizes(), limit=limit)
        record = record or pack_unit.pack_unit(job, unit, bar.report, limit=limit)
        if unit.split == "train":
            left -= sum(split["documents"] for split in record["splits"].values())
        yield unit.index, record


class _Bar:
    """The progress bar: units done, documents, megabytes a second."""

    def __init__(self, units: int):
        self._bar = tqdm(total=units, unit="unit", disable=None)
        self._documents, self._bytes, self._begin = 0, 0, time.monotonic()

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *error) -> None:
        self._bar.close()

    def report(self, documents: int, size: int) -> None:
        self._documents += documents
        self._bytes += size
        speed = self._bytes / 1e6 / (time.monotonic() - self._begin)
        self._bar.set_postfix_str(f"{self._documents:,} documents, {self._bytes / 1e6:,.0f} MB, {speed:.1f} MB/s")

    def unit_done(self) -> None:
        self._bar.update()


def _print_summary(output: str, done: dict[str, Any]) -> None:
    for split, record in done["splits"].items():
        print(
            f"{output}: {split}: {record['documents']:,} documents, {record['tokens']:,} tokens of "
            f"{record['text_bytes'] / record['tokens']:.2f} bytes, {record['rows']:,} rows of {done['seq_len']} + 1"
        )
    for kind, count in done["problems"]["counts"].items():
        print(f"{output}: passed over: {count} x {kind}")
    for place in done["problems"]["places"]:
        print(f"  {place}")


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument("--config", default="configs/prepare.py:demo", help="configs/prepare.py:PRESET")
    flags.add_argument("--help-config", action="store_true", help="list the fields of the config and exit")
    args, overrides = cli.parse(flags, argv)
    if args.help_config:
        print(schema.describe(SCHEMA))
        return 0
    config = schema.load_file(args.config)
    cli.apply_overrides(config, SCHEMA, overrides)
    try:
        prepare(config)
    except KeyboardInterrupt:
        print(f"interrupted; finished units are kept in {config.output}: rerun to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    cli.run(main)
