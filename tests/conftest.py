"""Every test runs on eight virtual CPU devices, compiled without optimisation, because compilation takes the time.

These settings are made in the environment before jax initialises, so that the commands that tests start inherit them.
Tests marked `gpu` run with `JAX_PLATFORMS=cuda python -m pytest -m gpu`.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # One compilation uses one core here, so splitting its code into parts for several threads only costs time.
    flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"

import jax
import pytest

from tests.helpers.tiny_run import prepare_data
from tests.representatives import REPRESENTATIVES

jax.config.update("jax_num_cpu_devices", 8)  # the commands that tests start see one


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases of large parametrised tests as slow, except the representatives (tests/representatives.py).

    A selection by name (-k) runs every case that it names: of a new family, for example.
    """
    if config.option.keyword:
        return
    for item in items:
        test, _, case = item.nodeid.removeprefix("tests/").partition("[")
        if test in REPRESENTATIVES and case.removesuffix("]") not in REPRESENTATIVES[test]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """A prepared directory of short documents as bytes, several to a row of 64 tokens."""
    return prepare_data(tmp_path_factory.mktemp("tiny") / "data", seq_len=64)
