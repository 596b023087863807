"""Computes the loss, the perplexity, bits per byte and the loss at each position over the rows of a split.

Shape suffixes: B rows of a batch, T tokens per row, V vocabulary, C sums that are accumulated.
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
    """The scores of a model on some rows. Every mean weights all valid tokens equally, across rows and batches.

    Attributes:
      loss: nats per token. A model with several ways to compute its loss reports that of decoding here.
      bits_per_byte: None if no target stands for a byte.
      tokens: the number of valid tokens.
      bytes: the number of UTF-8 bytes of the text that the valid targets stand for.
      position_loss_T: mean nats at each position of the row; NaN where no token is valid.
      position_tokens_T: the number of valid tokens at each position of the row.
      p_correct_over_half: the share of tokens to which the model gives a probability of more than 1/2. No other token
        can be likelier, so this is a lower bound of the accuracy. None if unknown.
      others: {mode: the evaluation of another way to compute the loss}.
      computation: {name: statistic of the computation, averaged over the batches}, such as the number of sweeps.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int
    bytes: int
    position_loss_T: np.ndarray
    position_tokens_T: np.ndarray
    p_correct_over_half: float | None = None
    others: Mapping[str, "Evaluation"] = dataclasses.field(default_factory=dict)
    computation: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(loss), or infinity where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def scalars(self) -> dict[str, float]:
        """Returns what a training run logs for its validation split.

        The `gap` of another mode is its loss minus the loss of decoding.
        """
        scalars = {"validation_loss": self.loss}
        if self.bits_per_byte is not None:
            scalars["validation_bits_per_byte"] = self.bits_per_byte
        for mode, other in self.others.items():
            scalars |= {f"{name}_{mode}": value for name, value in other.scalars().items()}
            scalars[f"validation_gap_{mode}"] = other.loss - self.loss
        return scalars | {f"validation_{name}": value for name, value in self.computation.items()}


def evaluate_rows(
    scores_fn: Callable[..., Any], params: Any, batches: Iterable[Mapping[str, Any]], token_bytes: np.ndarray
) -> Evaluation:
    """Evaluates `params` on every batch.

    Bits per byte are defined as in nanochat: the nats of the targets that stand for bytes, divided by ln 2 times the
    number of these bytes. A special token such as EOS counts in neither sum, but does count in the loss.

    Args:
      scores_fn: (params, batch) -> (nats [B, T], 0 where the weight is 0; {mode: nats [B, T]}; {name: scalar}), as
        `Model.scores`; jitted by the caller.
      batches: each has inputs, targets, segment_ids and weights [B, T]; the weights are 0 or 1. The arrays are NumPy
        arrays or global arrays of a mesh.
      token_bytes: int [V], the number of UTF-8 bytes that each id stands for; 0 for a special token.

    Raises:
      UserError: no token is valid.
    """
    totals: dict[str | None, np.ndarray] = {}  # mode -> sums [C, T]; the mode None is decoding
    computation: list[dict[str, float]] = []
    for batch in batches:
        decoding_BT, others, scalars = scores_fn(params, batch)
        computation.append({name: float(_on_host(value)) for name, value in scalars.items()})
        valid_BT = _on_host(batch["weights"]) > 0
        bytes_BT = np.where(valid_BT, token_bytes[_on_host(batch["targets"])], 0)
        for mode, on_device_BT in {None: decoding_BT, **others}.items():
            sums_CT = _sums(_on_host(on_device_BT).astype(np.float64), valid_BT, bytes_BT)
            totals[mode] = totals[mode] + sums_CT if mode in totals else sums_CT
    if not totals or not totals[None][1].any():
        raise UserError("evaluation: these rows hold no valid token; is the split empty?")
    means = {name: float(np.mean([scalars[name] for scalars in computation])) for name in computation[0]}
    others = {mode: _evaluation(totals_CT) for mode, totals_CT in totals.items() if mode is not None}
    return dataclasses.replace(_evaluation(totals[None]), others=others, computation=means)


def _sums(nats_BT: np.ndarray, valid_BT: np.ndarray, bytes_BT: np.ndarray) -> np.ndarray:
    """Sums over the rows, at each position: nats, tokens, nats of text, bytes, tokens with p(correct) > 1/2."""
    text_nats_BT = np.where(bytes_BT > 0, nats_BT, 0.0)
    over_half_BT = valid_BT & (nats_BT < math.log(2))
    return np.stack([x.sum(axis=0) for x in (nats_BT, valid_BT, text_nats_BT, bytes_BT, over_half_BT)])


def _evaluation(totals_CT: np.ndarray) -> Evaluation:
    """Computes the means of the totals of `_sums`."""
    nats_T, tokens_T, text_nats_T, bytes_T, over_half_T = totals_CT
    nats, tokens, text_nats, count = (float(x.sum()) for x in (nats_T, tokens_T, text_nats_T, bytes_T))
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
    """Gathers a whole array on every process that holds a part of it."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def position_buckets(evaluation: Evaluation) -> list[tuple[str, float, int]]:
    """Averages the loss over positions in ranges that grow by powers of two.

    Returns:
      (name, nats per token, tokens) of each range; positions count from 1: "1", "2", "3-4", "5-8", ...
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
