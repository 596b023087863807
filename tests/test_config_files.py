"""Where `--config` looks for a config: a file, a shipped config, or the name of a family, from any directory."""

import sys

import pytest

from mesanet_jax import config as config_lib
from mesanet_jax import schema
from mesanet_jax.errors import UserError

OWN = """
from mesanet_jax.recipes.backbone import backbone

def get_config(size="smoke"):
    config = backbone("mine", size, ("mesa", "attention"))
    config.optimizer.learning_rate = 7e-3
    return config
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty directory, made the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("spec", ["configs/mesanet.py:smoke", "mesanet:smoke"])
def test_shipped_configs_are_found_from_any_directory(spec, elsewhere):
    assert config_lib.load(spec, {}).name == "mesanet-smoke"


def test_without_an_argument_a_family_has_its_default_size(elsewhere):
    assert config_lib.load("mesanet", {}).name == "mesanet-140m"


@pytest.mark.parametrize("spec", ["configs/mesanet.py:smoke", "mesanet:smoke"])
def test_the_current_directory_comes_first(spec, elsewhere):
    write(elsewhere / "configs" / "mesanet.py", OWN)
    assert config_lib.load(spec, {}).name == "mine-smoke"


@pytest.mark.parametrize("spec", ["own/mine.py", "./own/mine.py:smoke", "{root}/own/mine.py:smoke"])
def test_a_config_of_ones_own_needs_the_recipe_alone(spec, elsewhere):
    write(elsewhere / "own" / "mine.py", OWN)
    config = config_lib.load(spec.format(root=elsewhere), {"steps": "9"})
    assert (config.name, config.steps, config.optimizer.learning_rate) == ("mine-smoke", 9, 7e-3)


def test_a_config_imports_its_neighbours_by_the_name_of_their_folder(elsewhere):
    write(elsewhere / "own_configs" / "shared_values.py", "RATE = 5e-3")
    write(
        elsewhere / "own_configs" / "mine.py",
        f"from own_configs.shared_values import RATE\n{OWN}".replace("7e-3", "RATE"),
    )
    before = list(sys.path)
    assert schema.load_file("own_configs/mine.py").optimizer.learning_rate == 5e-3
    assert sys.path == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "mesant:140m",
            "--config=mesant:140m: no file mesant and no shipped config of that name; did you mean mesanet?",
        ),
        (
            "configs/mesant.py",
            "--config=configs/mesant.py: no file configs/mesant.py; did you mean configs/mesanet.py?",
        ),
        ("own/min.py", "--config=own/min.py: no file own/min.py; did you mean own/mine.py?"),
        ("zzz", "--config=zzz: no file zzz and no shipped config of that name; shipped configs: deltanet, "),
        ("nowhere/zzz.py", "--config=nowhere/zzz.py: no file nowhere/zzz.py; shipped configs: deltanet, "),
        ("mesanet:141m", "--config=mesanet:141m: ValueError: no size '141m'; choose from 140m, "),
    ],
)
def test_mistakes_are_one_line_with_the_nearest_name(spec, message, elsewhere):
    write(elsewhere / "own" / "mine.py", OWN)
    with pytest.raises(UserError) as raised:
        config_lib.load(spec, {})
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
