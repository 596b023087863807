"""Saves and restores checkpoints with Orbax.

Saves are asynchronous and atomic. Before anything is loaded, the saved tree is compared with the wanted one by names,
shapes and dtypes; after it is loaded, every array is compared with its checksum.
"""

import contextlib
import json
import logging
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from mesanet_jax import mesh as mesh_lib
from mesanet_jax.errors import UserError
from mesanet_jax.models import Model
from mesanet_jax.runtime import workdir as workdir_lib
from mesanet_jax.training.checksum import checksums

DIRECTORY = "checkpoints"
SHOWN = 12  # differing leaves listed in an error
# How tensorstore's errors begin for files that are cut, changed or missing. Its other errors mean that the storage
# cannot be reached.
_DAMAGE = re.compile(r"(NOT_FOUND|OUT_OF_RANGE|DATA_LOSS|FAILED_PRECONDITION):")


class Damaged(UserError):
    """The files of a finished checkpoint are not as they were written."""


class Checkpoints:
    """The checkpoints of a workdir. Each holds a training state and metadata of the run (`data.run_metadata`).

    The parameters are an item of their own, so that evaluation reads them without the optimizer state.

    Args:
      workdir: the directory of the run.
      keep_last: how many of the newest checkpoints to keep; None: all.
      keep_every: also keep every checkpoint whose step is a multiple of this.
    """

    def __init__(self, workdir: epath.Path, *, keep_last: int | None = None, keep_every: int | None = None):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep_last, keep_period=keep_every)
        handlers: dict[str, Any] = {name: ocp.StandardCheckpointHandler() for name in ("params", "training")}
        handlers["run"] = ocp.JsonCheckpointHandler()
        directory = workdir_lib.absolute(workdir / DIRECTORY)
        # What Orbax raises here, it also logs from its threads, with a traceback. Our one-line error is enough.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._directory = directory
        # The libraries for buckets raise their own exception types.
        self._failures = (OSError, ValueError) if workdir_lib.is_local(directory) else Exception
        self._saving: int | None = None  # the step that is being written in the background
        with self._write_errors():
            self._manager = ocp.CheckpointManager(directory, options=options, item_handlers=handlers)

    def steps(self) -> list[int]:
        """Returns the steps whose checkpoints are complete, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
        """Starts to save a state, and returns once it is copied.

        Raises:
          UserError: this save cannot start, or the previous one failed.
        """
        items = _items(state)
        args = ocp.args.Composite(
            **{name: ocp.args.StandardSave(item) for name, item in items.items()},
            run=ocp.args.JsonSave(metadata | {"checksums": _checksums(items)}),
        )
        self.wait()
        self._saving = step
        with self._write_errors():
            self._check_space(state)
            self._manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Waits until every started save is on durable storage.

        Raises:
          UserError: a save failed, because the disk is full for example; earlier checkpoints are untouched.
        """
        with self._write_errors():
            self._manager.wait_until_finished()
        self._saving = None

    def close(self) -> None:
        """Waits for started saves and ends the threads; all processes of a run close together."""
        with self._write_errors():
            self._manager.close()

    def _check_space(self, state: Any) -> None:
        """Raises OSError before the first byte is written if the disk has too little room.

        A write that fills the disk would leave tracebacks of Orbax's threads.
        """
        if not workdir_lib.is_local(self._directory):
            return  # a bucket is never full
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise OSError(f"needs {needed / 1e6:,.0f} MB, but the disk has only {free / 1e6:,.0f} MB free")

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Turns a failure to write into a UserError that names the step and the newest good checkpoint."""
        try:
            yield
        except UserError:
            raise
        except self._failures as error:
            text = " ".join(str(error).split())[:300]
            if self._saving is None:
                raise UserError(f"{self._directory}: {text}") from error
            step, self._saving = self._saving, None
            good = max(self._manager.all_steps(read=True), default="none")
            raise UserError(
                f"{self._directory}: checkpoint {step} could not be written: {text}; newest good checkpoint: {good};"
                " fix the cause (free some space if the disk is full) and run the same command again"
            ) from error

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata saved with `step`.

        Raises:
          Damaged: it is missing or changed.
        """
        with self._damage_errors(step):
            return self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]

    def set_aside(self, step: int) -> epath.Path:
        """Moves a damaged checkpoint out of the way and returns where it is now; nothing is deleted."""
        place = self._directory.parent / f"damaged-{step}-{time.strftime('%Y%m%d-%H%M%S')}"
        with contextlib.suppress(FileNotFoundError):  # another process has moved it already
            (self._directory / str(step)).rename(place)
        self._manager.reload()
        return place

    @contextlib.contextmanager
    def _damage_errors(self, step: int) -> Iterator[None]:
        """Turns an error that means missing or changed files into `Damaged`; other errors pass."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # Orbax wraps tensorstore's errors; JSON and missing items raise their own types
            causes = [error, error.__cause__, error.__context__]
            missing = any(isinstance(cause, (KeyError, FileNotFoundError, json.JSONDecodeError)) for cause in causes)
            message = next((str(cause) for cause in causes if _DAMAGE.match(str(cause))), None)
            if not missing and message is None:
                raise
            text = " ".join((message or f"{type(error).__name__}: {error}").split())[:200]
            raise self._damaged(step, text) from error

    def _damaged(self, step: int, text: str) -> Damaged:
        return Damaged(f"{self._directory}: checkpoint {step} is damaged: {text}")

    def restore(self, step: int, target: Any) -> Any:
        """Restores the training state of `step`.

        Args:
          target: shape structs with the shardings that the state shall have.

        Raises:
          UserError: the checkpoint belongs to another model.
          Damaged: files are missing, cut or changed.
        """
        items = self._restore(step, _items(target))
        return {**items["training"], "params": items["params"]}

    def restore_params(self, step: int, target: Any) -> Any:
        """Restores the parameters of `step` alone; arguments and errors as in `restore`."""
        return self._restore(step, {"params": target})["params"]

    def _restore(self, step: int, targets: dict[str, Any]) -> dict[str, Any]:
        with self._damage_errors(step):
            found = {name: tree for name, tree in self._manager.item_metadata(step).items() if name in targets}
            empty = [name for name in targets if not _leaves(found[name])]
        if empty:
            raise self._damaged(step, f"the description of {empty[0]} is missing")
        for name, target in targets.items():
            if problems := differences(found[name], target):
                more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
                raise UserError(f"checkpoint {step} does not fit this model: {'; '.join(problems[:SHOWN])}{more}")
        args = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
        with self._damage_errors(step):
            items = dict(self._manager.restore(step, args=ocp.args.Composite(**args)).items())
            written = self.metadata(step)["checksums"]
        self._compare(step, items, written)
        return items

    def _compare(self, step: int, items: dict[str, Any], written: dict[str, list[int]]) -> None:
        """Raises Damaged if an array does not have the checksum that was written."""
        for name, values in _checksums(items).items():
            for path, one, other in zip(_leaves(items[name]), written[name], values, strict=True):
                if one != other:
                    raise self._damaged(step, f"the values of {name}/{path} do not match their checksum")


def _items(state: Any) -> dict[str, Any]:
    """Splits a state into the items of a checkpoint: the parameters, and what only training needs."""
    return {"params": state["params"], "training": {name: leaf for name, leaf in state.items() if name != "params"}}


def _checksums(items: dict[str, Any]) -> dict[str, list[int]]:
    """Returns the checksums of the leaves of each item, in the order of the tree."""
    found = jax.device_get(checksums(items))
    return {name: [int(value) for value in jax.tree.leaves(tree)] for name, tree in found.items()}


def differences(saved: Any, target: Any) -> list[str]:
    """Lists the leaves whose path, shape or dtype differs between two trees, as one phrase each."""
    before, now = _leaves(saved), _leaves(target)
    lines = []
    for path in sorted(before.keys() | now.keys()):
        if path not in now:
            lines.append(f"{path} {before[path]} is only in the checkpoint")
        elif path not in before:
            lines.append(f"{path} {now[path]} is only in the model")
        elif before[path] != now[path]:
            lines.append(f"{path} is {before[path]} in the checkpoint, {now[path]} in the model")
    return lines


def _leaves(tree: Any) -> dict[str, str]:
    """Returns {path: dtype[shape]}, with the same paths for dicts, tuples and named tuples, as in Orbax's metadata."""

    def spell(entry: Any) -> str:
        return str(next(getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name)))

    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    return {"/".join(map(spell, path)): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in flat}


def restore_params(
    workdir: epath.Path, model: Model, mesh: jax.sharding.Mesh, *, step: int | None = None
) -> tuple[dict[str, Any], int]:
    """Restores the parameters of a workdir's checkpoint: of `step`, or of the newest one.

    Returns:
      (params, step).

    Raises:
      UserError: there is no checkpoint or not this one, or it does not fit the model.
    """
    if not (workdir / DIRECTORY).is_dir():
        raise UserError(f"{workdir}: no checkpoints here; train first with mesanet_jax.train --workdir={workdir}")
    checkpoints = Checkpoints(workdir)
    steps = checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        wanted = "no finished checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UserError(f"{workdir}: {wanted}; there are {steps or 'none'}")
    chosen = steps[-1] if step is None else step
    target = mesh_lib.with_shardings(model.shapes, mesh_lib.shardings(model.axes, model.shapes, mesh))
    try:
        params = checkpoints.restore_params(chosen, target)
    except Damaged as error:
        raise Damaged(f"{error}; there are checkpoints of the steps {steps}: choose another with --step") from error
    checkpoints.close()
    return params, chosen
