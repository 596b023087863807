"""What a span of tokens does to the state of a diagonal state space (sequence.py).

B batch, T time, C tokens of a chunk, H channels, N modes, M = 2 N real and imaginary parts.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.ops.diagonal_ssm.discretise import expm1, zero_order_hold
from mesanet_kernels.ops.diagonal_ssm.xla import parts, scaled
from mesanet_kernels.recompute import recomputed
from mesanet_kernels.sequence_parallel import where_rows


def summarise(chunk, u_BTH, log_rate_N, log_frequency_N, c_re_HN, c_im_HN, skip_H, segment_ids_BT):
    """Whether the first document is the last one too, [B]; the part of a state that is lost, [N], and the state that the
    span alone leaves, [B, H, N], each as real and imaginary part."""
    del c_re_HN, c_im_HN, skip_H
    lost_N = expm1(u_BTH.shape[1] * zero_order_hold(log_rate_N, log_frequency_N)[0])
    written = _written(chunk, u_BTH, log_rate_N, log_frequency_N, segment_ids_BT)
    return segment_ids_BT[:, 0] == segment_ids_BT[:, -1], (lost_N.real, lost_N.imag), written


@recomputed
def _written(chunk, u_BTH, log_rate_N, log_frequency_N, segment_ids_BT):
    """By chunks, as the op does: the powers of a whole span would lose the phase of its fast modes to rounding."""
    lambda_N, gain_N = zero_order_hold(log_rate_N, log_frequency_N)
    lost_N = expm1(chunk * lambda_N)
    since_C1 = jnp.arange(chunk, dtype=log_rate_N.dtype)[::-1, None]
    write_CM = parts(gain_N * jnp.exp(since_C1 * lambda_N))
    of_last_BT1 = (segment_ids_BT == segment_ids_BT[:, -1:])[..., None]
    u_BTH = jnp.where(of_last_BT1, u_BTH.astype(accumulation_dtype(u_BTH)), 0)
    u_BTH = jnp.pad(u_BTH, ((0, 0), (-u_BTH.shape[1] % chunk, 0), (0, 0)))  # before: an empty state stays empty
    u_BNCH = u_BTH.reshape(u_BTH.shape[0], -1, chunk, u_BTH.shape[-1])
    re_NBHN, im_NBHN = jnp.split(product("sm,bnsh->nbhm", write_CM, u_BNCH, u_BTH.dtype), 2, axis=-1)

    def carry_over(state_BHN, added_BHN):
        return state_BHN + scaled(state_BHN, lost_N) + added_BHN, None

    added_NBHN = jax.lax.complex(re_NBHN, im_NBHN)
    state_BHN, _ = jax.lax.scan(carry_over, jnp.zeros_like(added_NBHN[0]), added_NBHN)
    return state_BHN.real, state_BHN.imag


def advance(summary, state):
    continues_B, lost, written = summary
    state_BHN, lost_N, written_BHN = (jax.lax.complex(*pair) for pair in (state, lost, written))
    after_BHN = where_rows(continues_B, state_BHN + scaled(state_BHN, lost_N), 0) + written_BHN
    return after_BHN.real, after_BHN.imag
