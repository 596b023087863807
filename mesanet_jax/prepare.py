"""Prepares a corpus for training: tokenizes texts and packs them into rows.

    python -m mesanet_jax.prepare --config=configs/prepare.py:demo --config.output=DIR

An interrupted preparation resumes if the same command is given again. The result depends neither on interruptions nor
on the number of workers. docs/data.md describes inputs, presets and results; --help-config lists all fields.
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

Records = Iterator[tuple[int, dict[str, Any]]]  # the index of a unit, and its record


def prepare(config: Config) -> dict[str, Any]:
    """Runs a preparation, or resumes it, and returns its manifest.

    Raises:
      UserError: the config or the input is wrong, or the output cannot be written.
    """
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
    """Yields the units that an earlier run finished, then the others as the workers finish them."""
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
    """Yields the units of the first `limit_documents` training documents, in order, and all units of other splits."""
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
    """A progress bar that shows the number of finished units and documents, and megabytes per second."""

    def __init__(self, units: int):
        self._bar = tqdm(total=units, unit="unit", disable=None)
        self._documents, self._bytes, self._begin = 0, 0, time.monotonic()

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def report(self, documents: int, size: int) -> None:
        """Adds documents and bytes of text that have been processed."""
        self._documents += documents
        self._bytes += size
        speed = self._bytes / 1e6 / (time.monotonic() - self._begin)
        self._bar.set_postfix_str(f"{self._documents:,} documents, {self._bytes / 1e6:,.0f} MB, {speed:.1f} MB/s")

    def unit_done(self) -> None:
        """Counts a finished unit."""
        self._bar.update()


def _print_summary(output: str, done: dict[str, Any]) -> None:
    for split, record in done["splits"].items():
        bytes_per_token = record["text_bytes"] / record["tokens"]
        print(
            f"{output}: {split}: {record['documents']:,} documents, {record['tokens']:,} tokens"
            f" ({bytes_per_token:.2f} bytes per token), {record['rows']:,} rows of {done['seq_len'] + 1} tokens"
        )
    for kind, count in done["problems"]["counts"].items():
        print(f"{output}: skipped: {kind}: {count}")
    for place in done["problems"]["places"]:
        print(f"  {place}")


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--config",
        default="configs/prepare.py:demo",
        help="the preset, as configs/prepare.py:NAME (default: configs/prepare.py:demo)",
    )
    flags.add_argument(
        "--help-config", action="store_true", help="print the fields of the config with their meaning, and exit"
    )
    args, overrides = cli.parse(flags, argv)
    if args.help_config:
        print(schema.describe(SCHEMA))
        return 0
    config = schema.load_file(args.config)
    cli.apply_overrides(config, SCHEMA, overrides)
    try:
        prepare(config)
    except KeyboardInterrupt:
        print(
            f"interrupted; finished units are kept in {config.output}; to resume, run the same command again",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    cli.run(main)
