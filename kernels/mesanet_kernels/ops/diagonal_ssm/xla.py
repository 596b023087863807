"""The diagonal state space in chunks, in plain XLA: a convolution inside a chunk, a loop over chunks for the state.

Inside a chunk, the kernel K[t - s] (pha.md 3.3) is masked by documents, exactly: a Fourier transform would mix them.
Between chunks, all channels share the modes, so that reading and writing the state are matrix products with one
C x 2N matrix. Complex numbers are multiplied as pairs of real ones, which halves the work where one factor is real.

B batch, T time, C tokens of a chunk (t reads, s is read), H channels, N modes, M = 2 N real and imaginary parts.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.chunks import product
from mesanet_kernels.ops.diagonal_ssm.discretise import expm1, zero_order_hold
from mesanet_kernels.recompute import recomputed


class System(NamedTuple):
    """What does not depend on the input, for chunks of C tokens."""

    kernel_CCH: jax.Array  # [s, t]: what token s adds to the output of token t
    read_CM: jax.Array  # of the state that enters the chunk, at token t
    write_CM: jax.Array  # of token s, in the state that leaves the chunk
    lost_N: jax.Array  # e^(C Lambda) - 1, the part of the state that a chunk takes away, complex
    c_HN: jax.Array  # complex
    skip_H: jax.Array


@recomputed
def diagonal_ssm(chunk, u_BTH, log_rate_N, log_frequency_N, c_re_HN, c_im_HN, skip_H, state, segment_ids_BT):
    """Returns (y [B,T,H], final state); `api.diagonal_ssm` says what each argument is."""
    dtype, length = accumulation_dtype(u_BTH), u_BTH.shape[1]
    starts_BT = jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1]) != 0
    system = partial(_system, log_rate_N, log_frequency_N, jax.lax.complex(c_re_HN, c_im_HN), skip_H)
    state_BHN, outputs = jax.lax.complex(*state), []
    whole = length - length % chunk
    # The rest is a shorter chunk: padding it would let the final state decay.
    for begin, end, size in ((0, whole, chunk), (whole, length, length - whole)):
        if begin < end:
            inputs = u_BTH[:, begin:end].astype(dtype), starts_BT[:, begin:end]
            state_BHN, y_BTH = _scan(system(size), state_BHN, inputs, chunk=size)
            outputs.append(y_BTH)
    return jnp.concatenate(outputs, axis=1).astype(u_BTH.dtype), (state_BHN.real, state_BHN.imag)


def _system(log_rate_N, log_frequency_N, c_HN, skip_H, chunk):
    lambda_N, gain_N = zero_order_hold(log_rate_N, log_frequency_N)
    powers = lambda exponents: jnp.exp(exponents[..., None] * lambda_N)
    time_C = jnp.arange(chunk, dtype=log_rate_N.dtype)
    return System(
        kernel_CCH=_toeplitz(
            product("tm,hm->th", parts(powers(time_C).conj()), parts(scaled(c_HN, gain_N)), skip_H.dtype)
        ),
        read_CM=parts(powers(time_C + 1).conj()),
        write_CM=parts(gain_N * powers(chunk - 1 - time_C)),
        lost_N=expm1(chunk * lambda_N),
        c_HN=c_HN,
        skip_H=skip_H,
    )


def _toeplitz(kernel_CH):
    """[s, t] -> kernel[t - s], zero for t < s, without a gather, whose gradient would scatter.

    Row s is 2C - 1 numbers of a sequence with period 2C, the kernel and C zeros, so that each row begins one earlier.
    """
    chunk, channels = kernel_CH.shape
    period = jnp.concatenate([kernel_CH, jnp.zeros_like(kernel_CH)])
    rows = jnp.tile(period, (chunk, 1))[: chunk * (2 * chunk - 1)]
    return rows.reshape(chunk, 2 * chunk - 1, channels)[:, :chunk]


def parts(z_N):
    """Real and imaginary parts side by side: Re sum(a b) is the dot product of those of conj(a) and of b."""
    return jnp.concatenate([z_N.real, z_N.imag], axis=-1)


def scaled(z, by):
    """`z * by`, complex, where `by` is broadcast to z in real arithmetic, so that its gradient is a sum of real numbers:

    TPUs have no complex all-reduce, and gather what it would sum.
    """
    return z * jax.lax.complex(jnp.broadcast_to(by.real, z.shape), jnp.broadcast_to(by.imag, z.shape))


def _scan(system, state_BHN, inputs, *, chunk):
    """The state after the last token, and y [B,T,H]; T is a multiple of `chunk`."""

    @partial(jax.checkpoint, prevent_cse=False)  # the backward pass keeps the states between chunks alone
    def advance(state_BHN, inputs):
        u_BCH, starts_BC = inputs
        document_BC = jnp.cumsum(starts_BC, axis=1)  # 0 is the one that was there before
        same_BCC = document_BC[:, :, None] == document_BC[:, None, :]
        dtype = u_BCH.dtype
        inside_BCH = jnp.sum(jnp.where(same_BCC[..., None], system.kernel_CCH, 0) * u_BCH[:, :, None], axis=1)
        before_BCH = product("tm,bhm->bth", system.read_CM, parts(scaled(state_BHN, system.c_HN)), dtype)
        before_BCH = jnp.where(document_BC[..., None] == 0, before_BCH, 0)
        last_BCH = jnp.where(same_BCC[:, -1, :, None], u_BCH, 0)
        written_BHM = product("sm,bsh->bhm", system.write_CM, last_BCH, dtype)
        # Not e^(C Lambda) times the state: that factor's rounding, over and over, would move a slow mode's decay.
        carried_BHN = jnp.where(document_BC[:, -1, None, None] == 0, state_BHN + scaled(state_BHN, system.lost_N), 0)
        state_BHN = carried_BHN + jax.lax.complex(*jnp.split(written_BHM, 2, axis=-1))
        return state_BHN, inside_BCH + before_BCH + system.skip_H * u_BCH

    def split(x_BT):
        batch, time, *rest = x_BT.shape
        return jnp.moveaxis(x_BT.reshape(batch, time // chunk, chunk, *rest), 1, 0)

    state_BHN, y_NBCH = jax.lax.scan(advance, state_BHN, jax.tree.map(split, inputs))
    y_BNCH = jnp.moveaxis(y_NBCH, 0, 1)
    return state_BHN, y_BNCH.reshape(y_BNCH.shape[0], -1, y_BNCH.shape[-1])
