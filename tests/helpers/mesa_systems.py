"""Linear systems for the kernels of Mesa's solve: easy ones, and some that are hard in half precision.

R systems (heads), C tokens of a chunk, H heads, K key size, T earlier tokens.
"""

import jax.numpy as jnp
import numpy as np

CHUNKS, HEADS = 2, 2
KEYS = ("random", "low rank", "one token repeated")


def systems(keys, size, *, chunk, half, seed=0):
    """Returns the arguments of a solve and the exact solutions.

    Args:
      keys: one of `KEYS`.
      size: K.
      chunk: C.
      half: the dtype of keys and of the two parts of the state.

    Returns:
      ([right-hand sides [R, C, K], keys [R, C, K], two parts of the entering state [R, K, K], intra [R, C, C],
      enter [R, C], lambda [H, K]], exact solutions [R, C, K] in float64).
    """
    rng = np.random.default_rng(seed)
    earlier = 500

    def draw(*shape):
        return rng.standard_normal((CHUNKS, *shape))

    few = draw(6, size)
    make = {
        "random": lambda count: draw(count, size),
        "low rank": lambda count: draw(count, 6) @ few + 0.1 * draw(count, size),
        "one token repeated": lambda count: np.broadcast_to(few[:, :1], (CHUNKS, count, size)),
    }[keys]
    k_RCK, past_RTK = _rounded_unit_rows(make(chunk)), _rounded_unit_rows(make(earlier))
    unit_RCK = _rounded_unit_rows(draw(chunk, size)).astype(np.float32)
    lam_HK = rng.uniform(0.25, 1.25, (HEADS, size)).astype(np.float32)
    age_CC = np.arange(chunk)[:, None] - np.arange(chunk)
    decay_CC = np.where(age_CC >= 0, 0.999 ** np.maximum(age_CC, 0), 0)
    intra_RCC = (decay_CC * rng.uniform(0, 1, (CHUNKS, 1, chunk))).astype(np.float32)
    enter_RC = (0.999 ** np.arange(1, chunk + 1)).astype(np.float32) * np.ones((CHUNKS, 1), np.float32)
    state_RKK = (0.5 * np.einsum("rtk,rtl->rkl", past_RTK, past_RTK)).astype(np.float32)
    matrices_RCKK = np.einsum("rts,rsk,rsl->rtkl", intra_RCC.astype(np.float64), k_RCK, k_RCK)
    matrices_RCKK += enter_RC[..., None, None] * state_RKK.astype(np.float64)[:, None]
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


def _rounded_unit_rows(x):
    """Returns rows of unit norm, rounded to bfloat16, in float64."""
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return np.asarray(jnp.asarray(unit, jnp.bfloat16), np.float64)


def in_two_parts(x, half):
    """Returns two arrays of dtype `half` whose sum is x."""
    high = jnp.asarray(x, half)
    return high, jnp.asarray(x - np.float32(high), half)
