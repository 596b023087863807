"""The Mesa op alone, without the training framework: `python examples/mesa_op.py`

On random data, compare the ways to solve its linear systems with the exact solution, and decode the same tokens one by
one. It takes about 20 seconds on a CPU. docs/mesa.md explains the mathematics.

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels import mesa, mesa_step

B, T, H, K, V = 2, 256, 4, 32, 32


def random_inputs(key: jax.Array) -> dict[str, jax.Array]:
    """The arguments of `mesa`: unit queries and keys, values, gates, and the ridge `lam` per head and key channel."""
    keys = jax.random.split(key, 5)
    shared_K = 2.0 * jnp.ones(K)  # keys that resemble each other make the systems harder to solve
    q_BTHK, k_BTHK = (unit(shared_K + jax.random.normal(key, (B, T, H, K))) for key in keys[:2])
    return {
        "q": q_BTHK,
        "k": k_BTHK,
        "v": jax.random.normal(keys[2], (B, T, H, V)),
        "log_decay": jax.nn.log_sigmoid(6.0 + jax.random.normal(keys[3], (B, T, H))),  # most of the past is kept
        "beta": jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, H))),
        "lam": jnp.full((H, K), 0.25),
    }


def unit(x: jax.Array) -> jax.Array:
    """`x` scaled to length 1 over the last axis."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def decode(inputs: dict[str, jax.Array], **options) -> jax.Array:
    """The output o_BTHV, computed one token after another from a state of constant size."""
    state = jnp.zeros((B, H, K, K)), jnp.zeros((B, H, K, V))
    per_token = {name: jnp.moveaxis(x, 1, 0) for name, x in inputs.items() if name != "lam"}

    def one_token(state, token):
        out = mesa_step(**token, lam=inputs["lam"], state=state, **options)
        return out.final_state, out.o

    _, o_TBHV = jax.lax.scan(one_token, state, per_token)
    return jnp.moveaxis(o_TBHV, 0, 1)


def relative_error(x: jax.Array, wanted: jax.Array) -> float:
    return float(jnp.linalg.norm(x - wanted) / jnp.linalg.norm(wanted))


def main() -> dict[str, float]:
    """Print the table and return its errors by row."""
    inputs = random_inputs(jax.random.key(0))
    exact = jax.jit(lambda inputs: mesa(**inputs, implementation="reference").o)(inputs)
    solvers = {
        "5 steps": {"max_iters": 5},
        "30 steps": {"max_iters": 30},
        "until the residual is 1e-4 of its first": {"max_iters": 30, "tol": 1e-4},
        "the same, preconditioned": {"max_iters": 30, "tol": 1e-4, "solver": "pcg"},
    }
    errors = {}
    print(f"{'conjugate gradients':42}{'relative error':>16}{'steps per token':>18}")
    for name, options in solvers.items():
        out = jax.jit(lambda inputs, options=options: mesa(**inputs, **options))(inputs)
        errors[name] = relative_error(out.o, exact)
        print(f"{name:42}{errors[name]:16.1e}{float(jnp.mean(out.iterations)):18.1f}")
    decoded = jax.jit(lambda inputs: decode(inputs, max_iters=30))(inputs)
    errors["decoding"] = relative_error(decoded, exact)
    print(f"{'30 steps, decoded token by token':42}{errors['decoding']:16.1e}{30:18.1f}")
    return errors


if __name__ == "__main__":
    main()
