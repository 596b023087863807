"""How many steps Mesa's solvers take: `python kernels/benchmarks/solver_steps.py [--tol 1e-4]`

Keys as a model has them (after SiLU, of unit size): at random, of low rank, or of eight tokens over and over; heads
that forget more or less. A residual is relative to the one of the solver's starting point, for "pcg" the right-hand
side.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mesanet_kernels import mesa

LENGTH, SIZE, RANK, TOKENS = 1024, 64, 8, 8


def keys(kind: str, rng: np.random.Generator, length: int = LENGTH, size: int = SIZE) -> np.ndarray:
    """[T, K], unit rows."""
    raw = {
        "random": lambda: rng.standard_normal((length, size)),
        "low rank": lambda: (
            rng.standard_normal((length, RANK)) @ rng.standard_normal((RANK, size))
            + 0.1 * rng.standard_normal((length, size))
        ),
        "8 tokens repeated": lambda: rng.standard_normal((TOKENS, size))[rng.integers(0, TOKENS, length)],
    }[kind]()
    active = raw / (1 + np.exp(-raw))
    return active / np.linalg.norm(active, axis=-1, keepdims=True)


def inputs(kind: str, gamma: float) -> dict:
    rng = np.random.default_rng(0)
    k_TK, q_TK, v_TK = keys(kind, rng), keys(kind, rng), rng.standard_normal((LENGTH, SIZE))
    beta_T = rng.uniform(0, 1, LENGTH)
    log_decay_T = np.log(gamma * (1 - (1 - 0.9975) * beta_T**2))  # with MesaNet's cap (G.5)
    row = lambda x: jnp.asarray(x, jnp.float32)[None, :, None]
    lam = jnp.asarray(rng.uniform(0.25, 1, (1, SIZE)), jnp.float32)
    return dict(q=row(q_TK), k=row(k_TK), v=row(v_TK), log_decay=row(log_decay_T), beta=row(beta_T), lam=lam)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--tol", type=float, default=1e-4)
    tol = flags.parse_args().tol
    print("| keys | gamma | cg, mean / most | pcg, mean / most |")
    print("| --- | ---: | ---: | ---: |")
    runs = {solver: jax.jit(partial(mesa, max_iters=100, tol=tol, solver=solver)) for solver in ("cg", "pcg")}
    for kind in ("random", "low rank", "8 tokens repeated"):
        for gamma in (1.0, 0.98, 0.8):
            counts = {solver: run(**inputs(kind, gamma)).iterations for solver, run in runs.items()}
            cells = " | ".join(f"{count.mean():.1f} / {count.max()}" for count in counts.values())
            print(f"| {kind} | {gamma:g} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
