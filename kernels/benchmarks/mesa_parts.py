"""Where Mesa's forward pass spends its time: `python kernels/benchmarks/mesa_parts.py [--shape 16x2048]`, bfloat16 inputs.

Medians by the host's clock, each part compiled and timed alone; for a GPU that `pallas_gpu` supports.
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels import chunks, mesa, shapes
from mesanet_kernels.ops.mesa import chunked, fused, pallas_gpu


def timed(name: str, function, *args, repeats: int = 12):
    """Prints the median time; returns what the function returns."""
    run = jax.jit(function)
    result = jax.block_until_ready(run(*args))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - began)
    print(f"| {name} | {1e3 * statistics.median(times):.3f} |", flush=True)
    return result


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--shape", default="16x2048", choices=list(shapes.SHAPES["mesa"]))
    shape = flags.parse_args().shape
    s = shapes.SHAPES["mesa"][shape]
    x = {
        name: jnp.asarray(value, jnp.bfloat16 if name in "qkv" else None)
        for name, value in shapes.example("mesa", shape).items()
    }
    state = tuple(jnp.zeros((s["B"], s["H"], s["K"], size)) for size in (s["K"], s["V"]))
    segment_ids = jnp.zeros((s["B"], s["T"]), jnp.int32)
    options = chunked.Options("cg", 30, 0.0, pallas_gpu.CHUNK)
    print("| part | ms |\n| --- | ---: |")

    def prepare(x):
        return chunked._prepare(options, x["k"], x["v"], x["log_decay"], x["beta"], state, segment_ids, lam_HK=x["lam"])

    whole, _ = timed("states, weights and splitting", prepare, x)
    timed("operator's diagonal", chunked.diagonal, whole)
    q_NBHCK = chunks.split(x["q"].astype(jnp.float32), pallas_gpu.CHUNK)
    for tol in (0.0, 1e-4, 1e-3):
        solve = partial(fused.solve, pallas_gpu._kernel, pallas_gpu.HALF, options._replace(tol=tol))
        solution = timed(f"solve, tol={tol:g}", solve, whole, q_NBHCK)
        print(f"| (its steps, mean) | {solution.iterations_R.mean():.1f} |")
    timed("readout", chunked._read_values, whole, solution.x_RK)
    forward = lambda x: mesa(**x, implementation="pallas_gpu").o
    o = timed("forward", forward, x)
    timed("forward and backward", lambda x, do: jax.vjp(forward, x)[1](do), x, o)


if __name__ == "__main__":
    main()
