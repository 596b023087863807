"""Every field of a training run, declared and explained once, and the checks that span fields.

The sections of mixers and models are declared where they are implemented (`FIELDS` of each class) and joined here.
"""

import ml_collections

from mesanet_jax import cli
from mesanet_jax import schema as schema_lib
from mesanet_jax.errors import UserError
from mesanet_jax.models import MODELS
from mesanet_jax.schema import Config, Field
from mesanet_jax.training import muon, optimizer, schedule

RUN = {
    "name": Field("run", "label of this run in reports"),
    "seed": Field(0, "seed of the initial parameters", at_least=0, fixed=True),
    "steps": Field(28_610, "optimizer updates in the whole run; the learning rate ends there", at_least=1, fixed=True),
    "data": {
        "path": Field("", "directory written by mesanet_jax.prepare (local or any fsspec URL)"),
        "split": Field("train", "split to train on", fixed=True),
        "validation_split": Field("validation", "split to evaluate on"),
        "seq_len": Field(2048, "tokens of a row that the model reads; must be that of the data", at_least=1, fixed=True),
        "batch_size": Field(256, "rows of a step, over all devices", at_least=1, fixed=True),
        "seed": Field(0, "seed of the order of rows", at_least=0, fixed=True),
    },
    "optimizer": {
        "name": Field("adamw", "update rule; muon: Muon for the matrices of the blocks, AdamW for the rest", choices=("adamw", "muon"), fixed=True),
        "learning_rate": Field(1e-3, "peak learning rate", at_least=0.0, fixed=True),
        "schedule": Field("cosine", "after the warm-up: a cosine, or constant and a linear warm-down", choices=tuple(schedule.SCHEDULES), fixed=True),
        "warmup_steps": Field(2000, "steps of linear warm-up", at_least=0, fixed=True),
        "warmup_from": Field(1e-6, "learning rate of the first step", at_least=0.0, fixed=True),
        "warmdown_ratio": Field(0.65, "share of the run that is the warm-down", above=0.0, below=1.0, fixed=True),
        "final_ratio": Field(0.1, "learning rate at the end over the peak", at_least=0.0, fixed=True),
        "b1": Field(0.9, "decay of the gradient's mean", at_least=0.0, below=1.0, fixed=True),
        "b2": Field(0.98, "decay of the squared gradient's mean", at_least=0.0, below=1.0, fixed=True),
        "eps": Field(1e-8, "added to the root of the second moment", at_least=0.0, fixed=True),
        "weight_decay": Field(0.1, "decoupled weight decay, times the learning rate", at_least=0.0, fixed=True),
        "no_decay": Field(
            ("embedding", "head", "scale", "bias", "lambda_raw", "A_log", "D", "mixing", "log_temperature"),
            "parameters without weight decay, by a component of their path",
            fixed=True,
        ),
        "clip_norm": Field(1.0, "gradients are scaled down to this global norm; none: no clipping", kind=float, above=0.0, fixed=True),
        "groups": optimizer.GROUPS,
        "muon": muon.FIELDS,
    },
    "train": {
        "rows_per_device": Field(16, "rows a device holds at once; a larger batch is accumulated inside the step", at_least=1),
        "nonfinite": Field("stop", "a loss or gradient that is not finite: stop the run, or skip the update", choices=("stop", "skip")),
        "max_skips": Field(10, "with skip: consecutive skipped updates before the run stops", at_least=1),
        "watchdog_minutes": Field(20.0, "without a finished step for so long (4 times as long for the first) the run ends; none: never", kind=float, above=0.0),
        "log_every": Field(10, "steps between log lines", at_least=1),
        "eval_every": Field(1000, "steps between evaluations; none: only at the end", kind=int, at_least=1),
        "eval_batches": Field(20, "batches of an evaluation during training; none: the whole split", kind=int, at_least=1),
        "executable": Field(None, "compiled step to load, written by mesanet_jax.compile --save for this very run", kind=str),
    },
    "processes": {
        "join_seconds": Field(600, "how long processes wait for each other at the start", at_least=1),
        "heartbeat_seconds": Field(60, "silence of a process after which the others end", at_least=5),
    },
    "checkpoint": {
        "every": Field(1000, "steps between checkpoints", at_least=1),
        "keep_last": Field(3, "newest checkpoints kept", at_least=1),
        "keep_every": Field(None, "also keep every checkpoint at a multiple of this many steps", kind=int, at_least=1),
        "init_from": Field(None, "workdir whose weights (alone) start this run", kind=str, fixed=True),
    },
    "mesh": {
        "data": Field(-1, "replicas of the model; -1: all devices that remain"),
        "fsdp": Field(1, "devices that share parameters and optimizer state by rows"),
        "tensor": Field(1, "devices that share heads, feed-forward width and vocabulary"),
        "sequence": Field(1, "devices that share the time of a row, a span each"),
    },
    "log": {
        "tensorboard": Field(True, "write TensorBoard events to the workdir"),
        "wandb_project": Field(None, "Weights & Biases project to report to; needs the wandb package", kind=str),
        "progress": Field(True, "show a live progress bar"),
    },
    "profile": {
        "start": Field(None, "first step of a profiler trace, written to the workdir", kind=int, at_least=1),
        "steps": Field(5, "steps of the trace", at_least=1),
    },
    "compile_cache": Field("cache", "directory of compiled programs, relative to the workdir; none: no cache", kind=str),
}  # fmt: skip


