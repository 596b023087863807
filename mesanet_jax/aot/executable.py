"""Saves a compiled step to a file, made on a machine without a TPU, and loads it where there is one.

The first line of the file is JSON that identifies the program. The rest is JAX's serialisation, which is a pickle, so
load only files that you made yourself. `load` compares everything that decides which program `train` would compile, and
refuses the file if anything differs.
"""

import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import serialize_executable

import mesanet_jax
import mesanet_kernels
from mesanet_jax import schema
from mesanet_jax.aot.topology import describe
from mesanet_jax.atomic import write_atomically
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config
from mesanet_jax.training.step import Program

# The fields that do not change the compiled step; all others are compared.
FREE = (
    "name", "seed", "compile_cache", "checkpoint.", "log.", "profile.", "processes.",
    "mesh.",  # the resulting mesh is compared instead
    "data.path", "data.split", "data.validation_split", "data.seed",
    "train.nonfinite", "train.max_skips", "train.log_every", "train.eval_every", "train.eval_batches",
    "train.executable", "train.watchdog_minutes",
)  # fmt: skip


def save(path: pathlib.Path, executable: jax.stages.Compiled, config: Config, mesh: jax.sharding.Mesh) -> None:
    """Writes the compiled step of `config` on `mesh` to a file.

    Raises:
      UserError: the file cannot be written.
    """
    payload, _, _ = serialize_executable.serialize(executable)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(identity(config, mesh)).encode() + b"\n" + payload)
    except OSError as error:
        raise UserError(f"--save={path}: {error.strerror or error}") from error


def load(path: pathlib.Path, config: Config, program: Program) -> Callable:
    """Returns the step saved in `path`, which can be called in place of `program.train`.

    Raises:
      UserError: there is no such file, or `config` would compile to another program here.
    """
    where = f"config.train.executable={path}"
    try:
        head, _, payload = path.read_bytes().partition(b"\n")
        saved = schema.flatten(json.loads(head))
    except OSError as error:
        raise UserError(f"{where}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{where}: this file was not written by mesanet_jax.compile --save") from error
    here = schema.flatten(json.loads(json.dumps(identity(config, program.mesh))))
    differing = [key for key in sorted(saved.keys() | here.keys()) if saved.get(key) != here.get(key)]
    if differing:
        lines = "; ".join(f"{key}: {saved.get(key)} in the file, {here.get(key)} here" for key in differing)
        raise UserError(f"{where}: holds another program ({lines}); compile it again, or leave the field out")
    out = jax.eval_shape(program.train, program.state, program.batch)
    return serialize_executable.deserialize_and_load(
        payload,
        jax.tree.structure(((program.state, program.batch), {})),
        jax.tree.structure(out),
        execution_devices=list(program.mesh.devices.flat),
    )


def identity(config: Config, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Returns everything that decides which program the step compiles to."""
    devices = describe(mesh.devices.flat)
    fields = schema.flatten(config.to_dict())
    return {
        "config": {path: value for path, value in fields.items() if not path.startswith(FREE)},
        "mesh": dict(mesh.shape),
        "devices": devices,
        "versions": versions("TPU" in devices["kind"]),
        "source": _source(),
    }


def versions(tpu: bool) -> dict[str, str]:
    """Returns the versions of the compiler's packages: jax, jaxlib, and for TPUs libtpu."""
    packages = ("jax", "jaxlib", "libtpu") if tpu else ("jax", "jaxlib")
    return {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def _source() -> str:
    """Returns a hash of this project's code; a step compiled from other code would silently train another model."""
    digest = hashlib.sha256()
    for package in (mesanet_jax, mesanet_kernels):
        root = pathlib.Path(str(package.__file__)).parent
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
