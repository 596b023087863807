"""Declares the fields of a training run, and checks the values that depend on several fields.

The fields of mixers and models are declared where they are implemented (`FIELDS` of each class) and added here.
"""

import ml_collections

from mesanet_jax import cli
from mesanet_jax import schema as schema_lib
from mesanet_jax.errors import UserError
from mesanet_jax.models import MODELS
from mesanet_jax.schema import Config, Field
from mesanet_jax.training import muon, optimizer, schedule

RUN = {
    "name": Field("run", "name of the run in reports and plots"),
    "seed": Field(0, "seed of the initial parameters", at_least=0, fixed=True),
    "steps": Field(
        28_610,
        "number of training steps (parameter updates); the schedules end at the last one",
        at_least=1,
        fixed=True,
    ),
    "data": {
        "path": Field("", "directory written by mesanet_jax.prepare: a local path or a URL such as gs://BUCKET/DIR"),
        "split": Field("train", "split to train on", fixed=True),
        "validation_split": Field("validation", "split to evaluate on"),
        "seq_len": Field(
            2048,
            "tokens per row; must be the row length that the data were prepared with",
            at_least=1,
            fixed=True,
        ),
        "batch_size": Field(256, "rows per training step, over all devices", at_least=1, fixed=True),
        "seed": Field(0, "seed of the order in which the rows are read", at_least=0, fixed=True),
    },
    "optimizer": {
        "name": Field(
            "adamw",
            "update rule: adamw for all parameters, or muon for the matrices of the blocks and adamw for the rest",
            choices=("adamw", "muon"),
            fixed=True,
        ),
        "learning_rate": Field(1e-3, "peak learning rate", at_least=0.0, fixed=True),
        "schedule": Field(
            "cosine",
            "learning rate after the warm-up: cosine falls until the last step; warmdown is constant and falls linearly"
            " in the last part of the run",
            choices=tuple(schedule.SCHEDULES),
            fixed=True,
        ),
        "warmup_steps": Field(
            2000,
            "number of steps in which the learning rate rises linearly to its peak",
            at_least=0,
            fixed=True,
        ),
        "warmup_from": Field(1e-6, "learning rate of the first step of the warm-up", at_least=0.0, fixed=True),
        "warmdown_ratio": Field(
            0.65,
            "share of the run that is the warm-down of schedule=warmdown",
            above=0.0,
            below=1.0,
            fixed=True,
        ),
        "final_ratio": Field(
            0.1,
            "learning rate at the last step, as a fraction of the peak",
            at_least=0.0,
            fixed=True,
        ),
        "b1": Field(0.9, "decay of AdamW's running mean of the gradient", at_least=0.0, below=1.0, fixed=True),
        "b2": Field(
            0.98,
            "decay of AdamW's running mean of the squared gradient",
            at_least=0.0,
            below=1.0,
            fixed=True,
        ),
        "eps": Field(
            1e-8,
            "added to the root of the mean squared gradient in AdamW's denominator",
            at_least=0.0,
            fixed=True,
        ),
        "weight_decay": Field(
            0.1,
            "decoupled weight decay of AdamW; multiplied by the learning rate",
            at_least=0.0,
            fixed=True,
        ),
        "no_decay": Field(
            ("embedding", "head", "scale", "bias", "lambda_raw", "A_log", "D", "mixing", "log_temperature"),
            "parameters without weight decay: those with one of these names in their path",
            fixed=True,
        ),
        "clip_norm": Field(
            1.0,
            "gradients with a larger global norm are scaled down to this norm; none: no clipping",
            kind=float,
            above=0.0,
            fixed=True,
        ),
        "groups": optimizer.GROUPS,
        "muon": muon.FIELDS,
    },
    "train": {
        "rows_per_device": Field(
            16,
            "largest number of rows that a device processes at once; the gradients of a larger batch are accumulated",
            at_least=1,
        ),
        "nonfinite": Field(
            "stop",
            "what to do if the loss, the gradient or the updated parameters are not finite: stop the run, or skip the"
            " update",
            choices=("stop", "skip"),
        ),
        "max_skips": Field(
            10,
            "with nonfinite=skip: number of consecutive updates that may be skipped before the run stops",
            at_least=1,
        ),
        "watchdog_minutes": Field(
            20.0,
            "the run ends if no step finishes for so many minutes (four times as many for the first step); none: never",
            kind=float,
            above=0.0,
        ),
        "log_every": Field(10, "number of steps between log lines", at_least=1),
        "eval_every": Field(
            1000,
            "number of steps between evaluations on the validation split; none: only after the last step",
            kind=int,
            at_least=1,
        ),
        "eval_batches": Field(
            20,
            "number of batches per evaluation during training; none: the whole split",
            kind=int,
            at_least=1,
        ),
        "executable": Field(
            None,
            "file with the compiled training step of exactly this run, written by mesanet_jax.compile --save",
            kind=str,
        ),
    },
    "processes": {
        "join_seconds": Field(
            600,
            "how many seconds the processes of a run wait for each other at the start",
            at_least=1,
        ),
        "heartbeat_seconds": Field(
            60,
            "the other processes end if one of them is silent for so many seconds",
            at_least=5,
        ),
    },
    "checkpoint": {
        "every": Field(1000, "number of steps between checkpoints", at_least=1),
        "keep_last": Field(3, "number of newest checkpoints to keep", at_least=1),
        "keep_every": Field(
            None,
            "also keep every checkpoint whose step is a multiple of this; none: keep only the newest",
            kind=int,
            at_least=1,
        ),
        "init_from": Field(
            None,
            "workdir of another run, whose newest parameters this run starts from",
            kind=str,
            fixed=True,
        ),
    },
    "mesh": {
        "data": Field(
            -1, "number of replicas of the model, which split the rows of a batch; -1: all remaining devices"
        ),
        "fsdp": Field(1, "number of devices that split the rows of a batch, the parameters and the optimizer state"),
        "tensor": Field(1, "number of devices that split the heads, the feed-forward width and the vocabulary"),
        "sequence": Field(1, "number of devices that split the time axis of each row; must divide data.seq_len"),
    },
    "log": {
        "tensorboard": Field(True, "write TensorBoard events to the workdir"),
        "wandb_project": Field(
            None,
            "Weights & Biases project to report to; needs the wandb package",
            kind=str,
        ),
        "progress": Field(True, "show a live progress bar on a terminal; false: print lines"),
    },
    "profile": {
        "start": Field(
            None,
            "first step of a profiler trace, which is written to the workdir; none: no trace",
            kind=int,
            at_least=1,
        ),
        "steps": Field(5, "number of steps in the profiler trace", at_least=1),
    },
    "compile_cache": Field(
        "cache",
        "directory in which compiled programs are kept, relative to the workdir; none: no cache",
        kind=str,
    ),
}


