"""Loss, perplexity, bits per byte and loss by position over the rows of a split.

B rows of a batch, T tokens of a row, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from jax.experimental import multihost_utils

from mesanet_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What a model scores on some rows; every mean is over valid tokens, whatever row or batch they were in."""

    loss: float  # nats a token
    bits_per_byte: float | None  # None where no target stands for a byte
    tokens: int
    bytes: int  # UTF-8 bytes of the text that the targets stand for
    position_loss_T: np.ndarray  # mean nats at each position of the row, NaN where no token was valid
    position_tokens_T: np.ndarray
    # Share of the tokens that were given more than half of the probability. No other is likelier then: the accuracy of the
    # likeliest token is at least this. None in evaluations of earlier versions.
    foretold: float | None = None
    # Of a model that has more than one way to compute its loss, of which the above is that of decoding:
    others: Mapping[str, "Evaluation"] = dataclasses.field(default_factory=dict)
    told: Mapping[str, float] = dataclasses.field(default_factory=dict)  # about the computation, means over batches

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def scalars(self) -> dict[str, float]:
        """What a training run logs of its validation split; the gap of another mode is its loss less that of decoding."""
        scalars = {"validation_loss": self.loss}
        if self.bits_per_byte is not None:
            scalars["validation_bits_per_byte"] = self.bits_per_byte
        for mode, other in self.others.items():
            scalars |= {f"{name}_{mode}": value for name, value in other.scalars().items()}
            scalars[f"validation_gap_{mode}"] = other.loss - self.loss
        return scalars | {f"validation_{name}": value for name, value in self.told.items()}


def evaluate_rows(scores_fn: Callable, params, batches: Iterable[dict], token_bytes: np.ndarray) -> Evaluation:
    """Evaluates `params` on every batch.

    Bits per byte are those of nanochat: nats of targets that stand for bytes, over ln 2 times these bytes; a special
    token such as EOS is in neither sum (it is in the loss).

    Args:
      scores_fn: (params, batch) -> (nats [B,T], 0 where the weight is 0, {mode: nats}, {name: scalar}), as
        `Model.scores`; jitted by the caller.
      batches: dicts of inputs, targets, segment_ids, weights [B,T], weights 0 or 1; numpy, or global arrays of a mesh.
      token_bytes: int [V], the UTF-8 bytes that an id stands for, 0 for a special one.

    Raises:
      UserError: if no token is valid.
    """
    totals: dict[str | None, np.ndarray] = {}  # by mode, [C,T]; None: that of decoding
    told: list[dict[str, float]] = []
    for batch in batches:
        decoding_BT, others, scalars = scores_fn(params, batch)
        told.append({name: float(_on_host(value)) for name, value in scalars.items()})
        valid_BT = _on_host(batch["weights"]) > 0
        bytes_BT = np.where(valid_BT, token_bytes[_on_host(batch["targets"])], 0)
        for mode, on_device_BT in {None: decoding_BT, **others}.items():
            nats_BT = _on_host(on_device_BT).astype(np.float64)
            foretold_BT = valid_BT & (nats_BT < math.log(2))
            text_nats_BT = np.where(bytes_BT > 0, nats_BT, 0.0)
            sums_CT = np.stack([x.sum(axis=0) for x in (nats_BT, valid_BT, text_nats_BT, bytes_BT, foretold_BT)])
            totals[mode] = totals.get(mode, 0.0) + sums_CT
    if not totals or not totals[None][1].any():
        raise UserError("evaluation: these rows hold no valid token; is the split empty?")
    means = {name: float(np.mean([each[name] for each in told])) for name in told[0]}
    others = {mode: _evaluation(totals_CT) for mode, totals_CT in totals.items() if mode is not None}
    return dataclasses.replace(_evaluation(totals[None]), others=others, told=means)


def _evaluation(totals_CT: np.ndarray) -> Evaluation:
    """Of the sums over rows of nats, tokens, nats of text, bytes and foretold tokens, at each position."""
    nats_T, tokens_T, text_nats_T, bytes_T, foretold_T = totals_CT
    nats, tokens, text_nats, count = (float(x.sum()) for x in (nats_T, tokens_T, text_nats_T, bytes_T))
    return Evaluation(
        loss=nats / tokens,
        bits_per_byte=text_nats / (math.log(2) * count) if count else None,
        tokens=int(tokens),
        bytes=int(count),
        position_loss_T=np.divide(nats_T, tokens_T, out=np.full(nats_T.shape, np.nan), where=tokens_T > 0),
        position_tokens_T=tokens_T.astype(np.int64),
        foretold=float(foretold_T.sum()) / tokens,
    )


def _on_host(x) -> np.ndarray:
    """The whole of an array, on every process that holds a part of it."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def position_buckets(evaluation: Evaluation) -> list[tuple[str, float, int]]:
    """Loss by position in powers of two: (name, nats a token, tokens), positions counted from 1: '1', '2', '3-4', ..."""
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
