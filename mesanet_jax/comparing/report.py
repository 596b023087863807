"""The report of a comparison: the scores and the speed of each run, and at which positions it gains or loses."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from mesanet_jax.comparing.results import Result, check_same
from mesanet_jax.evals.perplexity import position_buckets
from mesanet_jax.formatting import short_number
from mesanet_jax.reporting import plots
from mesanet_jax.reporting.evaluation_report import P_CORRECT, SCORES, position_losses
from mesanet_jax.reporting.tables import markdown_table

# The patterns of the runs that the others are measured against by position, the preferred one first.
BASELINES = (("attention",), ("sliding", "attention"))


class ComparisonReport:
    """Results side by side, best first.

    Args:
      results: the finished runs.
      failed: for each run that is missing, the reason.

    Raises:
      UserError: if the runs did not see the same data in the same order from the same seed, or were not evaluated on
        the same tokens.
    """

    def __init__(self, results: Sequence[Result], *, failed: Mapping[str, str]):
        check_same(results)
        self.results = sorted(results, key=lambda result: result.evaluation.loss)
        self.failed = dict(failed)
        self.baseline = min((result for result in results if result.pattern in BASELINES), key=_rank, default=None)

    def markdown(self) -> str:
        """Returns the report as text."""
        first = self.results[0]
        rows, length = first.batch
        parts = [
            "# Comparison: equal except for the architecture",
            f"All runs have the same seed ({first.seed}) and {first.steps} steps of {rows} x {length} tokens, and read"
            f" the same rows in the same order (data {first.data[:12]}, order seed {first.order_seed}). They"
            f" were evaluated on {first.evaluation.tokens:,} tokens. The configs were checked to differ only in the"
            " mixers, the kind of model and their options, the width of the feed-forward and the peak learning rate.",
            "This is one seed. How much the loss varies from seed to seed was not measured here, and a difference below"
            " that variation is not a finding; nor must the order after this number of steps be the order after more."
            " Tokens/s are medians on this machine, including the effect of whatever else ran on it.",
            *(f"**Missing: {name}**, {why}." for name, why in self.failed.items()),
            markdown_table(HEADER, [_row(result) for result in self.results]),
            *self._modes(),
            *self._differences(),
            "![loss curves](comparison-loss.png)",
            *self._positions(),
        ]
        return "\n\n".join(parts) + "\n"

    def _modes(self) -> list[str]:
        """Returns the scores of models that can compute their loss in other ways than by decoding."""
        rows = [
            (
                result.name,
                mode,
                f"{scores['loss']:.4f}",
                f"{scores['loss'] - result.evaluation.loss:+.4f}",
                _known(scores["bits_per_byte"], "{:.4f}".format),
                _known(scores["p_correct_over_half"], "{:.1%}".format),
            )
            for result in self.results
            for mode, scores in result.modes.items()
        ]
        if not rows:
            return []
        header = ("run", "mode", "loss (nats / token)", "gap: mode - decoding", "bits / byte", P_CORRECT)
        drawn = ["![memory during training](comparison-terms.png)"] if any(r.terms for r in self.results) else []
        return ["## Other modes", "The table above shows the loss of decoding.", markdown_table(header, rows), *drawn]

    def _differences(self) -> list[str]:
        """Returns a table of the fields that runs set differently."""
        paths = differing([result.settings for result in self.results])
        if not paths:
            return []
        rows = [(result.name, *(_text(result.settings.get(path, "-")) for path in paths)) for result in self.results]
        return ["## What differs", markdown_table(("run", *paths), rows)]

    def _positions(self) -> list[str]:
        if self.baseline is None:
            return [
                "## Loss by position",
                "Left out, because there is no Transformer (with full or interleaved attention) among the runs to"
                " measure the others against.",
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

    def record(self) -> dict[str, Any]:
        """Returns the report as JSON can hold it, best first; the loss at a position without a valid token is null."""
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
        """Writes comparison.md, comparison.json and the plots that the former shows."""
        (directory / "comparison.md").write_text(self.markdown())
        (directory / "comparison.json").write_text(json.dumps(self.record(), indent=1) + "\n")
        plots.plot_losses(
            {result.name: result.losses for result in self.results},
            directory / "comparison-loss.png",
            title=f"Training loss of {len(self.results)} runs on the same rows",
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
                title=f"Validation loss by position, minus that of {self.baseline.name}",
                ylabel="difference (nats / token)",
            )


def _rank(result: Result) -> tuple[int, bool]:
    """The order of preference as the baseline: a plain language model before other kinds of the same pattern."""
    return BASELINES.index(result.pattern), result.settings["model.kind"] != "language_model"


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the fields, except the name, that have two values among the configs that have them."""
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
        _known(result.evaluation.p_correct_over_half, "{:.1%}".format),
        _known(result.tokens_per_second, short_number),
        _known(result.memory_gb, "{:.2f}".format),
        f"{result.training_flops / 1e6:.1f}",
    )


def _record(result: Result) -> dict[str, Any]:
    plain = ("name", "pattern", "parameters", "learning_rate", "training_flops", "tokens_per_second", "memory_gb")
    return {
        **{name: getattr(result, name) for name in plain},
        **{name: getattr(result.evaluation, name) for name in SCORES},
        "modes": {mode: {name: scores[name] for name in SCORES} for mode, scores in result.modes.items()},
        "position_loss": position_losses(result.evaluation),
    }
