"""Measures speed and memory against the length of a text, for several configs: training, prefill and decoding.

    python -m scripts.results.efficiency --configs=configs/pha.py:180m,configs/pha.py:180m-attention_only --out=DIR \
        --lengths=2048,4096,8192,16384 --tokens=32768

Uses random tokens and weights on one device. A training step has --tokens tokens in rows of the length. Prefill and
decoding are those of mesanet_jax.generate, for one sequence: chunks of 512 tokens, then single tokens.

Every measurement has a process of its own, because the peak of memory is counted per process, and a record in
DIR/efficiency.jsonl. Running the command again measures what is missing; what failed (by a lack of memory, for example)
is not repeated. At the end it writes DIR/efficiency.md and, for several lengths, DIR/efficiency.png, which compare all
configs with the last one. --config.FIELD=VALUE sets a field of all configs.
"""

import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from mesanet_jax import cli, models
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax.inference.sampler import Sampler, state_bytes
from mesanet_jax.inference.sampling import Sampling
from mesanet_jax.reporting import plots
from mesanet_jax.reporting.tables import markdown_table
from mesanet_jax.schema import Config
from mesanet_jax.training import step as step_lib
from scripts.results import records
from scripts.results.records import Record

CHUNK = 512  # tokens of a prefill chunk
REPEATS = 10  # training steps, and prefills; the median is reported
DECODED = 64  # tokens


