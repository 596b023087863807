"""Evaluates a checkpoint on a split: `python -m mesanet_jax.evaluate --workdir=DIR`

Loss, perplexity, bits per byte and loss by token position; a table here, and DIR/evaluation/SPLIT-STEP.{md,json,png}.
Several processes evaluate together where each gets `--coordinator` (`mesanet_jax.runtime.distributed`).
`--config.data.path=...` evaluates on other data of the same tokenizer;
rows longer than those of the training measure length extrapolation. `--protocol=stream --context=1024 --stride=512` takes the
split for one contiguous text and scores it by overlapping windows, as perplexities of WikiText-103 are measured; what it
writes has `-stream-1024-512` in its name, and word-level perplexity beside that of tokens.
"""

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import jax
import numpy as np
from etils import epath
from tqdm import tqdm

from mesanet_jax import cli, models
from mesanet_jax import mesh as mesh_lib
from mesanet_jax.data.loader import eval_batches
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.evals import stream
from mesanet_jax.evals.batches import evaluation_rows
from mesanet_jax.evals.perplexity import Evaluation, evaluate_rows, position_buckets
from mesanet_jax.evals.stream import Windows
from mesanet_jax.reporting import layer_stats
from mesanet_jax.reporting.plots import plot_positions
from mesanet_jax.runtime import distributed, workdir
from mesanet_jax.runtime.watchdog import Watchdog
from mesanet_jax.training import checkpoint
from mesanet_jax.training import step as step_lib

PROTOCOLS = ("rows", "stream")
SCORES = ("loss", "perplexity", "bits_per_byte", "p_correct_over_half")  # of an `Evaluation`, in the JSON
P_CORRECT = "p(correct) > 1/2"


def main(argv: list[str]) -> None:
    flags = cli.parser(__doc__)
    flags.add_argument("--workdir", required=True, type=workdir.path, help="of a run of mesanet_jax.train")
    flags.add_argument("--step", type=int, help="checkpoint to evaluate; default: the newest")
    flags.add_argument("--split", help="of the prepared data; default: config.data.validation_split")
    flags.add_argument("--batches", type=int, help="stop after so many batches; default: the whole split")
    flags.add_argument("--protocol", default="rows", help="what is scored: rows, as prepared, or stream; default: rows")
    flags.add_argument("--context", type=int, help="of stream: tokens a window reads; default: those of a row")
    flags.add_argument("--stride", type=int, help="of stream: tokens between windows; default: the context")
    distributed.add_flags(flags)
    args, overrides = cli.parse(flags, argv)
    if args.batches is not None and args.batches < 1:
        raise UserError(f"--batches={args.batches}: must be at least 1")
    config = workdir.load(args.workdir, overrides)
    workdir.use_compile_cache(args.workdir, config)
    split = args.split or config.data.validation_split
    windows = protocol(args, config)
    with distributed.joined(args, config.processes):
        report = evaluate(config, args.workdir, split=split, step=args.step, batches=args.batches, windows=windows)
        if distributed.is_chief():
            print(report.markdown())
            print(f"written to {report.write(args.workdir / 'evaluation')}.{{md,json,png}}")


def protocol(args: argparse.Namespace, config) -> Windows | None:
    """The windows of --protocol=stream; None where rows are scored."""
    if args.protocol not in PROTOCOLS:
        raise UserError(f"--protocol={args.protocol}: choose one of {', '.join(PROTOCOLS)}")
    if args.protocol == "stream":
        context = config.data.seq_len if args.context is None else args.context
        return Windows(context, context if args.stride is None else args.stride)
    for flag in ("context", "stride"):
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag}: is of --protocol=stream; rows are as they were prepared")
    return None


