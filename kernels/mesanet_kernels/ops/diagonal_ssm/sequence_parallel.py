"""How a shard of the sequence changes the state of a diagonal state space model.

B batch, T time, C tokens of a chunk, H channels, N modes, M = 2 N real and imaginary parts.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.ops.diagonal_ssm.discretise import expm1, zero_order_hold
from mesanet_kernels.ops.diagonal_ssm.xla import parts, scaled
from mesanet_kernels.recompute import recomputed
from mesanet_kernels.sequence_parallel import where_per_row


def summarise(chunk: int, u_BTH, log_rate_N, log_frequency_N, c_re_HN, c_im_HN, skip_H, segment_ids_BT):
    """Summarises the shard. Complex arrays are pairs of real and imaginary part.

    Returns:
      (bool [B]: whether the whole shard is one document;
      exp(T lambda) - 1 [N], complex: the relative change of the entering state, exact for slow modes;
      what the shard writes into a zero state [B, H, N], complex).
    """
    del c_re_HN, c_im_HN, skip_H
    lost_N = expm1(u_BTH.shape[1] * zero_order_hold(log_rate_N, log_frequency_N)[0])
    written = _written(chunk, u_BTH, log_rate_N, log_frequency_N, segment_ids_BT)
    return segment_ids_BT[:, 0] == segment_ids_BT[:, -1], (lost_N.real, lost_N.imag), written


@recomputed
def _written(chunk, u_BTH, log_rate_N, log_frequency_N, segment_ids_BT):
    """Returns what the shard writes into a zero state.

    It works in chunks, as the op does: for a whole shard, rounding would destroy the phase of the powers of fast modes.
    """
    lambda_N, gain_N = zero_order_hold(log_rate_N, log_frequency_N)
    lost_N = expm1(chunk * lambda_N)
    since_C1 = jnp.arange(chunk, dtype=log_rate_N.dtype)[::-1, None]
    write_CM = parts(gain_N * jnp.exp(since_C1 * lambda_N))
    of_last_BT1 = (segment_ids_BT == segment_ids_BT[:, -1:])[..., None]
    u_BTH = jnp.where(of_last_BT1, u_BTH.astype(accumulation_dtype(u_BTH)), 0)
    u_BTH = jnp.pad(
        u_BTH, ((0, 0), (-u_BTH.shape[1] % chunk, 0), (0, 0))
    )  # zeros in front leave a zero state unchanged
    u_BNCH = u_BTH.reshape(u_BTH.shape[0], -1, chunk, u_BTH.shape[-1])
    re_NBHN, im_NBHN = jnp.split(product("sm,bnsh->nbhm", write_CM, u_BNCH, u_BTH.dtype), 2, axis=-1)

    def carry_over(state_BHN, added_BHN):
        return state_BHN + scaled(state_BHN, lost_N) + added_BHN, None

    added_NBHN = jax.lax.complex(re_NBHN, im_NBHN)
    state_BHN, _ = jax.lax.scan(carry_over, jnp.zeros_like(added_NBHN[0]), added_NBHN)
    return state_BHN.real, state_BHN.imag


def advance(summary, state) -> tuple[jax.Array, jax.Array]:
    """Returns the state after the shard, from the state before it."""
    continues_B, lost, written = summary
    state_BHN, lost_N, written_BHN = (jax.lax.complex(*pair) for pair in (state, lost, written))
    after_BHN = where_per_row(continues_B, state_BHN + scaled(state_BHN, lost_N), 0) + written_BHN
    return after_BHN.real, after_BHN.imag
