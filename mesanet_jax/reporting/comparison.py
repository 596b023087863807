"""The report of a comparison: what each run scored, how fast, and where in the row it gains or loses.

T tokens of a row.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from mesanet_jax import models, schema
from mesanet_jax.errors import UserError
from mesanet_jax.evals.perplexity import Evaluation, position_buckets
from mesanet_jax.evaluate import P_CORRECT, SCORES, file_name, markdown_table
from mesanet_jax.reporting import plots
from mesanet_jax.reporting.progress import short_number
from mesanet_jax.reporting.trackers import read_json_lines
from mesanet_jax.training import checkpoint

# By pattern, the runs that others are measured against by position: the first kind that there is.
BASELINES = (("attention",), ("sliding", "attention"))


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run, read from its directory."""

    name: str
    pattern: tuple[str, ...]
    learning_rate: float
    parameters: int
    training_flops: float  # of one token
    tokens_per_second: float | None  # median over the windows of the log; None where the run was too short for one
    memory_gb: float | None  # 1e9 bytes, peak of the fullest device; None where the device does not count it
    # What must be the same in every run:
    steps: int
    batch: tuple[int, int]  # rows, tokens of a row
    seed: int
    order_seed: int
    data: str  # fingerprint of the training data
    evaluated_data: str  # and of those evaluated on
    evaluation: Evaluation
    modes: Mapping[str, Mapping[str, Any]]  # scores of ways to compute the loss other than decoding, by name
    losses: tuple[np.ndarray, np.ndarray]  # steps, nats a token
    terms: Mapping[str, tuple[np.ndarray, np.ndarray]]  # `plots.terms`
    settings: Mapping[str, Any]  # the config, flat

    SHARED = ("steps", "batch", "seed", "order_seed", "data", "evaluated_data")


def evaluation_path(config, workdir: epath.Path, suffix: str) -> epath.Path:
    """A file that mesanet_jax.evaluate writes for the last step of a run."""
    return workdir / "evaluation" / f"{file_name(config.data.validation_split, config.steps)}{suffix}"


def read(config, workdir: epath.Path) -> Result:
    """The result of a run that is trained and evaluated; seeds and data are those its last checkpoint was made with."""
    saved = checkpoint.Checkpoints(workdir)
    about = saved.about(config.steps)
    saved.close()
    evaluated = json.loads(evaluation_path(config, workdir, ".json").read_text())
    records = read_json_lines(workdir / "metrics.jsonl")
    speeds, memory = ([r[name] for r in records if r.get(name)] for name in ("tokens_per_second", "memory_gb"))
    return Result(
        name=config.name,
        pattern=tuple(config.model.pattern),
        learning_rate=config.optimizer.learning_rate,
        parameters=evaluated["parameters"],
        training_flops=models.build(config.model).flops_per_token(config.data.seq_len).training,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        memory_gb=max(memory, default=None),
        steps=config.steps,
        batch=(about["config"]["data"]["batch_size"], about["config"]["data"]["seq_len"]),
        seed=about["config"]["seed"],
        order_seed=about["config"]["data"]["seed"],
        data=about["data"],
        evaluated_data=evaluated["fingerprint"],
        evaluation=Evaluation(
            loss=evaluated["loss"],
            bits_per_byte=evaluated["bits_per_byte"],
            tokens=evaluated["tokens"],
            bytes=evaluated["bytes"],
            position_loss_T=np.array(evaluated["position_loss"], float),  # null: NaN
            position_tokens_T=np.array(evaluated["position_tokens"]),
            p_correct_over_half=evaluated["p_correct_over_half"],
        ),
        modes=evaluated["modes"],
        losses=plots.training_loss(records),
        terms=plots.terms(records),
        settings=schema.flatten(config),
    )


