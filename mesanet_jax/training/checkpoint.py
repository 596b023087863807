"""Checkpoints by Orbax: asynchronous, atomic, kept by two rules, and compared leaf by leaf before anything is loaded."""

import contextlib
import json
import logging
import re
import shutil
import time
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from mesanet_jax import mesh as mesh_lib
from mesanet_jax.errors import UserError
from mesanet_jax.models import Model
from mesanet_jax.runtime import workdir as workdir_lib
from mesanet_jax.training.checksum import digests

DIRECTORY = "checkpoints"
SHOWN = 12  # mismatched leaves listed in an error
# What tensorstore says of files that are cut, changed or not there; of a storage that cannot be reached it says others.
_DAMAGE = re.compile(r"(NOT_FOUND|OUT_OF_RANGE|DATA_LOSS|FAILED_PRECONDITION):")


class Damaged(UserError):
    """Files of a finished checkpoint are not as they were written."""


class Checkpoints:
    """The checkpoints of a workdir: a training state, and a JSON note of what it belongs to.

    Parameters are an item of their own, so that evaluation reads them without the optimizer.
    """

    def __init__(self, workdir: epath.Path, *, keep_last: int | None = None, keep_every: int | None = None):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep_last, keep_period=keep_every)
        handlers = {name: ocp.StandardCheckpointHandler() for name in ("params", "training")}
        handlers["about"] = ocp.JsonCheckpointHandler()
        directory = workdir_lib.absolute(workdir / DIRECTORY)
        # Orbax logs with a traceback, in its threads, what it raises here as well; the one line of ours says it.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._directory = directory
        # A bucket's libraries each raise their own kinds.
        self._failures = (OSError, ValueError) if workdir_lib.is_local(directory) else Exception
        self._saving: int | None = None  # the step that is being written in the background
        with self._named_failure():
            self._manager = ocp.CheckpointManager(directory, options=options, item_handlers=handlers)

    def steps(self) -> list[int]:
        """Steps that are wholly written, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state, about: dict[str, Any]) -> None:
        """Starts a save; returns once the state is copied. A failure of the save before is raised here."""
        items = _items(state)
        args = ocp.args.Composite(
            **{name: ocp.args.StandardSave(item) for name, item in items.items()},
            about=ocp.args.JsonSave(about | {"digests": _digests(items)}),
        )
        self.wait()
        self._saving = step
        with self._named_failure():
            self._check_space(state)
            self._manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Returns once every started save is durable.

        Raises:
          UserError: if it failed (a full disk, say); the checkpoints before it are untouched.
        """
        with self._named_failure():
            self._manager.wait_until_finished()
        self._saving = None

    def close(self) -> None:
        with self._named_failure():
            self._manager.close()

    def _check_space(self, state) -> None:
        """A full disk is met before a byte is written; a write that runs into it leaves tracebacks of its threads."""
        if not workdir_lib.is_local(self._directory):
            return  # a bucket is never full
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise OSError(f"needs {needed / 1e6:,.0f} MB, the disk has {free / 1e6:,.0f} MB free")

    @contextlib.contextmanager
    def _named_failure(self):
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
                " mend that (make room, if it is full) and run the same command again"
            ) from error

    def about(self, step: int) -> dict[str, Any]:
        """The JSON note saved with `step`.

        Raises:
          Damaged: if it is not there any more, as it was written.
        """
        with self._named_damage(step):
            return self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]

    def set_aside(self, step: int) -> epath.Path:
        """Moves a damaged checkpoint out of the way, to where this says; nothing is deleted."""
        place = self._directory.parent / f"damaged-{step}-{time.strftime('%Y%m%d-%H%M%S')}"
        with contextlib.suppress(FileNotFoundError):  # another process was first
            (self._directory / str(step)).rename(place)
        self._manager.reload()
        return place

    @contextlib.contextmanager
    def _named_damage(self, step: int):
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # Orbax wraps what tensorstore raises, and json and missing items raise their own
            causes = [error, error.__cause__, error.__context__]
            missing = any(isinstance(cause, (KeyError, FileNotFoundError, json.JSONDecodeError)) for cause in causes)
            told = next((str(cause) for cause in causes if _DAMAGE.match(str(cause))), None)
            if not missing and told is None:
                raise
            text = " ".join((told or f"{type(error).__name__}: {error}").split())[:200]
            raise Damaged(f"{self._directory}: checkpoint {step} is damaged: {text}") from error

    def restore(self, step: int, target):
        """The training state of `step`, laid out as `target` (shape structs with shardings) asks.

        Raises:
          UserError: it is of another model; Damaged: files of it are missing, cut or changed.
        """
        items = self._restore(step, _items(target))
        return {**items["training"], "params": items["params"]}

    def restore_params(self, step: int, target):
        """The parameters of `step` alone."""
        return self._restore(step, {"params": target})["params"]

    def _restore(self, step: int, targets: dict[str, Any]):
        with self._named_damage(step):
            metadata = {name: tree for name, tree in self._manager.item_metadata(step).items() if name in targets}
            empty = [name for name in targets if not _leaves(metadata[name])]
        if empty:
            raise Damaged(f"{self._directory}: checkpoint {step} is damaged: no description of its {empty[0]}")
        for name, target in targets.items():
            if problems := differences(metadata[name], target):
                more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
                raise UserError(f"checkpoint {step} does not fit this model: {'; '.join(problems[:SHOWN])}{more}")
        args = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
        with self._named_damage(step):
            items = dict(self._manager.restore(step, args=ocp.args.Composite(**args)).items())
        written, read = self.about(step).get("digests"), _digests(items)
        for name, target in targets.items() if written else ():  # checkpoints of earlier versions have none
            differing = [path for path, one, other in zip(_leaves(target), written[name], read[name]) if one != other]
            if differing:
                raise Damaged(
                    f"{self._directory}: checkpoint {step} is damaged: {name}/{differing[0]} has other values"
                )
        return items


def _items(state) -> dict[str, Any]:
    """A state as the checkpoint has it: the parameters, and what only training needs."""
    return {"params": state["params"], "training": {name: leaf for name, leaf in state.items() if name != "params"}}


def _digests(items: dict[str, Any]) -> dict[str, list[int]]:
    """By item, a number for each of its leaves."""
    return {
        name: [int(value) for value in jax.tree.leaves(tree)] for name, tree in jax.device_get(digests(items)).items()
    }


def differences(saved, target) -> list[str]:
    """Each leaf whose path, shape or dtype differs between two trees, as one phrase."""
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


def _leaves(tree) -> dict[str, str]:
    """{path: dtype[shape]}; a path is spelt alike for dicts, tuples and named tuples, as Orbax's metadata has them."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    spell = lambda entry: str(next(getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name)))
    return {"/".join(map(spell, path)): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in flat}


def restore_params(workdir: epath.Path, model: Model, mesh: jax.sharding.Mesh, *, step: int | None = None):
    """The parameters (alone) of a workdir's checkpoint, the newest unless `step` names one: (params, step).

    Raises:
      UserError: no checkpoint there, not that step, or a tree that does not fit the model.
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
        raise Damaged(f"{error}; there are the steps {steps}: choose another by --step") from error
    checkpoints.close()
    return params, chosen
