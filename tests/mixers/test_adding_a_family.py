"""docs/adding-a-family.md, followed word for word in a copy of the repository."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mesanet_jax import config as config_lib
from tests.helpers.smoke import ROOT

DOCUMENT = ROOT / "docs" / "adding-a-family.md"
COPIED = ("mesanet_jax", "kernels", "configs", "tests")
MIXER, CONFIG = pathlib.Path("mesanet_jax/mixers/average.py"), pathlib.Path("configs/average.py")
REGISTRY = pathlib.Path("mesanet_jax/mixers/__init__.py")


def blocks(language: str) -> list[str]:
    """The fenced blocks of the document in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(*words: str) -> list[list[str]]:
    """The document's commands that contain all of `words`, each as a list of arguments."""
    lines = [line for block in blocks("") for line in block.replace("\\\n", "").splitlines()]
    return [shlex.split(line) for line in lines if all(word in line for word in words)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the repository to which the document's family has been added, and how to run a command in it."""
    root = tmp_path_factory.mktemp("checkout")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    mixer, import_line, entry, config, _ = blocks("python")
    (root / MIXER).write_text(mixer)
    (root / CONFIG).write_text(config)
    registry = (root / REGISTRY).read_text()
    for before, line in (("import Attention\n", import_line), ('"attention": Attention,\n', entry)):
        assert registry.count(before) == 1
        registry = registry.replace(before, before + line)
    (root / REGISTRY).write_text(registry)

    def run(arguments: list[str]) -> subprocess.CompletedProcess:
        """Run `python ...` there, as the document writes it."""
        assert arguments[0] == "python"
        environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'kernels'}"}
        return subprocess.run(
            [sys.executable, *arguments[1:]], cwd=root, env=environment, capture_output=True, text=True
        )

    return SimpleNamespace(root=root, run=run)


def test_the_contract_tests_pass(checkout):
    """The document's own command for testing: every test of mixers, on this mixer."""
    (command,) = commands("-m pytest")
    done = checkout.run(command)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 10


def test_it_trains(checkout, tiny_data, tmp_path):
    """The document's command for training, at the size and on the data of the other tests."""
    (command,) = commands("mesanet_jax.train", "configs/average.py")
    small = [
        "--config=configs/average.py:smoke",
        f"--workdir={tmp_path}",
        f"--config.data.path={tiny_data}",
        "--config.model.vocab_size=259",
        "--config.steps=2",
        "--config.optimizer.warmup_steps=1",
    ]
    assert [argument.split("=")[0] for argument in command[3:]] == ["--config", "--workdir"]
    done = checkout.run([*command[:3], *small])
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "metrics.jsonl").exists()


def test_its_code_is_in_the_style_of_the_project(checkout):
    for tool in (["check"], ["format", "--check"]):
        done = checkout.run(["python", "-m", "ruff", *tool, str(MIXER), str(CONFIG), str(REGISTRY)])
        assert done.returncode == 0, done.stdout


def test_a_config_outside_the_checkout(tmp_path):
    path = tmp_path / "weak_ridge.py"
    path.write_text(blocks("python")[-1])
    config = config_lib.load(f"{path}:smoke", {})
    assert (config.model.mesa.lambda_floor, config.model.mesa.lambda_init) == (0.1, 0.5)
