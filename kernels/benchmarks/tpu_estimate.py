"""What the TPU compiler expects of our kernels: `python kernels/benchmarks/tpu_estimate.py [--chips v5p:2x2x1 ...]`

Static cycle estimates of the compiler, on a machine without a TPU: never a measurement. They leave out the time spent
waiting for memory. They take a loop whose length depends on the data once, so the cost of an iteration of Mesa's solve
is the difference between kernels with one and with three iterations written out. Needs libtpu on the path (the
directory in MESANET_TPU_COMPILER, as for the slow tests).

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

# Multiply-adds of a device per cycle: v5e has four units of 128 x 128, v5p two cores of four, v6e two of 256 x 256.
CHIPS = {"v5e:2x2": 4 * 128**2, "v5p:2x2x1": 8 * 128**2, "v6e:2x2": 2 * 256**2}
SYSTEMS, HEADS, CHUNK, SIZE = (
    64,
    8,
    128,
    128,
)  # a system: one chunk of one head; of the scan as many tokens and channels
SQUARE = CHUNK * SIZE  # numbers of an array of keys or weights of a system

SOLVE = "mesa's solve"
# Of a kernel and a system: products of 128 x 128 x 128, and bytes moved (float32 are weights, mesa's states and q*).
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
    """The estimate of a system, from a process of its own: libtpu reads its flags once."""
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
        files = [path for path in pathlib.Path(folder).rglob("*") for name in done.stdout.split()
                 if path.name.startswith(f"{name}_")]  # fmt: skip
        counts = [int(n) for path in files for n in re.findall(r"estimated_cycles: (\d+)", path.read_text())]
    return sum(counts) / SYSTEMS


def compile_kernel(chip: str, kernel: str) -> None:
    """Compiles it alone for `SYSTEMS` systems, and prints what the compiled program calls it."""
    sys.path.append(os.environ.get("MESANET_TPU_COMPILER", ""))
    import jax
    from jax.experimental import topologies

    (device, *_) = topologies.get_topology_desc(topology_name=chip, platform="tpu").devices
    sharding = jax.sharding.SingleDeviceSharding(device)
    function, shapes = call(kernel)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    compiled = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    program = compiled.as_text()
    assert program is not None
    print(*re.findall(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"", program))


def call(kernel: str):
    """The function of a kernel, and its arguments' shapes and dtypes."""
    import jax
    import jax.numpy as jnp

    from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
    from mesanet_kernels.linear_recurrence.tpu import weights
    from mesanet_kernels.linear_recurrence.tpu.forward import forward_tpu
    from mesanet_kernels.linear_recurrence.tpu.gradients import RecurrenceInputsTpu, gradients_tpu
    from mesanet_kernels.linear_recurrence.tpu.states import states_tpu
    from mesanet_kernels.ops.linear_scan import pallas_tpu as linear_scan

    def shaped(dtype, *shape: int) -> Any:  # stands for an array
        return jax.ShapeDtypeStruct(shape, dtype)

    half, wide = partial(shaped, jnp.bfloat16), partial(shaped, jnp.float32)
    count = SYSTEMS // HEADS
    tokens, squares = (1, count * CHUNK, HEADS, SIZE), (count, 1, HEADS, SIZE, SIZE)
    pairs, row = wide(count, 1, HEADS, CHUNK, CHUNK), wide(count, 1, HEADS, 1, CHUNK)
    of_chunks = ChunkWeights(pairs, wide(count, 1, HEADS, CHUNK))
    state, channels = wide(1, HEADS, SIZE, SIZE), wide(1, count * CHUNK, HEADS * SIZE)
    one_memory = (RecurrenceInputsTpu(half(*tokens), half(*tokens), half(*squares), state),)
    two_memories = tuple(
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
        "gradients": (partial(gradients_tpu, queries=True), (half(*tokens), half(*tokens), of_chunks, one_memory)),
        "mesa's readout": (
            partial(forward_tpu, parts=3),
            (wide(*tokens), half(*tokens), half(*tokens), of_chunks, state),
        ),
        "mesa's states": (partial(states_tpu, dtype=jnp.float32), (half(*tokens), half(*tokens), of_chunks, state)),
        "mesa's gradients": (
            partial(gradients_tpu, queries=False),
            (wide(*tokens), half(*tokens), of_chunks, two_memories),
        ),
        "linear_scan": (lambda *x: linear_scan._kernel(*x, reverse=False), (channels, channels, wide(1, HEADS * SIZE))),
    }[kernel]


def written_out(iterations: int):
    """Mesa's solve with its loops written out: two exact iterations, then as many others."""
    from mesanet_kernels.ops.mesa import solve_tpu

    counts = iter((solve_tpu.EXACT_ITERATIONS, iterations))

    def loop(_, body, state):
        for _ in range(next(counts)):
            state = body(state)
        return state

    solve_tpu.lax.while_loop = loop
    return partial(solve_tpu.solve_systems_tpu, max_iters=30, tol=0.0)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--chips", nargs="+", default=list(CHIPS), choices=list(CHIPS))
    flags.add_argument("--kernels", nargs="+", default=[SOLVE, *KERNELS], choices=[SOLVE, *KERNELS])
    args = flags.parse_args()
    print("| chip | kernel | cycles a system | floor of its products | KiB moved |")
    print("| --- | --- | ---: | ---: | ---: |")
    for chip in args.chips:
        floor = lambda products: f"{products * CHUNK * CHUNK * SIZE / CHIPS[chip]:.0f}"  # noqa: B023
        for kernel in args.kernels:
            if kernel == SOLVE:
                one, three = (cycles(chip, f"solve{iterations}") for iterations in (1, 3))
                iteration = (three - one) / 2
                print(f"| {chip} | {SOLVE}, an iteration | {iteration:.0f} | {floor(7)} | 0 |")
                start = f"{SOLVE}, its start and two exact iterations | {one - iteration:.0f} | {floor(40)}"
                print(f"| {chip} | {start} | {12 * SQUARE // 1024} |", flush=True)
                continue
            products, moved = KERNELS[kernel]
            print(
                f"| {chip} | {kernel} | {cycles(chip, kernel):.0f} | {floor(products)} | {moved // 1024} |", flush=True
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_kernel(*sys.argv[2:4])
    else:
        main()
