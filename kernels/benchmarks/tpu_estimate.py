"""What the TPU compiler expects of Mesa's kernel: `python kernels/benchmarks/tpu_estimate.py [--chips v5p:2x2x1 ...]`

Static cycle estimates of the compiler, on a machine without a TPU: never a measurement. The estimate takes a loop whose
length depends on the data once, so the cost of an iteration is the difference between kernels with one and with three
iterations written out. Needs libtpu on the path (the directory in MESANET_TPU_COMPILER, as for the slow tests).
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Multiply-adds a cycle of a device: v5e has four units of 128 x 128, v5p two cores with four each, v6e two of 256 x 256.
CHIPS = {"v5e:2x2": 4 * 128**2, "v5p:2x2x1": 8 * 128**2, "v6e:2x2": 2 * 256**2}
SYSTEMS, HEADS, CHUNK = 64, 8, 128


def cycles(chip: str, size: int, iterations: int) -> int:
    """The estimate of the kernel for `SYSTEMS` systems, from a process of its own: libtpu reads its flags once."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_static_llo_profile_to={folder}/profile"
        environment = os.environ | {
            "LIBTPU_INIT_ARGS": flags,
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "JAX_PLATFORMS": "cpu",
        }
        command = [sys.executable, __file__, "--compile", chip, str(size), str(iterations)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {chip}: the kernel does not compile\n{done.stderr[-2000:]}")
        profiles = [
            path.read_text(errors="replace")
            for path in pathlib.Path(folder).rglob("*static_llo_profile*")
            if path.is_file()
        ]
    return sum(int(count) for text in profiles for count in re.findall(r"estimated_cycles: (\d+)", text))


def compile_kernel(chip: str, size: int, iterations: int) -> None:
    sys.path.append(os.environ.get("MESANET_TPU_COMPILER", ""))
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from mesanet_kernels.ops.mesa import pallas_tpu

    def written_out(_, body, state):
        for _ in range(iterations):
            state = body(state)
        return state

    pallas_tpu.lax.while_loop = written_out
    (device, *_) = topologies.get_topology_desc(topology_name=chip, platform="tpu").devices
    sharding = jax.sharding.SingleDeviceSharding(device)
    wide = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    half = lambda *shape: jax.ShapeDtypeStruct(shape, pallas_tpu.HALF, sharding=sharding)
    rows, square = (SYSTEMS, CHUNK, size), (SYSTEMS, size, size)
    arguments = (
        wide(*rows), wide(*rows), half(*rows), half(*square), half(*square),
        wide(SYSTEMS, CHUNK, CHUNK), wide(SYSTEMS, CHUNK), wide(HEADS, size),
    )  # fmt: skip
    run = jax.jit(lambda *arrays: pallas_tpu._kernel(*arrays, max_iters=iterations, tol=0.0))
    run.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--chips", nargs="+", default=list(CHIPS), choices=list(CHIPS))
    flags.add_argument(
        "--sizes", nargs="+", type=int, default=[128], help="key sizes (64 written out trips the compiler)"
    )
    args = flags.parse_args()
    print("| chip | K | cycles an iteration and system | floor of its products | cycles of a system besides |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for chip in args.chips:
        for size in args.sizes:
            one, three = (cycles(chip, size, iterations) for iterations in (1, 3))
            iteration = (three - one) / 2 / SYSTEMS
            floor = (4 * CHUNK * CHUNK * size + 3 * CHUNK * size * size) / CHIPS[chip]
            print(f"| {chip} | {size} | {iteration:.0f} | {floor:.0f} | {one / SYSTEMS - iteration:.0f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_kernel(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
