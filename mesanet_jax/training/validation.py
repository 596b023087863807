"""Evaluates the parameters on the validation split during training."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax

from mesanet_jax import mesh as mesh_lib
from mesanet_jax.data.loader import Batch, eval_batches
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.evals.batches import evaluation_rows
from mesanet_jax.evals.perplexity import evaluate_rows
from mesanet_jax.reporting import layer_stats
from mesanet_jax.runtime.preemption import Preemption
from mesanet_jax.runtime.watchdog import Watchdog
from mesanet_jax.schema import Config
from mesanet_jax.training.step import Program


class Validation:
    """Scores parameters on the first `train.eval_batches` batches of the validation split.

    A batch has as many rows as the devices hold at once in training. A signal interrupts the evaluation, because its
    result can be computed again.
    """

    def __init__(
        self, config: Config, program: Program, rows: PackedRows, *, preemption: Preemption, watchdog: Watchdog
    ):
        self._program, self._rows, self._preemption, self._watchdog = program, rows, preemption, watchdog
        self._batches = config.train.eval_batches
        self._batch_size = evaluation_rows(config, shards=mesh_lib.batch_shards(program.mesh))
        self._positions = mesh_lib.local_rows(program.mesh, self._batch_size)
        self._token_bytes = rows.tokenizer.token_bytes()
        self._has_stats = bool(jax.eval_shape(program.layer_stats, program.state["params"], program.batch))

    def scalars(self, params: Any) -> dict[str, float] | None:
        """Returns the scalars to log, or None if a signal interrupted the evaluation."""
        program = self._program
        try:
            batches = mesh_lib.placed(self._read(), program.mesh)
            scalars = evaluate_rows(program.scores, params, batches, self._token_bytes).scalars()
            if self._has_stats:
                first = next(mesh_lib.placed(itertools.islice(self._read(), 1), program.mesh))
                scalars |= layer_stats.scalars(jax.device_get(program.layer_stats(params, first)))
        except _Interrupted:
            return None
        return scalars

    def _read(self) -> Iterator[Batch]:
        batches = eval_batches(self._rows, self._batch_size, positions=self._positions)
        for batch in itertools.islice(batches, self._batches):
            if self._preemption.interrupted():
                raise _Interrupted
            self._watchdog.beat()
            yield batch


class _Interrupted(Exception):
    """A signal arrived during the evaluation."""
