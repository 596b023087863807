"""Computes loss, perplexity, bits per byte and the loss at each position over the rows of a split.

B: rows per batch   T: tokens per row   V: size of the vocabulary   C: the sums that an evaluation keeps
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from mesanet_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The scores of a model on some rows. Every mean is over all valid tokens, whatever row or batch they were in.

    Attributes:
      loss: nats per token.
      bits_per_byte: bits per UTF-8 byte of the text; None if no target stands for a byte.
      tokens: the number of targets that were scored.
      bytes: the number of UTF-8 bytes that these targets stand for.
      position_loss_T: mean nats at each position in the row; NaN where no token was valid.
      position_tokens_T: the number of valid tokens at each position.
      p_correct_over_half: the fraction of tokens to which the model gave more than half of the probability. No other
        token can be likelier then, so the accuracy of greedy prediction is at least this.
      others: evaluations of the other modes of a model that can compute its loss in several ways. The fields above
        are those of the mode in which the model decodes.
      computation: numbers about the computation itself, such as how many sweeps it took; means over batches.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int
    bytes: int
    position_loss_T: np.ndarray
    position_tokens_T: np.ndarray
    p_correct_over_half: float
    others: Mapping[str, "Evaluation"] = dataclasses.field(default_factory=dict)
    computation: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def scalars(self) -> dict[str, float]:
        """Returns what a training run logs of its validation split.

        The gap of another mode is its loss minus the loss of decoding.
        """
        scalars = {"validation_loss": self.loss}
        if self.bits_per_byte is not None:
            scalars["validation_bits_per_byte"] = self.bits_per_byte
        for mode, other in self.others.items():
            scalars |= {f"{name}_{mode}": value for name, value in other.scalars().items()}
            scalars[f"validation_gap_{mode}"] = other.loss - self.loss
        return scalars | {f"validation_{name}": value for name, value in self.computation.items()}


def evaluate_rows(
    scores_fn: Callable, params: Any, batches: Iterable[Mapping[str, Any]], token_bytes: np.ndarray
) -> Evaluation:
    """Evaluates a model on every batch.

    Bits per byte divide the nats of the targets that stand for bytes by ln 2 times the number of these bytes. Special
    tokens such as EOS are in neither sum, although they are part of the loss.

    Args:
      scores_fn: `Model.scores`, compiled: (params, batch) -> (nats [B, T] of decoding, {mode: nats [B, T]},
        {name: scalar about the computation}). Nats are 0 where the weight is 0.
      params: the parameters of the model.
      batches: mappings with `inputs`, `targets`, `segment_ids` and `weights`, each [B, T], as NumPy arrays or as global
        arrays on a mesh. Weights are 0 or 1.
      token_bytes: int [V], the UTF-8 bytes that each id stands for, 0 for special ids.

    Raises:
      UserError: if no token is valid.
    """
    totals: dict[str | None, np.ndarray] = {}  # sums [C, T] of each mode; the key None is decoding
    scalars: list[dict[str, float]] = []
    for batch in batches:
        decoding_BT, others, about = scores_fn(params, batch)
        scalars.append({name: float(_on_host(value)) for name, value in about.items()})
        valid_BT = _on_host(batch["weights"]) > 0
        bytes_BT = np.where(valid_BT, token_bytes[_on_host(batch["targets"])], 0)
        for mode, nats_BT in {None: decoding_BT, **others}.items():
            sums_CT = _sums(_on_host(nats_BT).astype(np.float64), valid_BT, bytes_BT)
            totals[mode] = totals.get(mode, 0.0) + sums_CT
    if not totals or not totals[None][1].any():
        raise UserError("evaluation: no row holds a token to score; choose a split with data, or evaluate more batches")
    computation = {name: float(np.mean([each[name] for each in scalars])) for name in scalars[0]}
    others = {mode: _evaluation(sums_CT) for mode, sums_CT in totals.items() if mode is not None}
    return dataclasses.replace(_evaluation(totals[None]), others=others, computation=computation)


def _sums(nats_BT: np.ndarray, valid_BT: np.ndarray, bytes_BT: np.ndarray) -> np.ndarray:
    """Sums over rows, at each position, of what `_evaluation` needs: [C, T]."""
    text_nats_BT = np.where(bytes_BT > 0, nats_BT, 0.0)
    over_half_BT = valid_BT & (nats_BT < math.log(2))
    return np.stack([x_BT.sum(axis=0) for x_BT in (nats_BT, valid_BT, text_nats_BT, bytes_BT, over_half_BT)])


def _evaluation(sums_CT: np.ndarray) -> Evaluation:
    nats_T, tokens_T, text_nats_T, bytes_T, over_half_T = sums_CT
    nats, tokens, text_nats, count = (float(x_T.sum()) for x_T in (nats_T, tokens_T, text_nats_T, bytes_T))
    return Evaluation(
        loss=nats / tokens,
        bits_per_byte=text_nats / (math.log(2) * count) if count else None,
        tokens=int(tokens),
        bytes=int(count),
        position_loss_T=np.divide(nats_T, tokens_T, out=np.full(nats_T.shape, np.nan), where=tokens_T > 0),
        position_tokens_T=tokens_T.astype(np.int64),
        p_correct_over_half=float(over_half_T.sum()) / tokens,
    )


def _on_host(x: Any) -> np.ndarray:
    """Returns the whole array on every process, gathered where each holds only a part."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def position_buckets(evaluation: Evaluation) -> list[tuple[str, float, int]]:
    """Averages the loss by position over buckets that double in size: '1', '2', '3-4', '5-8', ...

    Returns:
      (name, nats per token, tokens) of each bucket that has valid tokens. Positions are counted from 1.
    """
    loss_T, tokens_T = evaluation.position_loss_T, evaluation.position_tokens_T
    rows, first = [], 1
    while first <= len(loss_T):
        last = min(max(1, 2 * (first - 1)), len(loss_T))
        where = slice(first - 1, last)
        tokens = int(tokens_T[where].sum())
        if tokens:
            name = f"{first}" if first == last else f"{first}-{last}"
            rows.append((name, float(np.nansum(loss_T[where] * tokens_T[where])) / tokens, tokens))
        first = last + 1
    return rows