def schema(kind: str, pattern: tuple[str, ...]) -> schema_lib.Schema:
    """Returns the fields of a run whose model is of this kind, with the mixers of `pattern`.

    Raises:
      UserError: there is no such kind or mixer.
    """
    if kind not in MODELS:
        raise UserError(f"config.model.kind={kind}: no such model; choose from {', '.join(sorted(MODELS))}")
    mixers = MODELS[kind].MIXERS
    for name in (name for name in pattern if name not in mixers):
        raise UserError(f"config.model.pattern: no mixer {name!r}; choose from {', '.join(sorted(mixers))}")
    model = {
        "kind": Field("language_model", "kind of model", choices=tuple(MODELS), fixed=True),
        "pattern": Field(
            ("mesa",),
            "mixers of successive blocks, repeated over the depth: hawk,mesa alternates them; with kind=pha: the mixers"
            " that every block contains",
            fixed=True,
        ),
        **MODELS[kind].FIELDS,
        **{name: mixers[name].FIELDS for name in sorted(set(pattern))},
    }
    return {**RUN, "model": model}


def default_config(pattern: tuple[str, ...], *, kind: str = "language_model") -> Config:
    """Returns the config with all defaults; config files set values on it."""
    config = schema_lib.build(schema(kind, pattern))
    config.model.pattern, config.model.kind = pattern, kind
    return config


