"""Every test runs on eight virtual CPU devices, compiled without optimisation: compiling is what takes the time.

Set before jax initialises, in the environment, so that the commands that tests start inherit it. Those marked `gpu` run
by `JAX_PLATFORMS=cuda python -m pytest -m gpu`.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"

import jax
import pytest

from tests.helpers.tiny_run import prepare_data

jax.config.update("jax_num_cpu_devices", 8)  # the commands that tests start see one


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """A prepared directory of short documents as bytes, several to a row of 64 tokens."""
    return prepare_data(tmp_path_factory.mktemp("tiny") / "data", seq_len=64)
