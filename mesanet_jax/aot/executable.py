"""A compiled step as a file: made where there is no TPU, loaded by `train` where there is one.

One line of JSON says what the program is; the rest is jax's serialisation of it, which is a pickle: load only what you
made. Whatever would make it another program than the one `train` would compile is compared, and a difference refused.
"""

import hashlib
import importlib.metadata
import json
import pathlib

import jax
from jax.experimental import serialize_executable

import mesanet_jax
import mesanet_kernels
from mesanet_jax import schema
from mesanet_jax.aot.topology import describe
from mesanet_jax.atomic import write_atomically
from mesanet_jax.errors import UserError

# Fields that leave the compiled step as it is; all others are compared.
FREE = (
    "name", "seed", "compile_cache", "checkpoint.", "log.", "profile.", "processes.", "mesh.",  # compared as it came out
    "data.path", "data.split", "data.validation_split", "data.seed",
    "train.nonfinite", "train.max_skips", "train.log_every", "train.eval_every", "train.eval_batches", "train.executable",
    "train.watchdog_minutes",
)  # fmt: skip


def save(path: pathlib.Path, executable: jax.stages.Compiled, config, mesh: jax.sharding.Mesh) -> None:
    """Writes the compiled step of `config` on `mesh`.

    Raises:
      UserError: the file cannot be written.
    """
    payload, _, _ = serialize_executable.serialize(executable)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(identity(config, mesh)).encode() + b"\n" + payload)
    except OSError as error:
        raise UserError(f"--save={path}: {error.strerror or error}") from error


def load(path: pathlib.Path, config, program):
    """The step saved in `path`, to be called in place of `program.train`.

    Raises:
      UserError: there is none, or it is not the program that `config` would compile to here.
    """
    where = f"config.train.executable={path}"
    try:
        head, _, payload = path.read_bytes().partition(b"\n")
        saved = schema.flatten(json.loads(head))
    except OSError as error:
        raise UserError(f"{where}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{where}: was not written by mesanet_jax.compile --save") from error
    here = schema.flatten(json.loads(json.dumps(identity(config, program.mesh))))
    differing = [key for key in sorted(saved.keys() | here.keys()) if saved.get(key) != here.get(key)]
    if differing:
        lines = "; ".join(f"{key}: {saved.get(key)} there, {here.get(key)} here" for key in differing)
        raise UserError(f"{where}: another program ({lines}); compile it again, or leave the field out")
    out = jax.eval_shape(program.train, program.state, program.batch)
    return serialize_executable.deserialize_and_load(
        payload,
        jax.tree.structure(((program.state, program.batch), {})),
        jax.tree.structure(out),
        execution_devices=list(program.mesh.devices.flat),
    )


def identity(config, mesh: jax.sharding.Mesh) -> dict:
    """What decides which program the step compiles to."""
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
    """Of what compiles: jax, and libtpu where it is for TPUs."""
    packages = ("jax", "jaxlib", "libtpu") if tpu else ("jax", "jaxlib")
    return {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def _source() -> str:
    """A hash of this project's code: a step compiled from other code would train another model, silently."""
    digest = hashlib.sha256()
    for package in (mesanet_jax, mesanet_kernels):
        root = pathlib.Path(package.__file__).parent
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
