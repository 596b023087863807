"""The whole training step compiles for TPUs, and fits their memory, on a machine without one.

Needs the TPU compiler outside the environment (jax would look for a TPU if it were inside) and the variable
MESANET_TPU_COMPILER naming its directory; `make test-all` sees to both. A compilation takes minutes.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.smoke import ROOT

GIBIBYTE = 2**30
HBM = {"v5e:2x2": 16 * GIBIBYTE, "v5p:2x2x1": 95 * GIBIBYTE}  # of one chip: cloud.google.com/tpu/docs/{v5e,v5p}
COMPILER = "MESANET_TPU_COMPILER"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",  # those of the tests are for the CPU
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
SMOKE_MESH = {"mesh.data": 2, "mesh.fsdp": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "topology", "overrides"),
    [
        ("configs/transformer.py:smoke", "v5e:2x2", SMOKE_MESH),
        ("configs/mesanet.py:smoke", "v5e:2x2", SMOKE_MESH),
        ("configs/mesanet.py:140m", "v5e:2x2", {}),
        ("configs/mesanet.py:140m", "v5p:2x2x1", {}),
    ],
    ids=str,
)
def test_training_step_compiles_and_fits(spec, topology, overrides, capsys):
    if COMPILER not in os.environ:
        pytest.skip(
            f"{COMPILER} is not set; `make test-all` installs the compiler (pip install --target DIR libtpu) and sets it"
        )
    compiler = str((ROOT / os.environ[COMPILER]).resolve())
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_tpu_compile", spec, topology, json.dumps(overrides)],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | ENVIRONMENT | {"PYTHONPATH": compiler},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    memory = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        print(
            f"\n{spec} on {topology}:", ", ".join(f"{name} {size / GIBIBYTE:.3f} GiB" for name, size in memory.items())
        )
    assert memory["argument"] + memory["temp"] < HBM[topology]


def compiled_memory(spec: str, topology: str, overrides: dict) -> dict[str, int]:
    """Bytes a chip that the compiled training step takes: {"argument", "temp"}."""
    import jax
    from jax.experimental import topologies

    from mesanet_jax import config as config_lib
    from mesanet_jax import mesh as mesh_lib
    from mesanet_jax import models
    from mesanet_jax import step as step_lib

    config = config_lib.load(spec, {path: str(value) for path, value in overrides.items()})
    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    mesh = mesh_lib.make_mesh(tuple(config.mesh[axis] for axis in mesh_lib.AXES), devices)
    program = step_lib.compile_program(config, models.build(config.model), mesh)
    with jax.set_mesh(mesh):  # from here on nothing may run: these devices do not exist
        lowered = program.train.trace(program.state, program.batch).lower(lowering_platforms=("tpu",))
        memory = lowered.compile().memory_analysis()
    return {"argument": memory.argument_size_in_bytes, "temp": memory.temp_size_in_bytes}


if __name__ == "__main__":
    print(json.dumps(compiled_memory(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