def main(argv: list[str]) -> None:
    flags = cli.parser(__doc__)
    flags.add_argument("--configs", required=True, help="the configs to measure, the baseline last")
    flags.add_argument("--out", required=True, type=pathlib.Path, help="directory of the measurements")
    flags.add_argument("--lengths", default="2048,4096,8192,16384", help="tokens per text")
    flags.add_argument("--tokens", type=int, default=32_768, help="tokens per training step")
    flags.add_argument("--kinds", default="training,inference", help="what to measure (default: both)")
    flags.add_argument("--measure", help="(for a child process) what it measures, such as training:2048")
    args, overrides = cli.parse(flags, argv)
    specs, kinds = args.configs.split(","), args.kinds.split(",")
    lengths = [int(length) for length in args.lengths.split(",")]
    if args.measure:
        kind, length = args.measure.split(":")
        print(json.dumps(MEASURES[kind](config_lib.load(specs[0], overrides), int(length), args.tokens)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "efficiency.jsonl"
    values = cli.override_flags(overrides)
    for spec, length, kind in itertools.product(specs, lengths, kinds):
        key = {"config": spec, "length": length, "kind": kind, "tokens": args.tokens, "overrides": overrides}
        if not records.has(path, key):
            child = [f"--configs={spec}", f"--out={args.out}", f"--measure={kind}:{length}", f"--tokens={args.tokens}"]
            status, result = records.measured_by("scripts.results.efficiency", [*child, *values])
            result = {"failed": status} if status else result
            records.append(path, key | result)
            print(spec, kind, length, result, flush=True)
    report(args.out, specs, lengths, kinds)


def train(config: Config, length: int, tokens: int) -> Record:
    """Measures tokens/s of a training step on `tokens` tokens, and the peak of memory."""
    config.data.seq_len, config.data.batch_size = length, max(1, tokens // length)
    config.train.rows_per_device = config.data.batch_size
    mesh, model = mesh_lib.make_mesh((1, 1, 1), jax.devices()[:1]), models.build(config.model)
    program = step_lib.compile_program(config, model, mesh)
    shape = (config.data.batch_size, length)
    with mesh_lib.use_mesh(mesh):
        state = program.init(jax.random.key(0))
        batch = mesh_lib.place_batch(random_batch(config, shape), mesh)
        seconds = []
        for _ in range(REPEATS + 2):  # the first compiles
            began = time.monotonic()
            state, metrics = program.train(state, batch)
            float(metrics["loss"])
            seconds.append(time.monotonic() - began)
    return {"tokens_per_second": np.prod(shape) / statistics.median(seconds[2:])} | memory()


def inference(config: Config, length: int, _: int) -> Record:
    """Measures tokens/s of prefill and its peak of memory, and tokens/s of decoding and the bytes of its state."""
    model = models.build(config.model)
    params = jax.jit(model.init)(jax.random.key(0))
    prompt = np.random.default_rng(0).integers(0, config.model.vocab_size, length).tolist()
    sampler, seconds, after = Sampler(model), [], None
    for _ in range(REPEATS + 1):  # the first compiles
        began = time.monotonic()
        after = jax.block_until_ready(sampler.prefill(params, prompt, max_length=length + DECODED + 2, chunk=CHUNK))
        seconds.append(time.monotonic() - began)
    assert after is not None
    read = {"tokens_per_second": length / statistics.median(seconds[1:])} | memory()
    tokens = sampler.tokens(params, *after, key=jax.random.key(0), sampling=Sampling(temperature=0.0))
    list(itertools.islice(tokens, 2))
    began = time.monotonic()
    list(itertools.islice(tokens, DECODED))
    written = DECODED / (time.monotonic() - began)
    return read | {"written_per_second": written, "state_bytes": state_bytes(after[1])}


MEASURES: dict[str, Callable[[Config, int, int], Record]] = {"training": train, "inference": inference}


def random_batch(config: Config, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens in which each row is one document."""
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).astype(np.int32)
    segments, weights = np.zeros(shape, np.int32), np.ones(shape, np.float32)
    return {"inputs": tokens, "targets": tokens, "segment_ids": segments, "weights": weights}


def memory() -> dict[str, float]:
    """Returns the peak of memory in GB, if the device reports it."""
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {} if peak is None else {"memory_gb": peak / 1e9}


def report(out: pathlib.Path, specs: list[str], lengths: list[int], kinds: list[str]) -> None:
    """Writes the table and the plot, `efficiency.{md,png}`, from the newest measurements."""
    measured = records.read(out / "efficiency.jsonl")
    found = {(record["config"], record["length"], record["kind"]): record for record in measured}
    rows = []
    for kind, length, spec in itertools.product(kinds, lengths, specs):
        one, base = found[spec, length, kind], found[specs[-1], length, kind]
        cells = [cell(one, base, name, form) for name, form in COLUMNS.items()]
        rows.append((kind, f"{length}", records.short_name(spec), *cells))
    header = ("what", "length", "config", "tokens read / s", "peak memory (GB)", "tokens written / s", "state (MB)")
    (out / "efficiency.md").write_text(markdown_table(header, rows) + "\n")
    panels = {panel: curves(found, panel, specs, lengths) for panel in PANELS if panel[0] in kinds}
    known = {panel: values for panel, values in panels.items() if np.isfinite([*values.values()]).any()}
    if known and len(lengths) > 1:
        draw(out / "efficiency.png", known, lengths)
    print((out / "efficiency.md").read_text())


COLUMNS: dict[str, Callable[[float], str]] = {
    "tokens_per_second": "{:,.0f}".format,
    "memory_gb": "{:.2f}".format,
    "written_per_second": "{:,.1f}".format,
    "state_bytes": lambda size: f"{size / 1e6:.2f}",
}

# What is drawn: (measurement, value, title).
PANELS = (
    ("training", "tokens_per_second", "training, tokens / s"),
    ("training", "memory_gb", "training, peak GB"),
    ("inference", "tokens_per_second", "prefill, tokens / s"),
    ("inference", "state_bytes", "decoding, bytes of state"),
)


def curves(
    found: Mapping[tuple, Record], panel: tuple[str, str, str], specs: list[str], lengths: list[int]
) -> dict[str, list[float]]:
    """Returns the values of a panel over the lengths, by config; NaN where there is none."""
    kind, name, _ = panel
    return {spec: [found[spec, length, kind].get(name, np.nan) for length in lengths] for spec in specs}


def draw(png: pathlib.Path, panels: Mapping[tuple[str, str, str], dict[str, list[float]]], lengths: list[int]) -> None:
    """Draws one panel for each measurement, with one curve for each config."""
    plt = plots.pyplot()
    with plt.rc_context(plots.STYLE):
        shape = (-(-len(panels) // 2), 2)
        figure, axes = plt.subplots(*shape, figsize=(9, 3 * shape[0]), layout="constrained", sharex=True, squeeze=False)
        for axis, ((*_, label), by_config) in zip(axes.flat, panels.items()):
            for (spec, values), colour in zip(by_config.items(), plots.COLOURS):
                axis.plot(lengths, values, "o-", color=colour, label=records.short_name(spec))
            axis.set_xscale("log", base=2)
            top = 1.08 * np.nanmax([value for values in by_config.values() for value in values])
            axis.set(title=label, ylim=(0, top), xticks=lengths, xticklabels=lengths)
        axes[0, 0].legend()
        figure.supxlabel("tokens per text")
        plots.save(figure, png)


def cell(one: Record, base: Record, name: str, form: Callable[[float], str]) -> str:
    """Returns a value, and how it compares with that of the baseline."""
    if name not in one:
        return "failed" if "failed" in one else "-"
    change = "" if one is base or name not in base else f" ({100 * (one[name] / base[name] - 1):+.1f} %)"
    return form(one[name]) + change


if __name__ == "__main__":
    cli.run(main)
