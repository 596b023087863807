"""Where Mesa's kernels on a Hopper GPU spend their time: `python kernels/benchmarks/mesa_parts.py [--shape 16x2048]`

Each kernel is compiled and timed alone, with bfloat16 inputs. Times are medians over runs of eight calls, by the clock
of the host. GB/s count the arrays that a kernel reads and writes.
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels import mesa, shapes
from mesanet_kernels.linear_recurrence.gpu import recurrence
from mesanet_kernels.linear_recurrence.gpu.gradients import RecurrenceInputsGpu, gradients_gpu
from mesanet_kernels.linear_recurrence.gpu.readout import readout_gpu
from mesanet_kernels.linear_recurrence.gpu.weights import chunk_weights_gpu
from mesanet_kernels.ops.mesa import pallas_gpu
from mesanet_kernels.ops.mesa.options import MesaOptions
from mesanet_kernels.tiles import gpu as tiles

CALLS, REPEATS = 8, 5
TOLERANCES = (0.0, 1e-3)


def timed(name: str, function, *args):
    """Prints a row of the table and returns the result of `function(*args)`."""
    run = jax.jit(function)
    result = jax.block_until_ready(run(*args))
    last, times = result, []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(CALLS):
            last = run(*args)
        jax.block_until_ready(last)
        times.append((time.perf_counter() - began) / CALLS)
    seconds = statistics.median(times)
    moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((args, result)))
    print(f"| {name} | {1e3 * seconds:.3f} | {moved / seconds / 1e9:,.0f} |", flush=True)
    return result


def time_parts(q, k, v, log_decay, beta, lam) -> None:
    """Times every kernel of the forward and of the backward pass, in the order in which they run."""
    batch, _, heads, key_size = k.shape
    segment_ids = jnp.zeros(q.shape[:2], jnp.int32)
    h_kk, h_kv = (jnp.zeros((batch, heads, key_size, size)) for size in (key_size, v.shape[-1]))
    do, two = v[::-1], pallas_gpu.TWO

    def solver(tol):
        return partial(pallas_gpu.solve_scaled_systems, MesaOptions("cg", 30, tol, tiles.CHUNK))

    weights = timed("weights", chunk_weights_gpu, log_decay, beta, segment_ids)
    g_parts, _ = timed("states G", partial(recurrence.entering_states, stored=two), k, v, weights, h_kv)
    systems, _ = timed("states H of the systems", pallas_gpu.scaled_systems, k, weights, h_kk)
    q_star = ()
    for tol in TOLERANCES:
        q_star, iterations = timed(f"solve, tol={tol:g}", solver(tol), systems, (q,), k, weights, lam)
        print(f"| (mean number of its iterations) | {iterations.mean():.1f} | |")
    timed("readout", readout_gpu, q_star, k, v, weights, g_parts)
    backwards = partial(readout_gpu, transposed=True, results=2)
    dq_star = timed("gradient of the readout", backwards, (do,), v, k, weights, g_parts)
    tol = TOLERANCES[-1]
    e_star, _ = timed(f"second solve, tol={tol:g}", solver(tol), systems, dq_star, k, weights, lam)
    h_parts, _ = timed("states H", partial(recurrence.entering_states, factors=2, stored=two), k, k, weights, h_kk)
    leaving = partial(recurrence.leaving_state_cotangents, stored=two)
    dg_parts, _ = timed("cotangents of G", leaving, q_star, (do,), weights, h_kv)
    dh_parts, _ = timed("cotangents of H", partial(leaving, factors=2), q_star, e_star, weights, h_kk)
    recurrences = RecurrenceInputsGpu(v, (do,), g_parts, dg_parts), RecurrenceInputsGpu(k, e_star, h_parts, dh_parts)
    timed("gradients", gradients_gpu, q_star, k, weights, recurrences)


def time_whole(inputs: dict[str, jax.Array], tol: float) -> None:
    """Times the forward pass, and the forward and backward pass together."""

    def forward(inputs):
        return mesa(**inputs, tol=tol, implementation="pallas_gpu").o

    def both(inputs, do):
        return jax.vjp(forward, inputs)[1](do)

    timed(f"forward, tol={tol:g}", forward, inputs)
    timed(f"forward and backward, tol={tol:g}", both, inputs, inputs["v"][::-1])


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument(
        "--shape", default="16x2048", choices=list(shapes.SHAPES["mesa"]), help="a shape in mesanet_kernels/shapes.py"
    )
    shape = flags.parse_args().shape
    inputs = {
        name: jnp.asarray(value, jnp.bfloat16 if name in "qkv" else None)
        for name, value in shapes.example("mesa", shape).items()
    }
    length = inputs["q"].shape[1]
    if length % tiles.CHUNK:
        raise SystemExit(f"--shape={shape}: {length} tokens are not a multiple of the chunk size, {tiles.CHUNK}")
    print("| part | ms | GB/s |\n| --- | ---: | ---: |")
    time_parts(**inputs)
    for tol in TOLERANCES:
        time_whole(inputs, tol)


if __name__ == "__main__":
    main()
