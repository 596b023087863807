"""Evaluates a checkpoint on a split: `python -m mesanet_jax.evaluate --workdir=DIR`

Loss, perplexity, bits per byte and loss by token position; a table here, and DIR/evaluation/SPLIT-STEP.{md,json,png}.
Runs in one process on all of its devices. `--config.data.path=...` evaluates on other data of the same tokenizer;
rows longer than those of the training measure length extrapolation.
"""

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Iterable

import jax
import numpy as np
from tqdm import tqdm

from mesanet_jax import checkpoint, cli, models, workdir
from mesanet_jax import mesh as mesh_lib
from mesanet_jax import step as step_lib
from mesanet_jax.data.loader import eval_batches
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.evals.perplexity import Evaluation, evaluate_rows, position_buckets
from mesanet_jax.plots import plot_positions


def main(argv: list[str]) -> None:
    flags = cli.parser(__doc__)
    flags.add_argument("--workdir", required=True, type=pathlib.Path, help="of a run of mesanet_jax.train")
    flags.add_argument("--step", type=int, help="checkpoint to evaluate; default: the newest")
    flags.add_argument("--split", help="of the prepared data; default: config.data.validation_split")
    flags.add_argument("--batches", type=int, help="stop after so many batches; default: the whole split")
    args, overrides = cli.parse(flags, argv)
    if args.batches is not None and args.batches < 1:
        raise UserError(f"--batches={args.batches}: must be at least 1")
    config = workdir.load(args.workdir, overrides)
    workdir.use_compile_cache(args.workdir, config)
    split = args.split or config.data.validation_split
    report = evaluate(config, args.workdir, split=split, step=args.step, batches=args.batches)
    print(report.markdown())
    print(f"written to {report.write(args.workdir / 'evaluation')}.{{md,json,png}}")


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
            ("tokens", f"{result.tokens:,}"),
            ("bytes", f"{result.bytes:,}"),
            ("tokens of a row", f"{self.seq_len}{extrapolated}"),
        ]
        positions = [(name, f"{loss:.4f}", f"{tokens:,}") for name, loss, tokens in position_buckets(result)]
        return "\n\n".join([
            f"# {self.name}: {self.split} at step {self.step}",
            markdown_table(("measure", "value"), rows),
            markdown_table(("position in the row", "loss (nats / token)", "tokens"), positions),
        ]) + "\n"  # fmt: skip

    def record(self) -> dict:
        """The same as plain JSON; a position without a valid token has the loss null."""
        fields = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "evaluation"
        }
        result = self.evaluation
        scores = {name: getattr(result, name) for name in ("loss", "perplexity", "bits_per_byte", "tokens", "bytes")}
        curve = [None if np.isnan(loss) else float(loss) for loss in result.position_loss_T]
        return {**fields, **scores, "position_loss": curve, "position_tokens": result.position_tokens_T.tolist()}

    def write(self, directory: pathlib.Path) -> pathlib.Path:
        """Writes the .md, .json and .png; returns their common path without the ending."""
        stem = directory / f"{self.split}-{self.step}"
        directory.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".md").write_text(self.markdown())
        stem.with_suffix(".json").write_text(json.dumps(self.record(), indent=1) + "\n")
        label = f"{self.name}, {self.split}, step {self.step}"
        plot_positions({self.name: self.evaluation.position_loss_T}, stem.with_suffix(".png"), title=label)
        return stem


def markdown_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table whose columns also line up on a console."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pad = lambda row: [
        cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
    ]
    rule = [("-" * width if i == 0 else "-" * (width - 1) + ":") for i, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (pad(header), rule, *map(pad, rows)))


def evaluate(config, directory: pathlib.Path, *, split: str, step: int | None, batches: int | None) -> Report:
    """Evaluates a checkpoint of the run in `directory`, its newest unless `step` names one.

    Raises:
      UserError: no such checkpoint or split, or data that were prepared with another tokenizer.
    """
    rows = PackedRows(config.data.path, split)
    mesh = mesh_lib.make_mesh((1, -1, 1))  # shards parameters and rows over all devices, whatever their number
    model = models.build(config.model)
    with jax.set_mesh(mesh):
        params, step = checkpoint.restore_params(directory, model, mesh, step=step)
        check_tokenizer(rows, directory, step=step)
        loss = step_lib.compile_loss(model, mesh)
        size = batch_size(config, devices=mesh.size)
        count = min(-(-len(rows) // size), batches or len(rows))
        some = itertools.islice(eval_batches(rows, size), count)
        began = time.monotonic()
        bar = tqdm(some, total=count, desc=split, unit="batch", disable=None)
        result = evaluate_rows(loss, params, mesh_lib.placed(bar, mesh), rows.tokenizer.token_bytes())
    return Report(
        name=config.name, step=step, split=split, data=config.data.path, fingerprint=rows.fingerprint,
        parameters=model.parameter_count(), seq_len=rows.seq_len, trained_seq_len=config.data.seq_len,
        seconds=time.monotonic() - began, evaluation=result,
    )  # fmt: skip


def check_tokenizer(rows: PackedRows, directory: pathlib.Path, *, step: int) -> None:
    """Raises UserError where `rows` were made with another tokenizer than the checkpoint's training data."""
    saved = checkpoint.Checkpoints(directory)
    trained = saved.about(step)["tokenizer"]
    saved.close()
    if rows.tokenizer.hash != trained:
        raise UserError(
            f"config.data.path: its tokenizer ({rows.tokenizer.hash[:12]}) is not the one that {directory} was trained with"
            f" ({trained[:12]}); prepare these data with that one, by --config.tokenizer.path"
        )


def batch_size(config, *, devices: int) -> int:
    """Rows of an evaluation batch: as in training, as many as fit at once, and a multiple of the devices."""
    wanted = min(config.data.batch_size, config.train.rows_per_device * devices)
    return -(-wanted // devices) * devices


if __name__ == "__main__":
    cli.run(main)
