"""The installed package: its scripts, its data, and a wheel that works without the checkout."""

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

from mesanet_jax import entry_points
from tests.helpers.smoke import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = PROJECT["project"]["scripts"]
SOURCES = ("mesanet_jax", "kernels", "configs", "pyproject.toml", "setup.py", "README.md", "LICENSE")
PACKAGES = {"mesanet_jax": ROOT / "mesanet_jax", "mesanet_kernels": ROOT / "kernels" / "mesanet_kernels"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_the_commands(script):
    module, function = SCRIPTS[script].split(":")
    assert module == entry_points.__name__ and script == f"mesanet-{function}"
    assert callable(getattr(entry_points, function))
    assert callable(importlib.import_module(f"mesanet_jax.{function}").main)


def test_a_script_exits_with_the_status_of_its_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mesanet-train", "--config=nowhere.py"])
    with pytest.raises(SystemExit) as exit:
        entry_points.train()
    assert exit.value.code == 2 and capsys.readouterr().err.startswith("error: ")


def test_every_folder_of_code_is_a_package():
    """Otherwise setup.py would leave it out of the wheel."""
    for root in PACKAGES.values():
        folders = {path.parent for path in root.rglob("*.py")}
        assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.slow
def test_a_wheel_works_outside_the_checkout(tmp_path):
    """Prepare and train from an empty directory with nothing but the wheel (and the installed dependencies).

    Building needs setuptools, which pip downloads.
    """
    source, wheels, site, empty = (tmp_path / name for name in ("source", "wheels", "site", "empty"))
    source.mkdir()
    empty.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", wheels, source], check=True)
    (wheel,) = wheels.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {f"mesanet_jax/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    assert shipped <= names and {f"{package}/py.typed" for package in PACKAGES} <= names
    for package, root in PACKAGES.items():
        assert {f"{package}/{path.relative_to(root)}" for path in root.rglob("*.py")} <= names
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", site, wheel], check=True)

    def run(script, *arguments):
        environment = os.environ | {"PYTHONPATH": str(site)}
        command = [sys.executable, site / "bin" / script, *arguments]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("mesanet-prepare", "--config=configs/prepare.py:demo", "--config.output=data")
    short = ["--config.steps=3", "--config.optimizer.warmup_steps=1", "--config.train.eval_batches=1"]
    run("mesanet-train", "--config=configs/mesanet.py:demo", "--workdir=run", "--config.data.path=data", *short)
    assert (empty / "run" / "checkpoints" / "3").is_dir()
    assert "perplexity" in run("mesanet-evaluate", "--workdir=run", "--batches=1")