def schema(kind: str, pattern: tuple[str, ...]) -> schema_lib.Schema:
    """The fields of a run whose model is `kind` with the mixers of `pattern`."""
    if kind not in MODELS:
        raise UserError(f"config.model.kind={kind}: no such model; choose from {', '.join(sorted(MODELS))}")
    mixers = MODELS[kind].MIXERS
    for name in (name for name in pattern if name not in mixers):
        raise UserError(f"config.model.pattern: no mixer {name!r}; choose from {', '.join(sorted(mixers))}")
    model = {
        "kind": Field("language_model", "model class", choices=tuple(MODELS), fixed=True),
        "pattern": Field(
            ("mesa",),
            "mixers by depth, repeated: (hawk, mesa) alternates them; of pha: those in every block",
            fixed=True,
        ),
        **MODELS[kind].FIELDS,
        **{name: mixers[name].FIELDS for name in sorted(set(pattern))},
    }
    return {**RUN, "model": model}


def default_config(pattern: tuple[str, ...], *, kind: str = "language_model") -> Config:
    """The defaults of a run; config files set values on it."""
    config = schema_lib.build(schema(kind, pattern))
    config.model.pattern, config.model.kind = pattern, kind
    return config


def load(spec: str, overrides: dict[str, str]) -> Config:
    """The checked config of `--config=SPEC` and its overrides.

    Raises:
      UserError: for whatever is misspelt, mistyped or impossible, before any device is touched.
    """
    config = schema_lib.load_file(spec)
    if not isinstance(config, ml_collections.ConfigDict) or "model" not in config:
        raise UserError(f"--config={spec}: get_config returns no training config; see configs/mesanet.py")
    if "model.pattern" in overrides:  # first, since the pattern decides which mixers have fields
        _add_mixers(config, overrides["model.pattern"])
    cli.apply_overrides(config, schema(config.model.kind, config.model.pattern), overrides)
    validate(config)
    return config


def from_saved(saved: dict, overrides: dict[str, str], *, origin: str) -> Config:
    """The checked config of a saved flat {path: value} (`schema.read_json`), plus overrides."""
    try:
        kind, pattern = saved["model.kind"], saved["model.pattern"]
    except KeyError as error:
        raise UserError(f"{origin}: not a saved training config, it has no {error.args[0]}") from error
    fields = schema(kind, pattern)
    config = schema_lib.build(fields)
    known = schema_lib.flatten(fields)
    for path in saved.keys() - known.keys():
        raise UserError(f"{origin}: config.{path} is not a field of this version")
    config.update_from_flattened_dict(saved)
    cli.apply_overrides(config, fields, overrides)
    validate(config)
    return config


def _add_mixers(config: Config, pattern_text: str) -> None:
    pattern = schema_lib.parse(Field(("",), ""), pattern_text, path="model.pattern")
    defaults = default_config(pattern, kind=config.model.kind).model
    with config.unlocked():
        for name in pattern:
            if name not in config.model:
                config.model[name] = defaults[name]
        for name in set(MODELS[config.model.kind].MIXERS) & set(config.model) - set(pattern):
            del config.model[name]
        config.model.pattern = pattern


def validate(config: Config) -> None:
    """The checks of single fields, then those that span fields."""
    schema_lib.check(config, schema(config.model.kind, config.model.pattern))
    model = config.model
    if not model.pattern:
        raise UserError("config.model.pattern: names no mixer")
    optimizer.check(config)
    for axis, size in config.mesh.items():
        if size < 1 and not (axis == "data" and size == -1):
            raise UserError(
                f"config.mesh.{axis}={size}: must be at least 1" + (", or -1 for the rest" if axis == "data" else "")
            )
    if config.data.seq_len % config.mesh.sequence:
        raise UserError(
            f"config.data.seq_len={config.data.seq_len}: not a multiple of config.mesh.sequence={config.mesh.sequence}"
        )
    MODELS[model.kind].check(model)
    for name in model.pattern:
        MODELS[model.kind].MIXERS[name].check(model)


def differences(saved: dict, config: Config) -> tuple[list[str], list[str]]:
    """What differs between a workdir's saved config and this one: (refused on resume, merely reported), one line each."""
    fields = schema_lib.flatten(schema(config.model.kind, config.model.pattern))
    now = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in schema_lib.flatten(config.to_dict()).items()
    }
    refused, reported = [], []
    for path in sorted(saved.keys() | now.keys()):
        # A run that began before a field was declared had its default.
        absent = fields[path].default if path in fields else "(absent)"
        before, after = saved.get(path, absent), now.get(path, "(absent)")
        if before != after:
            fixed = path not in fields or fields[path].fixed
            (refused if fixed else reported).append(f"config.{path}: {before} in the workdir, {after} now")
    return refused, reported
