"""Configs: every mistake is an error of one line and exit status 2, before a device is initialised."""

import ast
import json
import os
import subprocess
import sys

import ml_collections
import pytest

from configs import mesanet, prepare, transformer
from mesanet_jax import cli, schema
from mesanet_jax import config as config_lib
from mesanet_jax.data.schema import SCHEMA
from mesanet_jax.errors import UserError
from mesanet_jax.mixers import MIXERS
from mesanet_jax.recipes import backbone
from tests.helpers.smoke import ROOT, smoke_config

SMOKE = "configs/mesanet.py:smoke"


def load(*overrides: str, spec: str = SMOKE):
    """The config of a command line with these `--config.` overrides."""
    _, parsed = cli.parse(cli.parser(""), [f"--config.{override}" for override in overrides])
    return config_lib.load(spec, parsed)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # a misspelt or misplaced field: the nearest one is named
        ("optimizer.weigth_decay=0.1", "no such field; did you mean --config.optimizer.weight_decay?"),
        ("learning_rate=1", "no such field; did you mean --config.optimizer.learning_rate?"),
        ("model.max_iters=3", "did you mean --config.model.mesa.max_iters?"),
        ("data.batchsize=3", "did you mean --config.data.batch_size?"),
        ("data=dir", "--config.data: no such field; did you mean"),
        ("xyzzy=1", "no such field; fields: "),
        ("model.attention.window=5", "no such field"),  # the pattern has no attention
        # a wrong type
        ("steps=many", "--config.steps=many: needs a whole number"),
        ("steps=1.5", "needs a whole number"),
        ("steps=1.5e0", "needs a whole number"),
        ("steps=1e400", "needs a whole number"),
        ("steps=none", "needs a whole number"),
        ("steps=", "needs a whole number"),
        ("optimizer.learning_rate=fast", "needs a finite number"),
        ("optimizer.learning_rate=nan", "needs a finite number"),
        ("optimizer.clip_norm=inf", "needs a finite number"),
        ("log.progress=maybe", "needs true or false"),
        ("checkpoint.keep_every=x", "needs a whole number"),
        # outside the choices or bounds
        ("model.remat=half", "config.model.remat=half: choose one of none, matmuls, mixer, full"),
        ("model.compute_dtype=float16", "choose one of bfloat16, float32"),
        ("optimizer.name=adam", "choose one of adamw"),
        ("model.kind=diffusion", "config.model.kind=diffusion: no such model; choose from language_model"),
        ("model.pattern=mesa,mesaa", "no mixer 'mesaa'; choose from attention, "),
        ("model.pattern=", "config.model.pattern: is empty; name at least one mixer"),
        ("steps=0", "config.steps=0: must be at least 1"),
        ("data.seed=-1", "config.data.seed=-1: must be at least 0"),
        ("train.eval_every=0", "must be at least 1"),
        ("profile.start=0", "must be at least 1"),
        # an impossible combination
        (
            "model.layers=1 model.pattern=mesa,attention",
            "layers=1: fewer than the 2 blocks of config.model.pattern",
        ),
        ("optimizer.warmup_steps=8", "warmup_steps=8: must be below config.steps=8"),
        ("mesh.tensor=0", "config.mesh.tensor=0: must be at least 1"),
        ("mesh.fsdp=-1", "config.mesh.fsdp=-1: must be at least 1"),
        ("mesh.data=0", "config.mesh.data=0: must be at least 1, or -1 for all remaining devices"),
        ("model.mesa.lambda_init=0.1", "lambda_init=0.1: must be above lambda_floor=0.25"),
        ("model.pattern=attention model.attention.kv_heads=3", "kv_heads=3: must divide config.model.heads=2"),
        # the command line itself
        ("steps=5 steps=6", "--config.steps: given twice, as 5 and as 6"),
    ],
)
def test_mistakes_are_one_line(override, message):
    with pytest.raises(UserError) as raised:
        load(*override.split(" "))
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("steps=1e3", 1000),
        ("optimizer.learning_rate=1", 1.0),
        ("optimizer.clip_norm=none", None),
        ("train.eval_every=None", None),
        ("train.eval_every=7", 7),
        ("checkpoint.init_from=some/dir", "some/dir"),
        ("log.progress=False", False),
        ("log.tensorboard=1", True),
        ("name=a=b", "a=b"),
        ("data.path=gs://bucket/a b", "gs://bucket/a b"),
        ("optimizer.no_decay=embedding,scale", ("embedding", "scale")),
        ("optimizer.no_decay=('bias',)", ("bias",)),
        ("optimizer.no_decay=", ()),
        ("model.mesa.conv_on_value=yes", True),
    ],
)
def test_overrides_are_parsed_by_type(override, value):
    found = schema.flatten(load(override))[override.partition("=")[0]]
    assert found == value and type(found) is type(value)


