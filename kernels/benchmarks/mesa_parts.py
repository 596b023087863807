"""Where Mesa's kernels on a Hopper GPU spend their time: `python kernels/benchmarks/mesa_parts.py [--shape 16x2048]`

Medians by the host's clock over runs of eight calls, each part compiled and timed alone, bfloat16 inputs; GB/s of the
arrays that a part reads and writes.
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
    """Prints a row of the table; returns what the function returns."""
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


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--shape", default="16x2048", choices=list(shapes.SHAPES["mesa"]))
    shape = flags.parse_args().shape
    sizes = shapes.SHAPES["mesa"][shape]
    x = {
        name: jnp.asarray(value, jnp.bfloat16 if name in "qkv" else None)
        for name, value in shapes.example("mesa", shape).items()
    }
    q, k, v, lam = (x[name] for name in ("q", "k", "v", "lam"))
    if q.shape[1] % tiles.CHUNK:
        raise SystemExit(f"--shape {shape}: its {q.shape[1]} tokens are no whole number of chunks of {tiles.CHUNK}")
    ids = jnp.zeros(q.shape[:2], jnp.int32)
    h_kk, h_kv = (jnp.zeros((sizes["B"], sizes["H"], sizes["K"], size)) for size in (sizes["K"], sizes["V"]))
    do, options = v[::-1], MesaOptions("cg", 30, 0.0, tiles.CHUNK)
    two = pallas_gpu.TWO
    print("| part | ms | GB/s |\n| --- | ---: | ---: |")

    weights = timed("weights", chunk_weights_gpu, x["log_decay"], x["beta"], ids)
    g_parts, _ = timed("states G", partial(recurrence.entering_states, stored=two), k, v, weights, h_kv)
    systems, _ = timed("states H of the systems", pallas_gpu.scaled_systems, k, weights, h_kk)

    def first_solve(tol: float):
        """Times the solve for q*; returns the solver and q*."""
        solve = partial(pallas_gpu.solve_scaled_systems, options._replace(tol=tol))
        q_star, iterations = timed(f"solve, tol={tol:g}", solve, systems, (q,), k, weights, lam)
        print(f"| (its steps, mean) | {iterations.mean():.1f} | |")
        return solve, q_star

    exact, tol = TOLERANCES
    first_solve(exact)
    solve, q_star = first_solve(tol)  # used by the parts that follow
    timed("readout", readout_gpu, q_star, k, v, weights, g_parts)
    backwards = partial(readout_gpu, transposed=True, results=2)
    dq_star = timed("gradient of the readout", backwards, (do,), v, k, weights, g_parts)
    e_star, _ = timed(f"second solve, tol={tol:g}", solve, systems, dq_star, k, weights, lam)
    h_parts, _ = timed("states H", partial(recurrence.entering_states, factors=2, stored=two), k, k, weights, h_kk)
    leaving = partial(recurrence.leaving_state_cotangents, stored=two)
    dg_parts, _ = timed("cotangents of G", leaving, q_star, (do,), weights, h_kv)
    dh_parts, _ = timed("cotangents of H", partial(leaving, factors=2), q_star, e_star, weights, h_kk)
    recurrences = RecurrenceInputsGpu(v, (do,), g_parts, dg_parts), RecurrenceInputsGpu(k, e_star, h_parts, dh_parts)
    timed("gradients", gradients_gpu, q_star, k, weights, recurrences)

    for tol in TOLERANCES:
        forward = lambda inputs, tol=tol: mesa(**inputs, tol=tol, implementation="pallas_gpu").o
        timed(f"forward, tol={tol:g}", forward, x)
        both = lambda inputs, do, forward=forward: jax.vjp(forward, inputs)[1](do)
        timed(f"forward and backward, tol={tol:g}", both, x, do)


if __name__ == "__main__":
    main()