def load(spec: str, overrides: dict[str, str]) -> Config:
    """Returns the checked config of `--config=SPEC` with overrides applied.

    Raises:
      UserError: something is misspelt, has the wrong type or is impossible. This initialises no device.
    """
    config = schema_lib.load_file(spec)
    if not _has_model(config):
        raise UserError(f"--config={spec}: its get_config returns no training config; see configs/mesanet.py")
    if "model.pattern" in overrides:  # first, because the pattern decides which fields there are
        _add_mixers(config, overrides["model.pattern"])
    cli.apply_overrides(config, schema(config.model.kind, config.model.pattern), overrides)
    validate(config)
    return config


def _has_model(config: object) -> bool:
    return isinstance(config, ml_collections.ConfigDict) and "model" in config


def from_saved(saved: dict, overrides: dict[str, str], *, origin: str) -> Config:
    """Returns the checked config of saved values with overrides applied.

    Args:
      saved: {path: value}, as from `schema.read_json`; fields that are missing have their defaults.
      origin: the name of the file, for errors.

    Raises:
      UserError: the values are not a training config of this version.
    """
    try:
        kind, pattern = saved["model.kind"], saved["model.pattern"]
    except KeyError as error:
        raise UserError(f"{origin}: not a saved training config, it lacks {error.args[0]}") from error
    fields = schema(kind, pattern)
    config = schema_lib.build(fields)
    known = schema_lib.flatten(fields)
    for path in saved.keys() - known.keys():
        raise UserError(f"{origin}: config.{path} is not a field in this version of mesanet_jax")
    config.update_from_flattened_dict(saved)
    cli.apply_overrides(config, fields, overrides)
    validate(config)
    return config


def _add_mixers(config: Config, pattern_text: str) -> None:
    """Sets the pattern, and gives the config the fields of the pattern's mixers, and of no other mixers."""
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
    """Raises UserError for a value that is not allowed by its field, or by the other fields."""
    schema_lib.check(config, schema(config.model.kind, config.model.pattern))
    model = config.model
    if not model.pattern:
        raise UserError("config.model.pattern: is empty; name at least one mixer")
    optimizer.check(config)
    for axis, size in config.mesh.items():
        if size < 1 and not (axis == "data" and size == -1):
            raise UserError(
                f"config.mesh.{axis}={size}: must be at least 1"
                + (", or -1 for all remaining devices" if axis == "data" else "")
            )
    if config.data.seq_len % config.mesh.sequence:
        raise UserError(
            f"config.data.seq_len={config.data.seq_len}: not a multiple of config.mesh.sequence={config.mesh.sequence}"
        )
    MODELS[model.kind].check(model)
    for name in model.pattern:
        MODELS[model.kind].MIXERS[name].check(model)


def differences(saved: dict, config: Config) -> tuple[list[str], list[str]]:
    """Compares the saved config of a workdir with the config that resumes it.

    Returns:
      (refused, reported): a line for each field that differs but is fixed, and for each other field that differs.
    """
    fields = schema_lib.flatten(schema(config.model.kind, config.model.pattern))
    now = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in schema_lib.flatten(config.to_dict()).items()
    }
    refused, reported = [], []
    for path in sorted(saved.keys() | now.keys()):
        # A run that began before a field was introduced had its default.
        absent = fields[path].default if path in fields else "(absent)"
        before, after = saved.get(path, absent), now.get(path, "(absent)")
        if before != after:
            fixed = path not in fields or fields[path].fixed
            (refused if fixed else reported).append(f"config.{path}: {before} in the workdir, {after} now")
    return refused, reported