@dataclasses.dataclass(frozen=True)
class Report:
    """An evaluation, and what was evaluated on what."""

    name: str
    step: int
    split: str
    data: str
    fingerprint: str
    parameters: int
    seq_len: int
    trained_seq_len: int
    seconds: float
    evaluation: Evaluation
    observed: dict[str, float]  # `layer_stats.scalars` of the first batch
    windows: Windows | None  # None: the rows as prepared
    words: int | None  # of the stream; None of rows, of a part of it, and where the data do not say

    @property
    def protocol(self) -> str:
        windows = self.windows
        return "rows" if windows is None else f"stream, context {windows.context}, stride {windows.stride}"

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats / words): like bits per byte, comparable over tokenizers."""
        result = self.evaluation
        return None if self.words is None else math.exp(min(result.loss * result.tokens / self.words, 700.0))

    def markdown(self) -> str:
        """The table that is printed."""
        result = self.evaluation
        bits = "none" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
        extrapolated = (
            "" if self.seq_len == self.trained_seq_len else f" (trained on {self.trained_seq_len}: extrapolation)"
        )
        rows = [
            ("loss (nats / token)", f"{result.loss:.4f}"),
            ("perplexity", f"{result.perplexity:.2f}"),
            ("bits per byte", bits),
            (P_CORRECT, f"{result.p_correct_over_half:.1%}"),
            *self._words(),
            *self._others(),
            ("tokens", f"{result.tokens:,}"),
            ("bytes", f"{result.bytes:,}"),
            ("protocol", self.protocol),
            ("tokens of a row", f"{self.seq_len}{extrapolated}"),
            *(
                (label, f"{self.observed[name]:.2f}")
                for name, label in layer_stats.LABELS.items()
                if name in self.observed
            ),
        ]
        positions = [(name, f"{loss:.4f}", f"{tokens:,}") for name, loss, tokens in position_buckets(result)]
        return "\n\n".join([
            f"# {self.name}: {self.split} at step {self.step}",
            markdown_table(("measure", "value"), rows),
            markdown_table(("position in the row", "loss (nats / token)", "tokens"), positions),
        ]) + "\n"  # fmt: skip

    def _words(self) -> list[tuple[str, str]]:
        if self.words is None:
            return []
        return [("word-level perplexity", f"{self.word_perplexity:.2f}"), ("words", f"{self.words:,}")]

    def _others(self) -> list[tuple[str, str]]:
        """Other modes, whose gap is their loss less that of decoding; and numbers about the computation."""
        rows = []
        for mode, other in self.evaluation.others.items():
            rows += [
                (f"loss, {mode}", f"{other.loss:.4f}"),
                (f"gap, {mode} less decoding", f"{other.loss - self.evaluation.loss:+.4f}"),
                (f"perplexity, {mode}", f"{other.perplexity:.2f}"),
                (f"bits per byte, {mode}", "none" if other.bits_per_byte is None else f"{other.bits_per_byte:.4f}"),
                (f"{P_CORRECT}, {mode}", f"{other.p_correct_over_half:.1%}"),
            ]
        computation = self.evaluation.computation
        return rows + [(f"{name} (mean over batches)", f"{value:.1f}") for name, value in computation.items()]

    def record(self) -> dict:
        """The same as plain JSON; a position without a valid token has the loss null."""
        plain = [field.name for field in dataclasses.fields(self) if field.name not in ("evaluation", "windows")]
        fields = {name: getattr(self, name) for name in (*plain, "protocol", "word_perplexity")}
        result = self.evaluation
        scores = {name: getattr(result, name) for name in (*SCORES, "tokens", "bytes")}
        return {
            **fields,
            **scores,
            "position_loss": _curve(result),
            "position_tokens": result.position_tokens_T.tolist(),
            "modes": {
                mode: {
                    **{name: getattr(other, name) for name in SCORES},
                    "position_loss": _curve(other),
                }
                for mode, other in result.others.items()
            },
            "computation": dict(result.computation),
        }

    def write(self, directory: epath.Path) -> epath.Path:
        """Writes the .md, .json and .png; returns their common path without the ending."""
        stem = directory / file_name(self.split, self.step, self.windows)
        directory.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".md").write_text(self.markdown())
        stem.with_suffix(".json").write_text(json.dumps(self.record(), indent=1) + "\n")
        label = f"{self.name}, {self.split}, step {self.step}"
        modes = {self.name: self.evaluation} | {f"{self.name}, {m}": e for m, e in self.evaluation.others.items()}
        curves = {mode: evaluation.position_loss_T for mode, evaluation in modes.items()}
        plot_positions(curves, stem.with_suffix(".png"), title=label)
        layer_stats.plot(self.observed, stem, title=label)
        return stem


def _curve(evaluation: Evaluation) -> list[float | None]:
    return [None if np.isnan(loss) else float(loss) for loss in evaluation.position_loss_T]


def file_name(split: str, step: int, windows: Windows | None = None) -> str:
    """Of an evaluation's files, without the ending."""
    return f"{split}-{step}" + ("" if windows is None else f"-stream-{windows.context}-{windows.stride}")