def test_override_forms():
    """The value may follow after a space, and the same value may be given twice."""
    _, overrides = cli.parse(cli.parser(""), ["--config.steps", "9", "--config.steps=9"])
    assert overrides == {"steps": "9"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workdri=x"], "--workdri=x: unknown flag; did you mean --workdir?"),
        (["--conf.steps=3"], "--conf.steps=3: unknown flag; did you mean --config"),
        (["run"], "run: unknown flag"),
        (["--config.steps"], "--config.steps: needs a value; write --config.steps=VALUE"),
        (["--workdir"], "expected one argument"),
    ],
)
def test_mistakes_in_flags(argv, message):
    flags = cli.parser("")
    flags.add_argument("--workdir")
    with pytest.raises(UserError) as raised:
        cli.parse(flags, argv)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["attention", "mesa,attention", "attention,mesa"])
def test_pattern_brings_the_fields_of_its_mixers(text):
    config = load(f"model.pattern={text}")
    assert config.model.pattern == tuple(text.split(","))
    assert set(MIXERS) & set(config.model) == set(config.model.pattern)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("configs/mesant.py:140m", "no file configs/mesant.py; did you mean configs/mesanet.py?"),
        ("nowhere/config.py", "no file nowhere/config.py"),
        ("configs", "no file configs"),
        ("README.md", "not a Python file"),
        ("configs/mesanet.py:141m", "no size '141m'; choose from 140m, 440m, 1b, demo, smoke"),
        (
            "configs/gla.py:440m-publishd",
            "no size '440m-publishd'; choose from 140m, 440m, 1b, demo, smoke, each also as in",
        ),
        ("configs/prepare.py:demo", "its get_config returns no training config"),
        ("configs/prepare.py:wiki", "no preset 'wiki'; presets: "),
    ],
)
def test_mistakes_in_the_config_file(spec, message):
    with pytest.raises(UserError) as raised:
        load(spec=spec)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.optimizer.weigth_decay = 0.1", 'since the config is locked. Did you mean "weight_decay"'),
        ("config.optimzer.name = 'adamw'", 'Did you mean "optimizer"'),
        ("config.steps = 1.5", "Could not override field 'steps'"),
        ("config.steps = True", "config.steps=True: needs int"),
        ("config.optimizer.eps = float('nan')", "config.optimizer.eps=nan: needs float"),
        ("config.steps = 0", "config.steps=0: must be at least 1"),
        ("config.steps =", "SyntaxError: invalid syntax"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise ValueError", "ValueError"),
    ],
)  # fmt: skip
def test_mistakes_inside_a_config_file(tmp_path, line, message):
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs import mesanet\n\ndef get_config():\n"
        f"    config = mesanet.get_config('smoke')\n    {line}\n    return config\n"
    )
    with pytest.raises(UserError) as raised:
        load(spec=str(path))
    assert message in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 300


def test_config_file_without_get_config(tmp_path):
    (tmp_path / "mine.py").write_text("steps = 3\n")
    with pytest.raises(UserError, match="get_config"):
        load(spec=str(tmp_path / "mine.py"))


