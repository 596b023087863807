"""Finds the state that a training run starts from."""

import sys
from typing import Any

import jax

from mesanet_jax.errors import UserError
from mesanet_jax.models import Model
from mesanet_jax.runtime import distributed
from mesanet_jax.runtime import workdir as workdir_lib
from mesanet_jax.schema import Config
from mesanet_jax.training.checkpoint import Checkpoints, Damaged, restore_params
from mesanet_jax.training.step import Program, State


def initial_state(
    config: Config, program: Program, model: Model, checkpoints: Checkpoints, metadata: dict[str, Any]
) -> tuple[State, int]:
    """Returns the state to start from and its step.

    The state is that of the newest checkpoint that is not damaged, else fresh with the weights of
    `checkpoint.init_from`, else fresh. A damaged checkpoint is moved aside, unless it is the only one.

    Args:
      metadata: what the checkpoints of this run record (`data.run_metadata`).

    Raises:
      UserError: the only checkpoint is damaged, or a checkpoint belongs to other data or another model.
    """
    steps = checkpoints.steps()
    while steps:
        try:
            return _resume(config, program, checkpoints, metadata, step=steps[-1]), steps[-1]
        except Damaged as error:
            if len(steps) == 1:
                raise UserError(f"{error}; there is no other checkpoint: remove it to start from step 0") from error
            aside = checkpoints.set_aside(steps.pop())
            text = f"{error}; it was moved to {aside}, and the previous checkpoint is of step {steps[-1]}"
            if jax.process_count() > 1:  # other processes may have read theirs, so all must start again
                distributed.end(distributed.LOST, f"error: {text}; run the same command again")
            print(f"warning: {text}", file=sys.stderr, flush=True)
    state = program.init(jax.random.key(config.seed))
    if config.checkpoint.init_from is not None:
        weights, _ = restore_params(workdir_lib.path(config.checkpoint.init_from), model, program.mesh)
        state = {**state, "params": weights}
    return state, 0


def _resume(
    config: Config, program: Program, checkpoints: Checkpoints, metadata: dict[str, Any], *, step: int
) -> State:
    """Restores a checkpoint, if the run's data are the same as when it began."""
    before = checkpoints.metadata(step)["data"]
    if before != metadata["data"]:
        raise UserError(
            f"{config.data.path}: not the data that this run began with: their fingerprint is {metadata['data']}, the"
            f" checkpoint has {before}; restore the original data or choose another --workdir"
        )
    return checkpoints.restore(step, program.state)