def markdown_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table whose columns also line up on a console."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pad = lambda row: [
        cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
    ]
    rule = [("-" * width if i == 0 else "-" * (width - 1) + ":") for i, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (pad(header), rule, *map(pad, rows)))


def evaluate(
    config,
    directory: epath.Path,
    *,
    split: str,
    step: int | None,
    batches: int | None,
    windows: Windows | None = None,
) -> Report:
    """Evaluates a checkpoint of the run in `directory`, its newest unless `step` names one, by rows or by `windows`.

    Raises:
      UserError: no such checkpoint or split, or data that were prepared with another tokenizer.
    """
    rows = PackedRows(config.data.path, split)
    seq_len = windows.context if windows else rows.seq_len
    # Parameters and rows over all devices, whatever their number; time as in training, as far as it divides them.
    mesh = mesh_lib.make_mesh((1, -1, 1, math.gcd(config.mesh.sequence, jax.device_count(), seq_len)))
    model = models.build(config.model)
    with jax.set_mesh(mesh), Watchdog(config.train.watchdog_minutes) as watchdog:
        params, step = checkpoint.restore_params(directory, model, mesh, step=step)
        check_tokenizer(rows, directory, step=step)
        scores = step_lib.compile_call(model.scores, model, mesh)
        size = evaluation_rows(config, shards=mesh_lib.batch_shards(mesh))
        whole, make = inputs(rows, windows, size=size, positions=mesh_lib.local_rows(mesh, size))
        count = min(whole, batches or whole)
        some = itertools.islice(make(), count)
        began = time.monotonic()
        bar = tqdm(some, total=count, desc=split, unit="batch", disable=None if distributed.is_chief() else True)
        ahead = mesh_lib.placed(watchdog.watched(bar), mesh)
        result = evaluate_rows(scores, params, ahead, rows.tokenizer.token_bytes())
        first = mesh_lib.placed(itertools.islice(make(), 1), mesh)
        told = jax.device_get(step_lib.compile_call(model.observe, model, mesh)(params, next(first)))
    return Report(
        name=config.name, step=step, split=split, data=config.data.path, fingerprint=rows.fingerprint,
        parameters=model.parameter_count(), seq_len=seq_len,
        trained_seq_len=config.data.seq_len, windows=windows, words=rows.words if windows and count == whole else None,
        seconds=time.monotonic() - began, evaluation=result, observed=layer_stats.scalars(told),
    )  # fmt: skip


def inputs(rows: PackedRows, windows: Windows | None, *, size: int, positions: Sequence[int]) -> tuple[int, Callable]:
    """How many batches of `size` score a whole split, and what makes them, anew with each call."""
    if windows is None:
        return -(-len(rows) // size), partial(eval_batches, rows, size, positions=positions)
    tokens_N, starts_N = stream.read(rows)
    make = partial(stream.batches, tokens_N, starts_N, windows, batch_size=size, positions=positions)
    return -(-windows.count(len(tokens_N)) // size), make


def check_tokenizer(rows: PackedRows, directory: epath.Path, *, step: int) -> None:
    """Raises UserError where `rows` were made with another tokenizer than the checkpoint's training data."""
    saved = checkpoint.Checkpoints(directory)
    trained = saved.about(step)["tokenizer"]
    saved.close()
    if rows.tokenizer.hash != trained:
        raise UserError(
            f"config.data.path: its tokenizer ({rows.tokenizer.hash[:12]}) is not the one that {directory} was trained with"
            f" ({trained[:12]}); prepare these data with that one, by --config.tokenizer.path"
        )


if __name__ == "__main__":
    cli.run(main)
