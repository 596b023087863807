"""Tests comparisons as a user makes them: what is refused before training, what is reported after it, and reruns."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from configs import pha
from mesanet_jax import cli, compare
from mesanet_jax.comparing import runs
from mesanet_jax.comparing.relay import SignalRelay
from mesanet_jax.comparing.report import ComparisonReport
from mesanet_jax.comparing.results import Result
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.evals.perplexity import Evaluation
from mesanet_jax.reporting import plots
from mesanet_jax.runtime import workdir
from tests.helpers.smoke import ROOT

PAIR = ("configs/mesanet.py:smoke", "configs/transformer.py:smoke")
NAMES = ("mesanet-smoke", "transformer-smoke")


def overrides(data: str, cache) -> dict[str, str]:
    return {
        "data.path": data,
        "model.vocab_size": str(PackedRows(data, "train").vocab_size),
        "log.tensorboard": "false",
        "compile_cache": str(cache),
    }


def command(directory, values: dict[str, str], *flags: str, specs=PAIR) -> SimpleNamespace:
    """Runs the command; returns its status, output and errors."""
    argv = [f"--configs={','.join(specs)}", f"--workdir={directory}", *flags]
    argv += [f"--config.{path}={value}" for path, value in values.items()]
    done = subprocess.run(
        [sys.executable, "-m", "mesanet_jax.compare", *argv],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
        env=os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
    )  # fmt: skip
    return SimpleNamespace(status=done.returncode, output=done.stdout, errors=done.stderr)


def variant(path: pathlib.Path, line: str) -> str:
    """Writes a config file: the smoke Transformer, changed by `line`."""
    path.write_text(
        "from configs import transformer\n\n\ndef get_config(size='smoke'):\n"
        f"    config = transformer.get_config('smoke')\n    config.name = 'variant'\n    {line}\n    return config\n"
    )
    return str(path)


# ---- refused before anything is trained


def test_refuses_what_is_not_the_architecture(tmp_path, tiny_data):
    spec = variant(tmp_path / "other.py", "config.optimizer.b2 = 0.95")
    with pytest.raises(UserError, match=r"config\.optimizer\.b2: 0\.98 and 0\.95") as error:
        runs.load([*PAIR, spec], overrides(tiny_data, "none"), tmp_path / "runs")
    assert "\n" not in str(error.value) and PAIR[0] in str(error.value) and spec in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "line",
    [
        "config.optimizer.learning_rate = 0.5",
        "config.optimizer.muon.learning_rate = 0.5",
        "config.model.attention.window = 8",
        "config.model.mlp_ratio = 2.5",
    ],
)
def test_allows_the_mixer_and_its_learning_rate(tmp_path, tiny_data, line):
    spec = variant(tmp_path / "other.py", line)
    assert len(runs.load([*PAIR, spec], overrides(tiny_data, "none"), tmp_path / "runs")) == 3


def test_allows_kinds_of_model_and_their_options(tmp_path, tiny_data):
    specs = [
        "configs/transformer.py:smoke",
        "configs/pha.py:smoke",
        *(f"configs/pha.py:smoke-{v}" for v in pha.VARIANTS),
    ]
    assert len(runs.load(specs, overrides(tiny_data, "none"), tmp_path / "runs")) == len(specs)


def test_refuses_another_backbone(tmp_path, tiny_data):
    spec = variant(tmp_path / "other.py", "config.model.layers = 3")
    with pytest.raises(UserError, match=r"config\.model\.layers: 2 and 3"):
        runs.load(["configs/pha.py:smoke", spec], overrides(tiny_data, "none"), tmp_path / "runs")


def test_refuses_a_second_run_of_the_same_name(tmp_path, tiny_data):
    with pytest.raises(UserError, match="config.name=mesanet-smoke: .* have the same name"):
        runs.load([PAIR[0], PAIR[0]], overrides(tiny_data, "none"), tmp_path)


@pytest.mark.parametrize("name", ["", "..", "../x", "x/y"])
def test_refuses_a_name_that_is_no_directory_of_the_workdir(tmp_path, tiny_data, name):
    spec = variant(tmp_path / "other.py", f"config.name = {name!r}")
    with pytest.raises(UserError, match="plain file name"):
        runs.load([spec], overrides(tiny_data, "none"), tmp_path)


def test_refuses_a_warm_up_longer_than_the_steps(tmp_path, tiny_data):
    with pytest.raises(UserError, match=r"mesanet\.py:smoke: .*warmup_steps=2: must be below config\.steps=2"):
        runs.load(PAIR, overrides(tiny_data, "none") | {"steps": "2"}, tmp_path)


def test_mistakes_are_one_line_and_status_2(tmp_path, tiny_data, monkeypatch, capsys):
    """--steps contradicts --config.steps."""
    monkeypatch.setattr(
        sys, "argv", ["compare", "--configs=x", f"--workdir={tmp_path}", "--steps=3", "--config.steps=4"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.run(compare.main)
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


# ---- a whole comparison


def test_an_option_holds_for_the_runs_that_have_it(tmp_path, tiny_data):
    """An option of a mixer and one of a kind of model; a misspelt option, which no config can have, is an error."""
    specs = ["configs/mesanet.py:smoke", "configs/transformer.py:smoke"]
    values = overrides(tiny_data, "none") | {"model.mesa.max_iters": "7", "model.max_sweeps": "5"}
    mesa, plain = runs.load(specs, values, tmp_path)
    assert mesa.config.model.mesa.max_iters == 7 and "mesa" not in plain.config.model
    assert values.keys() - mesa.overrides.keys() == {"model.max_sweeps"}
    assert values.keys() - plain.overrides.keys() == {"model.mesa.max_iters", "model.max_sweeps"}
    with pytest.raises(UserError, match="model.mesa.max_iter: no such field"):
        runs.load(specs, values | {"model.mesa.max_iter": "7"}, tmp_path)


@pytest.fixture(scope="module")
def compared(tmp_path_factory, tiny_data):
    """Compares two families and a third run, whose directory another process holds."""
    root = tmp_path_factory.mktemp("compare")
    values = overrides(tiny_data, root / "cache")
    with workdir.lock(root / "runs" / "variant"):
        specs = (variant(root / "held.py", "config.optimizer.learning_rate = 1e-3"), *PAIR)
        done = command(root / "runs", values, "--steps=6", specs=specs)
    return SimpleNamespace(root=root / "runs", values=values, done=done)


def test_reports_the_runs_that_finished_and_names_the_one_that_failed(compared):
    assert compared.done.status == 1, compared.done.errors
    assert "variant: mesanet_jax.train ended with exit status 2" in compared.done.errors
    report = (compared.root / "comparison.md").read_text()
    assert report in compared.done.output and "Missing: variant" in report and "the same seed (0) and 6 steps" in report
    for name in ("comparison-loss.png", "comparison-position.png"):
        assert name in report and (compared.root / name).read_bytes().startswith(b"\x89PNG")


def test_the_numbers_are_those_of_the_runs(compared):
    record = json.loads((compared.root / "comparison.json").read_text())
    losses = [run["loss"] for run in record["runs"]]
    assert losses == sorted(losses) and {run["name"] for run in record["runs"]} == set(NAMES)
    assert record["baseline"] == "transformer-smoke" and list(record["failed"]) == ["variant"]
    for run in record["runs"]:
        evaluated = json.loads((compared.root / run["name"] / "evaluation" / "validation-6.json").read_text())
        assert evaluated["loss"] == run["loss"] and evaluated["parameters"] == run["parameters"]
        lines = (compared.root / run["name"] / "metrics.jsonl").read_text().splitlines()
        speeds = [json.loads(line).get("tokens_per_second") for line in lines]
        assert run["tokens_per_second"] == np.median([speed for speed in speeds if speed])


def test_running_it_again_repeats_nothing(compared):
    before = {name: (compared.root / name / "metrics.jsonl").stat().st_mtime_ns for name in NAMES}
    again = command(compared.root, compared.values, "--steps=6")
    assert again.status == 0, again.errors
    assert again.output.count("finished before") == 4
    assert before == {name: (compared.root / name / "metrics.jsonl").stat().st_mtime_ns for name in NAMES}
    assert "Missing" not in (compared.root / "comparison.md").read_text()


def test_refuses_other_steps_in_the_same_workdir(compared):
    with pytest.raises(UserError, match="holds another run: config.steps: 6 in the workdir, 7 now"):
        runs.load(PAIR, compared.values | {"steps": "7"}, compared.root)


# ---- the report


def result(name: str, loss: float, **changes) -> Result:
    evaluation = Evaluation(
        loss=loss,
        bits_per_byte=None,
        tokens=4,
        bytes=0,
        p_correct_over_half=0.25,
        position_loss_T=np.array([np.nan, loss, loss, loss]),
        position_tokens_T=np.array([0, 1, 1, 2]),
    )
    made = Result(
        name=name,
        pattern=(name,),
        learning_rate=1e-3,
        parameters=2_000_000,
        training_flops=1e7,
        tokens_per_second=1234.0,
        memory_gb=None,
        steps=10,
        batch=(4, 4),
        seed=0,
        order_seed=0,
        data="abc",
        evaluated_data="abc",
        settings={"name": name, "model.kind": "language_model", "model.pattern": (name,)},
        modes={},
        terms={},
        losses=(np.arange(10), np.linspace(3, loss, 10)),
        evaluation=evaluation,
    )
    return dataclasses.replace(made, **changes)


def test_positions_are_relative_to_the_transformer():
    report = ComparisonReport([result("attention", 2.0), result("mesa", 1.75)], failed={}).markdown()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith("|")]
    assert ["mesa", "-0.250", "-0.250"] in table and ["attention, its loss", "2.000", "2.000"] in table
    assert report.index("| mesa") < report.index("| attention")  # best first


def test_without_a_transformer_the_positions_are_left_out(tmp_path):
    report = ComparisonReport([result("gla", 2.0), result("mesa", 1.75)], failed={})
    report.write(tmp_path)
    assert "Left out" in report.markdown() and not (tmp_path / "comparison-position.png").exists()


def test_other_modes_stand_beside_the_loss_of_decoding():
    scores = {"loss": 1.5, "perplexity": 4.48, "bits_per_byte": 0.5, "p_correct_over_half": 0.25, "position_loss": []}
    report = ComparisonReport([result("attention", 2.0), result("maglev", 1.75, modes={"lifted": scores})], failed={})
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in report.markdown().splitlines()
        if line.startswith("|")
    ]
    assert ["maglev", "lifted", "1.5000", "-0.2500", "0.5000", "25.0%"] in table
    assert [run["modes"] for run in report.record()["runs"]] == [
        {"lifted": {"loss": 1.5, "perplexity": 4.48, "bits_per_byte": 0.5, "p_correct_over_half": 0.25}},
        {},
    ]


def test_the_plot_of_memories_is_drawn_if_a_run_has_one(tmp_path):
    png = tmp_path / "comparison-terms.png"
    plain, curve = result("attention", 2.0), (np.array([5, 10]), np.array([-0.1, -0.2]))
    scores = {"loss": 1.5, "perplexity": 4.48, "bits_per_byte": None, "p_correct_over_half": None}
    memory = result("maglev", 1.75, modes={"lifted": scores}, terms={"validation_gap_lifted": curve})
    for results, drawn in (([plain], False), ([plain, memory], True)):
        report = ComparisonReport(results, failed={})
        report.write(tmp_path)
        assert png.exists() == drawn == (png.name in report.markdown())


def test_says_what_differs():
    """Fields that runs have in common and set differently; missing ones are marked, equal ones and names left out."""
    common = {"model.kind": "pha", "model.layers": 2, "model.alpha": None}
    settings = (
        common | {"name": "a", "model.pattern": ("gss", "attention"), "model.gss.modes": 16},
        common | {"name": "b", "model.pattern": ("attention",), "model.alpha": 1.0},
    )
    runs = [result(values["name"], loss, settings=values) for loss, values in zip((1.0, 2.0), settings)]
    report = ComparisonReport(runs, failed={})
    assert report.record()["differing"] == ["model.alpha", "model.pattern"]
    section = report.markdown().partition("## What differs")[2].partition("![")[0]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    assert table[0] == ["run", "model.alpha", "model.pattern"]
    assert table[2:] == [["a", "none", "gss, attention"], ["b", "1.0", "attention"]]


def test_the_transformer_is_the_baseline_before_other_attention():
    kind = lambda name: {"name": name, "model.kind": name}
    runs = [
        result(name, 2.0, pattern=("attention",), settings=kind(name)) for name in ("pha", "language_model", "another")
    ]
    assert ComparisonReport(runs, failed={}).baseline.name == "language_model"
    assert ComparisonReport(runs[:1], failed={}).baseline.name == "pha"


@pytest.mark.parametrize("field", Result.SHARED)
def test_refuses_runs_that_did_not_see_the_same(field):
    other = result("mesa", 1.0, **{field: "other"})
    with pytest.raises(UserError, match=f"cannot be compared: {field} is "):
        ComparisonReport([result("attention", 2.0), other], failed={})


def test_refuses_an_evaluation_of_other_tokens():
    part = dataclasses.replace(result("mesa", 1.0).evaluation, position_tokens_T=np.array([0, 1, 1, 1]), tokens=3)
    with pytest.raises(UserError, match="evaluated tokens is 4 for attention and 3 for mesa"):
        ComparisonReport([result("attention", 2.0), result("mesa", 1.0, evaluation=part)], failed={})


def test_eighteen_curves_look_different():
    looks = [look for look, _ in zip(plots._looks(), range(18))]
    assert len({str(look) for look in looks}) == 18


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_running_command_once_and_starts_no_other(tmp_path, number):
    """The command counts the signals that it gets within half a second after the first one."""
    counting = (
        "import pathlib, signal, sys, time\nseen = []\n"
        f"signal.signal({int(number)}, lambda *_: seen.append(1))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(0.5)\nsys.exit(len(seen))\n"
    )

    def interrupt():
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    with SignalRelay() as relay:
        thread = threading.Thread(target=interrupt)
        thread.start()
        assert relay.run([sys.executable, "-c", counting]) == 1
        thread.join()
        assert relay.received == number
        assert relay.run([sys.executable, "-c", f"open({str(tmp_path / 'second')!r}, 'w')"]) == 128 + number
    assert not (tmp_path / "second").exists()