class Comparison:
    """Results side by side, best first; `failed` says of each run that is missing why.

    Raises:
      UserError: if the runs did not see the same data in the same order from the same seed, or were not evaluated on
        the same tokens.
    """

    def __init__(self, results: Sequence[Result], *, failed: Mapping[str, str]):
        check_same(results)
        self.results = sorted(results, key=lambda result: result.evaluation.loss)
        self.failed = dict(failed)
        # The Transformer, if there is one, before other kinds of model of its pattern.
        rank = lambda result: (BASELINES.index(result.pattern), result.settings["model.kind"] != "language_model")
        self.baseline = min((result for result in results if result.pattern in BASELINES), key=rank, default=None)

    def markdown(self) -> str:
        """The report as text."""
        first = self.results[0]
        rows, length = first.batch
        return "\n\n".join([
            "# Comparison: equal in all but the architecture",
            f"One seed ({first.seed}), {first.steps} steps of {rows} x {length} tokens, the same rows in the same order"
            f" for every run (data {first.data[:12]}, order seed {first.order_seed}); evaluated on"
            f" {first.evaluation.tokens:,} tokens. The configs were checked to differ in nothing but the mixers, the kind of"
            " model and their options, the feed-forward's width and the peak learning rate, which is each config's own.",
            "How far the loss of one config varies from seed to seed was not measured here: a difference within that is"
            " not a finding, and the order after so many steps need not be the order after more. Tokens/s are a median"
            " on this machine, with whatever else ran on it.",
            *(f"**Missing: {name}**, {why}." for name, why in self.failed.items()),
            markdown_table(HEADER, [_row(result) for result in self.results]),
            *self._modes(),
            *self._differences(),
            "![loss curves](comparison-loss.png)",
            *self._positions(),
        ]) + "\n"  # fmt: skip

    def _modes(self) -> list[str]:
        """What models that have more than one way to compute their loss score in the others."""
        rows = [
            (result.name, mode, f"{scores['loss']:.4f}", f"{scores['loss'] - result.evaluation.loss:+.4f}",
             _known(scores["bits_per_byte"], "{:.4f}".format), f"{scores['p_correct_over_half']:.1%}")
            for result in self.results for mode, scores in result.modes.items()
        ]  # fmt: skip
        if not rows:
            return []
        header = ("run", "mode", "loss (nats / token)", "less decoding", "bits / byte", P_CORRECT)
        drawn = ["![memory during training](comparison-terms.png)"] if any(r.terms for r in self.results) else []
        return ["## Other modes", "The table above has the loss of decoding.", markdown_table(header, rows), *drawn]

    def _differences(self) -> list[str]:
        """What runs set differently; an option of a mixer or kind of model that only one run has differs from nothing."""
        paths = differing([result.settings for result in self.results])
        if not paths:
            return []
        rows = [(result.name, *(_text(result.settings.get(path, "-")) for path in paths)) for result in self.results]
        return ["## What differs", markdown_table(("run", *paths), rows)]

    def _positions(self) -> list[str]:
        if self.baseline is None:
            return [
                "## Loss by position",
                "Left out: no run is a Transformer, full or interleaved, to measure the others against.",
            ]
        heading = f"## Loss by position, relative to {self.baseline.name}"
        buckets = {result.name: position_buckets(result.evaluation) for result in self.results}
        reference = buckets[self.baseline.name]
        header = ("nats / token at position", *(name for name, *_ in reference))
        rows = [
            (name, *(f"{loss - zero:+.3f}" for (_, loss, _), (_, zero, _) in zip(losses, reference, strict=True)))
            for name, losses in buckets.items()
            if name != self.baseline.name
        ]
        rows.append((f"{self.baseline.name}, its loss", *(f"{loss:.3f}" for _, loss, _ in reference)))
        return [heading, markdown_table(header, rows), "![loss by position](comparison-position.png)"]

    def record(self) -> dict:
        """The same as plain JSON, best first; a position without a valid token has the loss null."""
        first = self.results[0]
        shared = {name: getattr(first, name) for name in Result.SHARED}
        return {
            **shared,
            "evaluated_tokens": first.evaluation.tokens,
            "failed": self.failed,
            "baseline": self.baseline and self.baseline.name,
            "differing": differing([result.settings for result in self.results]),
            "runs": [_record(result) for result in self.results],
        }

    def write(self, directory: epath.Path) -> None:
        """Writes comparison.md, .json and the plots that the former shows."""
        (directory / "comparison.md").write_text(self.markdown())
        (directory / "comparison.json").write_text(json.dumps(self.record(), indent=1) + "\n")
        plots.plot_losses(
            {result.name: result.losses for result in self.results},
            directory / "comparison-loss.png",
            title=f"Training loss, {len(self.results)} runs on the same rows",
        )
        plots.plot_terms(
            {result.name: result.terms for result in self.results},
            directory / "comparison-terms.png",
            title="Memory during training",
        )
        if self.baseline is not None:
            zero_T = self.baseline.evaluation.position_loss_T
            plots.plot_positions(
                {result.name: result.evaluation.position_loss_T - zero_T for result in self.results},
                directory / "comparison-position.png",
                title=f"Validation loss by position, less that of {self.baseline.name}",
                ylabel="difference (nats / token)",
            )


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields, but for the name, that have two values among the configs that have them."""
    values: dict[str, list] = {}
    for config in settings:
        for path, value in config.items():
            values.setdefault(path, []).append(value)
    return [path for path, found in values.items() if path != "name" and any(value != found[0] for value in found)]


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


HEADER = (
    "run", "parameters", "learning rate", "loss (nats / token)", "perplexity", "bits / byte", P_CORRECT,
    "tokens / s", "peak memory (GB)", "training MFLOP / token",
)  # fmt: skip


def _known(value: float | None, form: Callable[[float], str]) -> str:
    return "unknown" if value is None else form(value)


def _row(result: Result) -> tuple[str, ...]:
    return (
        result.name,
        f"{result.parameters / 1e6:.2f}M",
        f"{result.learning_rate:g}",
        f"{result.evaluation.loss:.4f}",
        f"{result.evaluation.perplexity:.2f}",
        _known(result.evaluation.bits_per_byte, "{:.4f}".format),
        f"{result.evaluation.p_correct_over_half:.1%}",
        _known(result.tokens_per_second, short_number),
        _known(result.memory_gb, "{:.2f}".format),
        f"{result.training_flops / 1e6:.1f}",
    )


def _record(result: Result) -> dict:
    plain = (
        "name", "pattern", "parameters", "learning_rate", "training_flops", "tokens_per_second", "memory_gb"
    )  # fmt: skip
    return {
        **{name: getattr(result, name) for name in plain},
        **{name: getattr(result.evaluation, name) for name in SCORES},
        "modes": {mode: {name: other.get(name) for name in SCORES} for mode, other in result.modes.items()},
        "position_loss": [None if np.isnan(x) else float(x) for x in result.evaluation.position_loss_T],
    }


def check_same(results: Sequence[Result]) -> None:
    """Raises UserError where runs were not made from the same data and seeds, or scored on other tokens than the first."""
    first = results[0]
    values = lambda result: {name: getattr(result, name) for name in Result.SHARED}
    if first.evaluated_data != first.data:
        raise UserError(_incomparable("data", first, first.data, first, first.evaluated_data))
    for result in results[1:]:
        for name, value in values(result).items():
            if value != getattr(first, name):
                raise UserError(_incomparable(name, first, getattr(first, name), result, value))
        if not np.array_equal(result.evaluation.position_tokens_T, first.evaluation.position_tokens_T):
            counts = (first.evaluation.tokens, result.evaluation.tokens)
            raise UserError(_incomparable("evaluated tokens", first, counts[0], result, counts[1]))


def _incomparable(what: str, first: Result, one, second: Result, other) -> str:
    return (
        f"these runs cannot be compared: {what} {one} of {first.name}, {other} of {second.name}; remove the evaluation"
        " (or, if it was trained on other data, the run) that is not as wanted, and run the same command again"
    )
