"""The report of an evaluation: a table for the console, the same as JSON, and the plots.

T: tokens per row.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from mesanet_jax.evals.perplexity import Evaluation, position_buckets
from mesanet_jax.evals.stream import Windows
from mesanet_jax.reporting import layer_stats
from mesanet_jax.reporting.plots import plot_positions
from mesanet_jax.reporting.tables import markdown_table

SCORES = (
    "loss",
    "perplexity",
    "bits_per_byte",
    "p_correct_over_half",
)  # the fields of an `Evaluation` that reports compare
P_CORRECT = "p(correct) > 1/2"  # the title of a column, explained in docs/evaluation.md


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """The result of an evaluation, and which model was evaluated on which data.

    Attributes:
      seq_len: tokens per row, or per window of the stream protocol.
      trained_seq_len: tokens per row during training.
      layer_stats: `layer_stats.scalars` of the first batch.
      windows: the windows of the stream protocol; None if the rows were scored as they were prepared.
      words: words in the stream; None if rows or only a part of the stream were scored, or if the data do not say.
    """

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
    layer_stats: Mapping[str, float]
    windows: Windows | None
    words: int | None

    @property
    def protocol(self) -> str:
        windows = self.windows
        return "rows" if windows is None else f"stream, context {windows.context}, stride {windows.stride}"

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats / words), which, like bits per byte, can be compared between tokenizers."""
        result = self.evaluation
        return None if self.words is None else math.exp(min(result.loss * result.tokens / self.words, 700.0))

    def markdown(self) -> str:
        """Returns the report as Markdown tables."""
        result = self.evaluation
        unit = "row" if self.windows is None else "window"
        rows = [
            ("loss (nats / token)", f"{result.loss:.4f}"),
            ("perplexity", f"{result.perplexity:.2f}"),
            ("bits per byte", _bits(result)),
            (P_CORRECT, f"{result.p_correct_over_half:.1%}"),
            *self._word_rows(),
            *self._mode_rows(),
            ("tokens", f"{result.tokens:,}"),
            ("bytes", f"{result.bytes:,}"),
            ("protocol", self.protocol),
            (f"tokens per {unit}", self._length()),
            *(
                (label, f"{self.layer_stats[name]:.2f}")
                for name, label in layer_stats.LABELS.items()
                if name in self.layer_stats
            ),
        ]
        positions = [(name, f"{loss:.4f}", f"{tokens:,}") for name, loss, tokens in position_buckets(result)]
        parts = [
            f"# {self.name}: {self.split} at step {self.step}",
            markdown_table(("measure", "value"), rows),
            markdown_table((f"position in the {unit}", "loss (nats / token)", "tokens"), positions),
        ]
        return "\n\n".join(parts) + "\n"

    def _length(self) -> str:
        if self.seq_len == self.trained_seq_len:
            return f"{self.seq_len}"
        extrapolation = ": extrapolation" if self.seq_len > self.trained_seq_len else ""
        return f"{self.seq_len} (trained on {self.trained_seq_len}{extrapolation})"

    def _word_rows(self) -> list[tuple[str, str]]:
        if self.words is None:
            return []
        return [("word-level perplexity", f"{self.word_perplexity:.2f}"), ("words", f"{self.words:,}")]

    def _mode_rows(self) -> list[tuple[str, str]]:
        """The scores of other ways to compute the loss than decoding, and statistics of the computation."""
        rows = []
        for mode, other in self.evaluation.others.items():
            rows += [
                (f"loss, {mode}", f"{other.loss:.4f}"),
                (f"gap, {mode} - decoding", f"{other.loss - self.evaluation.loss:+.4f}"),
                (f"perplexity, {mode}", f"{other.perplexity:.2f}"),
                (f"bits per byte, {mode}", _bits(other)),
                (f"{P_CORRECT}, {mode}", f"{other.p_correct_over_half:.1%}"),
            ]
        return rows + [
            (f"{name} (mean over batches)", f"{value:.1f}") for name, value in self.evaluation.computation.items()
        ]

    def record(self) -> dict[str, Any]:
        """Returns the report as JSON can hold it; the loss at a position without a valid token is null."""
        plain = (
            "name", "step", "split", "data", "fingerprint", "parameters", "seq_len", "trained_seq_len", "seconds",
            "layer_stats", "words", "protocol", "word_perplexity",
        )  # fmt: skip
        result = self.evaluation
        return {
            **{name: getattr(self, name) for name in plain},
            **{name: getattr(result, name) for name in (*SCORES, "tokens", "bytes")},
            "position_loss": position_losses(result),
            "position_tokens": result.position_tokens_T.tolist(),
            "modes": {
                mode: {**{name: getattr(other, name) for name in SCORES}, "position_loss": position_losses(other)}
                for mode, other in result.others.items()
            },
            "computation": dict(result.computation),
        }

    def write(self, directory: epath.Path) -> epath.Path:
        """Writes the .md, .json and .png files; returns their common path without the suffix."""
        stem = directory / file_stem(self.split, self.step, self.windows)
        directory.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".md").write_text(self.markdown())
        stem.with_suffix(".json").write_text(json.dumps(self.record(), indent=1) + "\n")
        title = f"{self.name}, {self.split}, step {self.step}"
        modes = {self.name: self.evaluation} | {f"{self.name}, {m}": e for m, e in self.evaluation.others.items()}
        curves = {mode: evaluation.position_loss_T for mode, evaluation in modes.items()}
        plot_positions(curves, stem.with_suffix(".png"), title=title)
        layer_stats.plot(self.layer_stats, stem, title=title)
        return stem


def _bits(evaluation: Evaluation) -> str:
    return "none" if evaluation.bits_per_byte is None else f"{evaluation.bits_per_byte:.4f}"


def position_losses(evaluation: Evaluation) -> list[float | None]:
    """Returns the loss at each position as JSON can hold it: None where no token was valid."""
    return [None if np.isnan(loss) else float(loss) for loss in evaluation.position_loss_T]


def file_stem(split: str, step: int, windows: Windows | None = None) -> str:
    """Returns the name of an evaluation's files without the suffix, such as `validation-2000`."""
    return f"{split}-{step}" + ("" if windows is None else f"-stream-{windows.context}-{windows.stride}")