@pytest.mark.parametrize("module", ["train", "evaluate", "generate", "prepare"])
def test_command_exits_with_2_before_jax_looks_for_a_device(module):
    """The platform does not exist, so initialising a device would fail in another way."""
    config = [f"--config={SMOKE}"] if module == "train" else []
    done = subprocess.run(
        [sys.executable, "-m", f"mesanet_jax.{module}", *config, "--workdir=nowhere", "--config.data.btch_size=3"],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "no_such_platform"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert module != "train" or "did you mean --config.data.batch_size?" in done.stderr


ALL_FIELDS = schema.flatten(config_lib.schema("language_model", tuple(MIXERS))) | {
    f"prepare.{path}": field for path, field in schema.flatten(SCHEMA).items()
}
DESCRIPTION = schema.describe(ALL_FIELDS)


@pytest.mark.parametrize("path", ALL_FIELDS)
def test_every_field_is_explained_in_one_line(path):
    field = ALL_FIELDS[path]
    assert len(field.doc.split()) >= 2 and "\n" not in field.doc and not field.doc.endswith(".")
    assert field.default is None or isinstance(field.default, field.type)
    assert field.default is None or not field.choices or field.default in field.choices
    described = " ".join(DESCRIPTION.split())  # the lines of long descriptions are wrapped
    assert f"--config.{path}=" in described and " ".join(field.doc.split()) in described


@pytest.mark.parametrize("size", backbone.SIZES)
def test_shipped_configs_are_valid_and_differ_in_the_mixer_alone(size):
    mesa, attention = (schema.flatten(family.get_config(size)) for family in (mesanet, transformer))
    config_lib.validate(mesanet.get_config(size))
    config_lib.validate(transformer.get_config(size))
    differing = {path for path in mesa.keys() | attention.keys() if mesa.get(path) != attention.get(path)}
    mixers = {path for path in differing if path.startswith(("model.mesa.", "model.attention."))}
    assert differing - mixers <= {"name", "model.pattern", "optimizer.learning_rate"}


@pytest.mark.parametrize("preset", prepare.PRESETS)
def test_presets_are_valid(preset):
    schema.check(prepare.get_config(preset), SCHEMA)


def test_saved_config_comes_back(tmp_path):
    config = load("optimizer.clip_norm=none", "checkpoint.keep_every=5", "model.pattern=mesa,attention")
    path = tmp_path / "config.json"
    path.write_text(schema.to_json(config))
    again = config_lib.from_saved(schema.read_json(path), {"steps": "9"}, origin=str(path))
    assert schema.flatten(again) == schema.flatten(config) | {"steps": 9}
    with pytest.raises(UserError, match="data.btch is not a field in this version"):
        config_lib.from_saved(schema.read_json(path) | {"data.btch": 3}, {}, origin=str(path))
    with pytest.raises(UserError, match="not a saved training config, it lacks model.kind"):
        config_lib.from_saved({"steps": 3}, {}, origin=str(path))


def test_differences_of_a_resumed_run():
    """Fields that change the result are refused and the others are reported, each with both values."""
    saved = schema.flatten(json.loads(schema.to_json(smoke_config("mesanet"))))
    saved = {path: tuple(value) if isinstance(value, list) else value for path, value in saved.items()}
    now = smoke_config("mesanet", {"data.seed": 3, "train.log_every": 5, "checkpoint.keep_every": 2})
    refused, reported = config_lib.differences(saved, now)
    assert refused == ["config.data.seed: 0 in the workdir, 3 now"]
    assert reported == [
        "config.checkpoint.keep_every: None in the workdir, 2 now",
        "config.train.log_every: 1 in the workdir, 5 now",
    ]
    assert config_lib.differences(saved, smoke_config("mesanet")) == ([], [])
    refused, _ = config_lib.differences(saved, smoke_config("transformer"))
    assert "config.model.pattern: ('mesa',) in the workdir, ('attention',) now" in refused


def test_a_run_that_began_before_a_field_was_declared():
    """A field that is missing from a saved config has its default, so the run can be resumed."""
    saved = schema.flatten(smoke_config("mesanet"))
    older = {path: value for path, value in saved.items() if not path.startswith(("optimizer.muon.", "mesh."))}
    assert len(older) < len(saved)
    config = config_lib.from_saved(older | {"optimizer.muon.dtype": "float32"}, {}, origin="config.json")
    assert schema.flatten(config) == saved
    older["optimizer.muon.dtype"] = "float32"
    assert config_lib.differences(older, config) == ([], [])
    refused, _ = config_lib.differences(older, smoke_config("mesanet", {"optimizer.muon.sweeps": 6}))
    assert refused == ["config.optimizer.muon.sweeps: 5 in the workdir, 6 now"]


SOURCES = [path for folder in ("mesanet_jax", "configs") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_configs_are_read_by_attribute():
    """`config.get(key, default)` would hide a misspelt key."""
    assert len(SOURCES) > 30
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "get":
                receiver = ast.unparse(node.value).split(".")
                named = {"config", "model", "optimizer", "options"} & set(receiver)
                assert not named, f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_config_type():
    assert isinstance(load(), ml_collections.ConfigDict) and load().is_locked
