"""Systems for the kernels of Mesa's solve, easy ones and those that are hard in half precision."""

import jax.numpy as jnp
import numpy as np

CHUNKS, HEADS = 2, 2
KEYS = ("random", "low rank", "one token repeated")


def systems(keys, size, *, chunk, half, seed=0):
    """(rhs, keys, both parts of the state, intra, enter, lam) for keys of a kind, and the exact solutions [R, C, K]."""
    rng = np.random.default_rng(seed)
    earlier = 500
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    draw = lambda *shape: rng.standard_normal((CHUNKS, *shape))
    few = draw(6, size)
    make = {
        "random": lambda count: draw(count, size),
        "low rank": lambda count: draw(count, 6) @ few + 0.1 * draw(count, size),
        "one token repeated": lambda count: np.broadcast_to(few[:, :1], (CHUNKS, count, size)),
    }[keys]
    rounded = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    k_RCK, past_RTK = rounded(unit(make(chunk))), rounded(unit(make(earlier)))
    unit_RCK = np.float32(rounded(unit(draw(chunk, size))))
    lam_HK = np.float32(rng.uniform(0.25, 1.25, (HEADS, size)))
    age_CC = np.arange(chunk)[:, None] - np.arange(chunk)
    intra_RCC = np.float32(
        np.where(age_CC >= 0, 0.999 ** np.maximum(age_CC, 0), 0) * rng.uniform(0, 1, (CHUNKS, 1, chunk))
    )
    enter_RC = np.float32(0.999 ** np.arange(1, chunk + 1)) * np.ones((CHUNKS, 1), np.float32)
    state_RKK = np.float32(0.5 * np.einsum("rtk,rtl->rkl", past_RTK, past_RTK))
    matrices_RCKK = np.einsum("rts,rsk,rsl->rtkl", np.float64(intra_RCC), k_RCK, k_RCK)
    matrices_RCKK += enter_RC[..., None, None] * np.float64(state_RKK)[:, None]
    matrices_RCKK += np.stack([np.diag(lam_HK[r % HEADS]) for r in range(CHUNKS)])[:, None]
    exact_RCK = np.linalg.solve(matrices_RCKK, unit_RCK[..., None])[..., 0]
    arrays = (
        unit_RCK,
        jnp.asarray(k_RCK, half),
        *in_two_parts(state_RKK, half),
        intra_RCC,
        enter_RC,
        lam_HK,
    )
    return [jnp.asarray(x) for x in arrays], exact_RCK


def in_two_parts(x, half):
    """x as the sum of two arrays of `half`."""
    high = jnp.asarray(x, half)
    return high, jnp.asarray(x - np.float32(high), half)
