"""The results of the runs of a comparison, read from their directories, and checks that they can be compared.

T: tokens per row.
"""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from etils import epath

from mesanet_jax import models, schema
from mesanet_jax.errors import UserError
from mesanet_jax.evals.perplexity import Evaluation
from mesanet_jax.reporting import plots
from mesanet_jax.reporting.evaluation_report import file_stem
from mesanet_jax.reporting.trackers import read_json_lines
from mesanet_jax.schema import Config
from mesanet_jax.training import checkpoint


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run, read from its directory.

    Attributes:
      training_flops: FLOPs per token of a training step.
      tokens_per_second: median over the logged windows; None if the run was too short for one.
      memory_gb: peak of the fullest device in 1e9 bytes; None if the device does not report it.
      batch: (rows, tokens per row).
      data: fingerprint of the training data.
      evaluated_data: fingerprint of the data that were evaluated.
      modes: the scores of ways to compute the loss other than decoding, by name.
      losses: (steps, training loss in nats per token).
      terms: `plots.terms` of the run.
      settings: the config as {path: value}.
    """

    name: str
    pattern: tuple[str, ...]
    learning_rate: float
    parameters: int
    training_flops: float
    tokens_per_second: float | None
    memory_gb: float | None
    steps: int
    batch: tuple[int, int]
    seed: int
    order_seed: int
    data: str
    evaluated_data: str
    evaluation: Evaluation
    modes: Mapping[str, Mapping[str, Any]]
    losses: plots.Curve
    terms: Mapping[str, plots.Curve]
    settings: Mapping[str, Any]

    # The fields that must be the same in every run.
    SHARED: ClassVar = ("steps", "batch", "seed", "order_seed", "data", "evaluated_data")


def evaluation_path(config: Config, workdir: epath.Path, suffix: str) -> epath.Path:
    """Returns the path of a file that mesanet_jax.evaluate writes for the last step of a run."""
    return workdir / "evaluation" / f"{file_stem(config.data.validation_split, config.steps)}{suffix}"


def read(config: Config, workdir: epath.Path) -> Result:
    """Reads a run that is trained and evaluated. Its seeds and its data are those stored in its last checkpoint."""
    saved = checkpoint.Checkpoints(workdir)
    metadata = saved.metadata(config.steps)
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
        batch=(metadata["config"]["data"]["batch_size"], metadata["config"]["data"]["seq_len"]),
        seed=metadata["config"]["seed"],
        order_seed=metadata["config"]["data"]["seed"],
        data=metadata["data"],
        evaluated_data=evaluated["fingerprint"],
        evaluation=_evaluation(evaluated),
        modes=evaluated["modes"],
        losses=plots.training_loss(records),
        terms=plots.terms(records),
        settings=schema.flatten(config),
    )


def _evaluation(record: Mapping[str, Any]) -> Evaluation:
    """Returns the evaluation of an `EvaluationReport.record`."""
    return Evaluation(
        loss=record["loss"],
        bits_per_byte=record["bits_per_byte"],
        tokens=record["tokens"],
        bytes=record["bytes"],
        position_loss_T=np.array(record["position_loss"], float),  # null becomes NaN
        position_tokens_T=np.array(record["position_tokens"]),
        p_correct_over_half=record["p_correct_over_half"],
    )


def check_same(results: Sequence[Result]) -> None:
    """Raises UserError if the runs differ in data, seeds or steps, or were not evaluated on the same tokens."""
    first = results[0]
    if first.evaluated_data != first.data:
        raise UserError(_incomparable("data", first, first.data, first, first.evaluated_data))
    for result in results[1:]:
        for name in Result.SHARED:
            if getattr(result, name) != getattr(first, name):
                raise UserError(_incomparable(name, first, getattr(first, name), result, getattr(result, name)))
        if not np.array_equal(result.evaluation.position_tokens_T, first.evaluation.position_tokens_T):
            counts = (first.evaluation.tokens, result.evaluation.tokens)
            raise UserError(_incomparable("evaluated tokens", first, counts[0], result, counts[1]))


def _incomparable(what: str, first: Result, one: Any, second: Result, other: Any) -> str:
    return (
        f"these runs cannot be compared: {what} is {one} for {first.name} and {other} for {second.name}; delete the"
        " evaluation that is wrong (or the run, if it was trained on other data), and run the same command again"
    )
