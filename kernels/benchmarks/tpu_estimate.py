"""The TPU compiler's estimates of our kernels: `python kernels/benchmarks/tpu_estimate.py [--chips v5p:2x2x1 ...]`

These are static estimates of the compiler, made without a TPU; they are not measurements and do not include waiting for
memory. A loop whose length depends on data is counted as one iteration, so the cost of an iteration of Mesa's solve is
the difference between kernels with one and with three iterations written out. libtpu must be importable;
MESANET_TPU_COMPILER may name its directory, as for the slow tests.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, D channels.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

# Multiply-adds per cycle of a device: v5e has four units of 128 x 128, v5p two cores with four each, v6e two of 256 x
# 256.
CHIPS = {"v5e:2x2": 4 * 128**2, "v5p:2x2x1": 8 * 128**2, "v6e:2x2": 2 * 256**2}
# A system is one chunk of one head; for the linear scan, 128 tokens of 128 channels.
SYSTEMS, HEADS, CHUNK, SIZE = 64, 8, 128, 128
SQUARE = CHUNK * SIZE  # numbers in the keys, or in the weights, of a system

SOLVE = "mesa's solve"
# For each kernel, per system: products of 128 x 128 x 128, and bytes moved. Weights and Mesa's states and q* are
# float32.
KERNELS = {
    "weights": (3, 4 * SQUARE),
    "weights' gradients": (6, 4 * SQUARE),
    "forward": (4, (4 * 2 + 4) * SQUARE),
    "states": (1, 3 * 2 * SQUARE),
    "gradients": (9, (8 * 2 + 2 * 4) * SQUARE),
    "mesa's readout": (13, (3 * 2 + 2 * 4) * SQUARE),
    "mesa's states": (2, (2 * 2 + 4) * SQUARE),
    "mesa's gradients": (28, (7 * 2 + 6 * 4) * SQUARE),
    "linear_scan": (0, 3 * 4 * SQUARE),
}


def cycles(chip: str, kernel: str) -> float:
    """Returns the estimated cycles per system. It runs in a process of its own because libtpu reads its flags once."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={folder}/profile",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "JAX_PLATFORMS": "cpu",
        }
        command = [sys.executable, __file__, "--compile", chip, kernel]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {chip}: {kernel} does not compile\n{done.stderr[-2000:]}")
        names = tuple(f"{name}_" for name in done.stdout.split())
        files = [path for path in pathlib.Path(folder).rglob("*") if path.name.startswith(names)]
        counts = [int(n) for path in files for n in re.findall(r"estimated_cycles: (\d+)", path.read_text())]
    return sum(counts) / SYSTEMS


def compile_kernel(chip: str, kernel: str) -> None:
    """Compiles a kernel for `SYSTEMS` systems and prints the names that it has in the compiled program."""
    sys.path.append(os.environ.get("MESANET_TPU_COMPILER", ""))
    import jax
    from jax.experimental import topologies

    (device, *_) = topologies.get_topology_desc(topology_name=chip, platform="tpu").devices
    sharding = jax.sharding.SingleDeviceSharding(device)
    function, shapes = call(kernel)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    compiled = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    print(*re.findall(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"", compiled.as_text() or ""))


