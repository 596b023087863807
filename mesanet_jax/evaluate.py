"""Evaluates a checkpoint on a split: `python -m mesanet_jax.evaluate --workdir=DIR`

Measures the loss, the perplexity, bits per byte and the loss at each token position. Prints a table and writes
DIR/evaluation/SPLIT-STEP.{md,json,png}. docs/evaluation.md explains the measures.

--config.data.path=... evaluates on other data that were prepared with the same tokenizer; rows that are longer than
those of the training measure length extrapolation. --protocol=stream --context=1024 --stride=512 reads the split as one
contiguous text and scores it by overlapping windows, which is how perplexities of WikiText-103 are reported; it also
reports the word-level perplexity, and its files have `-stream-1024-512` in their names.

Several processes evaluate together if each gets --coordinator (see docs/distributed.md).
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
from etils import epath
from tqdm import tqdm

from mesanet_jax import cli, models
from mesanet_jax import mesh as mesh_lib
from mesanet_jax.data.loader import Batch, eval_batches
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.evals import stream
from mesanet_jax.evals.batches import evaluation_rows
from mesanet_jax.evals.perplexity import evaluate_rows
from mesanet_jax.evals.stream import Windows
from mesanet_jax.reporting import layer_stats
from mesanet_jax.reporting.evaluation_report import EvaluationReport
from mesanet_jax.runtime import distributed, workdir
from mesanet_jax.runtime.watchdog import Watchdog
from mesanet_jax.schema import Config
from mesanet_jax.training import checkpoint
from mesanet_jax.training import step as step_lib
from mesanet_jax.training.data import check_tokenizer

PROTOCOLS = ("rows", "stream")


def main(argv: list[str]) -> None:
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--workdir", required=True, type=workdir.path, help="the directory of a run of mesanet_jax.train"
    )
    flags.add_argument("--step", type=int, help="the checkpoint to evaluate (default: the newest)")
    flags.add_argument("--split", help="a split of the prepared data (default: config.data.validation_split)")
    flags.add_argument("--batches", type=int, help="stop after this many batches (default: evaluate the whole split)")
    flags.add_argument(
        "--protocol",
        default="rows",
        help="rows: score the rows as prepared; stream: one text by windows (default: rows)",
    )
    flags.add_argument("--context", type=int, help="stream only: tokens per window (default: the tokens per row)")
    flags.add_argument("--stride", type=int, help="stream only: tokens between window starts (default: the context)")
    distributed.add_flags(flags)
    args, overrides = cli.parse(flags, argv)
    if args.batches is not None and args.batches < 1:
        raise UserError(f"--batches={args.batches}: must be at least 1")
    config = workdir.load(args.workdir, overrides)
    workdir.use_compile_cache(args.workdir, config)
    split = args.split or config.data.validation_split
    windows = _windows(args, config)
    with distributed.joined(args, config.processes):
        report = evaluate(config, args.workdir, split=split, step=args.step, batches=args.batches, windows=windows)
        if distributed.is_chief():
            print(report.markdown())
            print(f"written to {report.write(args.workdir / 'evaluation')}.{{md,json,png}}")


def _windows(args: argparse.Namespace, config: Config) -> Windows | None:
    """Returns the windows of --protocol=stream, or None if rows are scored."""
    if args.protocol not in PROTOCOLS:
        raise UserError(f"--protocol={args.protocol}: choose one of {', '.join(PROTOCOLS)}")
    if args.protocol == "stream":
        context = config.data.seq_len if args.context is None else args.context
        return Windows(context, context if args.stride is None else args.stride)
    for flag in ("context", "stride"):
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag}: applies only to --protocol=stream; rows are scored as they were prepared")
    return None


def evaluate(
    config: Config,
    directory: epath.Path,
    *,
    split: str,
    step: int | None,
    batches: int | None,
    windows: Windows | None = None,
) -> EvaluationReport:
    """Evaluates a checkpoint of the run in `directory`.

    Args:
      step: the checkpoint's step; None for the newest.
      batches: the number of batches to evaluate; None for the whole split.
      windows: the windows that score the split as one text; None to score its rows as they were prepared.

    Raises:
      UserError: if the checkpoint or the split does not exist, or the data were prepared with another tokenizer.
    """
    rows = PackedRows(config.data.path, split)
    seq_len = windows.context if windows else rows.seq_len
    # All devices share the parameters and the rows. The sequence axis is that of training, where it divides the length.
    mesh = mesh_lib.make_mesh((1, -1, 1, math.gcd(config.mesh.sequence, jax.device_count(), seq_len)))
    model = models.build(config.model)
    with mesh_lib.use_mesh(mesh), Watchdog(config.train.watchdog_minutes) as watchdog:
        params, step = checkpoint.restore_params(directory, model, mesh, step=step)
        check_tokenizer(rows, directory, step=step)
        scores = step_lib.compile_call(model.scores, model, mesh)
        size = evaluation_rows(config, shards=mesh_lib.batch_shards(mesh))
        whole, make = _inputs(rows, windows, size=size, positions=mesh_lib.local_rows(mesh, size))
        count = min(whole, batches or whole)
        some = itertools.islice(make(), count)
        began = time.monotonic()
        bar = tqdm(some, total=count, desc=split, unit="batch", disable=None if distributed.is_chief() else True)
        ahead = mesh_lib.placed(watchdog.watched(bar), mesh)
        result = evaluate_rows(scores, params, ahead, rows.tokenizer.token_bytes())
        first = mesh_lib.placed(itertools.islice(make(), 1), mesh)
        stats = jax.device_get(step_lib.compile_call(model.layer_stats, model, mesh)(params, next(first)))
    return EvaluationReport(
        name=config.name,
        step=step,
        split=split,
        data=config.data.path,
        fingerprint=rows.fingerprint,
        parameters=model.parameter_count(),
        seq_len=seq_len,
        trained_seq_len=config.data.seq_len,
        seconds=time.monotonic() - began,
        evaluation=result,
        layer_stats=layer_stats.scalars(stats),
        windows=windows,
        words=rows.words if windows and count == whole else None,
    )


def _inputs(
    rows: PackedRows, windows: Windows | None, *, size: int, positions: Sequence[int]
) -> tuple[int, Callable[[], Iterator[Batch]]]:
    """Returns the number of batches of `size` rows or windows in the split, and a function that iterates over them."""
    if windows is None:
        return -(-len(rows) // size), partial(eval_batches, rows, size, positions=positions)
    tokens_N, starts_N = stream.read(rows)
    make = partial(stream.batches, tokens_N, starts_N, windows, batch_size=size, positions=positions)
    return -(-windows.count(len(tokens_N)) // size), make


if __name__ == "__main__":
    cli.run(main)
