"""The diagonal state space model as one convolution over the row, by Fourier transforms of twice its length.

It is for rows of one document. A Fourier transform mixes all tokens, so its rounding errors leak from later tokens to
earlier ones (about 1e-7 of the largest input), and would leak from one document to another.

B batch, T time, F frequencies, H channels, N modes.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.ops.diagonal_ssm.discretise import zero_order_hold
from mesanet_kernels.ops.diagonal_ssm.xla import parts, scaled
from mesanet_kernels.recompute import recomputed


@recomputed
def diagonal_ssm_fft(
    chunk: int, u_BTH, log_rate_N, log_frequency_N, c_re_HN, c_im_HN, skip_H, state, segment_ids_BT
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes `api.diagonal_ssm`; `chunk` has no effect."""
    del chunk, segment_ids_BT
    dtype, length = accumulation_dtype(u_BTH), u_BTH.shape[1]
    u32_BTH = u_BTH.astype(dtype)
    lambda_N, gain_N = zero_order_hold(log_rate_N, log_frequency_N)
    c_HN, state_BHN = jax.lax.complex(c_re_HN, c_im_HN), jax.lax.complex(*state)
    time_T1 = jnp.arange(length, dtype=dtype)[:, None]
    powers_TN = jnp.exp(time_T1 * lambda_N)

    kernel_TH = product("tm,hm->th", parts(powers_TN.conj()), parts(scaled(c_HN, gain_N)), dtype)
    size = 2 ** (2 * length - 1).bit_length()  # a power of two, because transforms of other lengths are slow on TPUs
    spectrum_BFH = scaled(jnp.fft.rfft(u32_BTH, n=size, axis=1), jnp.fft.rfft(kernel_TH, n=size, axis=0))
    y_BTH = jnp.fft.irfft(spectrum_BFH, n=size, axis=1)[:, :length]

    entering_BHN = scaled(state_BHN, jnp.exp(lambda_N))
    before_BTH = product("tm,bhm->bth", parts(powers_TN.conj()), parts(scaled(entering_BHN, c_HN)), dtype)
    written_BHM = product("tm,bth->bhm", parts(gain_N * powers_TN[::-1]), u32_BTH, dtype)
    final_BHN = scaled(state_BHN, jnp.exp(length * lambda_N)) + jax.lax.complex(*jnp.split(written_BHM, 2, axis=-1))
    y_BTH += before_BTH + skip_H * u32_BTH
    return y_BTH.astype(u_BTH.dtype), (final_BHN.real, final_BHN.imag)