def call(kernel: str):
    """Returns the function of a kernel, and the shapes and dtypes of its arguments."""
    import jax
    import jax.numpy as jnp

    from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
    from mesanet_kernels.linear_recurrence.tpu import weights
    from mesanet_kernels.linear_recurrence.tpu.forward import forward_tpu
    from mesanet_kernels.linear_recurrence.tpu.gradients import RecurrenceInputsTpu, gradients_tpu
    from mesanet_kernels.linear_recurrence.tpu.states import states_tpu
    from mesanet_kernels.ops.linear_scan import pallas_tpu as linear_scan

    # Shapes and dtypes stand for the arrays here.
    def half(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def wide(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    count = SYSTEMS // HEADS
    tokens, squares = (1, count * CHUNK, HEADS, SIZE), (count, 1, HEADS, SIZE, SIZE)
    pairs, row = wide(count, 1, HEADS, CHUNK, CHUNK), wide(count, 1, HEADS, 1, CHUNK)
    of_chunks = ChunkWeights(pairs, wide(count, 1, HEADS, CHUNK))
    state, channels = wide(1, HEADS, SIZE, SIZE), wide(1, count * CHUNK, HEADS * SIZE)
    one_recurrence = (RecurrenceInputsTpu(half(*tokens), half(*tokens), half(*squares), state),)
    two_recurrences = tuple(
        RecurrenceInputsTpu(half(*tokens), do, wide(*squares), state) for do in (half(*tokens), wide(*tokens))
    )
    if kernel.startswith("solve"):
        iterations = int(kernel.removeprefix("solve"))
        return written_out(iterations), (half(*tokens), half(*tokens), of_chunks, wide(HEADS, SIZE), state)
    return {
        "weights": (weights._weights, (row, row)),
        "weights' gradients": (lambda *x: weights._weights_backward(x[:2], x[2:]), (row, row, pairs, row)),
        "forward": (forward_tpu, (half(*tokens), half(*tokens), half(*tokens), of_chunks, state)),
        "states": (states_tpu, (half(*tokens), half(*tokens), of_chunks, state)),
        "gradients": (partial(gradients_tpu, queries=True), (half(*tokens), half(*tokens), of_chunks, one_recurrence)),
        "mesa's readout": (
            partial(forward_tpu, parts=3),
            (wide(*tokens), half(*tokens), half(*tokens), of_chunks, state),
        ),
        "mesa's states": (partial(states_tpu, dtype=jnp.float32), (half(*tokens), half(*tokens), of_chunks, state)),
        "mesa's gradients": (
            partial(gradients_tpu, queries=False),
            (wide(*tokens), half(*tokens), of_chunks, two_recurrences),
        ),
        "linear_scan": (lambda *x: linear_scan._kernel(*x, reverse=False), (channels, channels, wide(1, HEADS * SIZE))),
    }[kernel]


def written_out(iterations: int):
    """Returns Mesa's solve with its loops unrolled: the exact iterations, then `iterations` others."""
    from mesanet_kernels.ops.mesa import solve_tpu

    counts = iter((solve_tpu.EXACT_ITERATIONS, iterations))

    def loop(_, body, state):
        """Stands in for `lax.while_loop`."""
        for _ in range(next(counts)):
            state = body(state)
        return state

    solve_tpu.lax.while_loop = loop  # pyright: ignore[reportPrivateImportUsage]
    return partial(solve_tpu.solve_systems_tpu, max_iters=30, tol=0.0)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--chips", nargs="+", default=list(CHIPS), choices=list(CHIPS))
    flags.add_argument("--kernels", nargs="+", default=[SOLVE, *KERNELS], choices=[SOLVE, *KERNELS])
    args = flags.parse_args()
    print("| chip | kernel | cycles per system | floor of its products | KiB moved |")
    print("| --- | --- | ---: | ---: | ---: |")
    for chip in args.chips:
        for kernel in args.kernels:
            if kernel == SOLVE:
                one, three = (cycles(chip, f"solve{iterations}") for iterations in (1, 3))
                iteration = (three - one) / 2
                print_row(chip, f"{SOLVE}, one iteration", iteration, products=7, moved=0)
                start = f"{SOLVE}, its start and two exact iterations"
                print_row(chip, start, one - iteration, products=40, moved=12 * SQUARE)
            else:
                products, moved = KERNELS[kernel]
                print_row(chip, kernel, cycles(chip, kernel), products=products, moved=moved)


def print_row(chip: str, name: str, estimate: float, *, products: int, moved: int) -> None:
    """Prints a row of the table: the estimate in cycles beside the cycles that the products alone need."""
    floor = products * CHUNK * CHUNK * SIZE / CHIPS[chip]
    print(f"| {chip} | {name} | {estimate:.0f} | {floor:.0f} | {moved // 1024} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_kernel(*sys.argv[2:4])
    else:
        main()
