"""The diagonal state space in chunks, in plain XLA: a convolution inside a chunk, sums of states between chunks.

Inside a chunk, the kernel K[t - s] (pha.md 3.3) is masked by documents, exactly: a Fourier transform would mix them.
Between chunks, all channels share the modes, so that reading and writing the state are matrix products with one
C x 2N matrix. The chunks of a block are computed at once, their states by sums over 1, 2, 4, ... chunks before (Hillis and
Steele 1986): a loop over chunks would have a GPU wait for each. A loop over blocks bounds the memory of long rows.
Complex numbers are multiplied as pairs of real ones, which halves the work where one factor is real.

B batch, T time, G chunks of a block, C tokens of a chunk (t reads, s is read), H channels, N modes, M = 2 N real and
imaginary parts.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.documents import state_resets
from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.ops.diagonal_ssm.discretise import expm1, zero_order_hold
from mesanet_kernels.recompute import recomputed

BLOCK_TOKENS = 512  # computed at once; a block's states take 2 N / C times the memory of its inputs


class System(NamedTuple):
    """What does not depend on the input, for chunks of C tokens."""

    kernel_CCH: jax.Array  # [s, t]: what token s adds to the output of token t
    read_CM: jax.Array  # of the state that enters the chunk, at token t
    write_CM: jax.Array  # of token s, in the state that leaves the chunk
    lambda_N: jax.Array  # complex
    c_HN: jax.Array  # complex
    skip_H: jax.Array


@recomputed
def diagonal_ssm(chunk, u_BTH, log_rate_N, log_frequency_N, c_re_HN, c_im_HN, skip_H, state, segment_ids_BT):
    """Returns (y [B,T,H], final state); `api.diagonal_ssm` says what each argument is."""
    dtype, length = accumulation_dtype(u_BTH), u_BTH.shape[1]
    starts_BT = state_resets(segment_ids_BT)
    system = partial(_system, log_rate_N, log_frequency_N, jax.lax.complex(c_re_HN, c_im_HN), skip_H)
    state_BHN, outputs = jax.lax.complex(*state), []
    for begin, end, size, chunks in _spans(length, chunk):
        inputs = u_BTH[:, begin:end].astype(dtype), starts_BT[:, begin:end]
        state_BHN, y_BTH = _scan(system(size), state_BHN, inputs, chunk=size, chunks=chunks)
        outputs.append(y_BTH)
    return jnp.concatenate(outputs, axis=1).astype(u_BTH.dtype), (state_BHN.real, state_BHN.imag)


def _spans(length, chunk):
    """(begin, end, tokens of a chunk, chunks of a block): whole blocks, whole chunks, and the rest as a shorter chunk.

    Padding would let the final state decay.
    """
    block = max(1, BLOCK_TOKENS // chunk) * chunk
    ends = (length - length % block, length - length % chunk, length)
    spans = zip((0, *ends), ends, (chunk, chunk, length % chunk))
    return [(begin, end, size, min(end - begin, block) // size) for begin, end, size in spans if begin < end]


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
        lambda_N=lambda_N,
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


def _scan(system, state_BHN, inputs, *, chunk, chunks):
    """The state after the last token, and y [B,T,H]; T is a multiple of `chunks` chunks."""

    @partial(jax.checkpoint, prevent_cse=False)  # the backward pass keeps the states between blocks alone
    def advance(state_BHN, inputs):
        u_BGCH, starts_BGC = inputs
        document_BGC = jnp.cumsum(starts_BGC.reshape(starts_BGC.shape[0], -1), axis=1).reshape(starts_BGC.shape)
        same_BGCC = document_BGC[..., :, None] == document_BGC[..., None, :]
        dtype = u_BGCH.dtype
        last_BGCH = jnp.where(same_BGCC[..., -1, :, None], u_BGCH, 0)
        written_BGHM = product("sm,bgsh->bghm", system.write_CM, last_BGCH, dtype)
        left_BGHN = _carried(system.lambda_N, chunk, state_BHN, written_BGHM, document_BGC[..., -1])
        entering_BGHN = jnp.concatenate([state_BHN[:, None], left_BGHN[:, :-1]], axis=1)
        first_BG = jnp.pad(
            document_BGC[:, :-1, -1], ((0, 0), (1, 0))
        )  # the document that each chunk begins in; 0 comes in
        before_BGCH = product("tm,bghm->bgth", system.read_CM, parts(scaled(entering_BGHN, system.c_HN)), dtype)
        before_BGCH = jnp.where((document_BGC == first_BG[..., None])[..., None], before_BGCH, 0)
        inside_BGCH = jnp.sum(jnp.where(same_BGCC[..., None], system.kernel_CCH, 0) * u_BGCH[:, :, :, None], axis=2)
        return left_BGHN[:, -1], inside_BGCH + before_BGCH + system.skip_H * u_BGCH

    def split(x_BT):
        batch, time, *rest = x_BT.shape
        return jnp.moveaxis(x_BT.reshape(batch, time // (chunks * chunk), chunks, chunk, *rest), 1, 0)

    state_BHN, y_NBGCH = jax.lax.scan(advance, state_BHN, jax.tree.map(split, inputs))
    y_BNGCH = jnp.moveaxis(y_NBGCH, 0, 1)
    return state_BHN, y_BNGCH.reshape(y_BNGCH.shape[0], -1, y_BNGCH.shape[-1])


def _carried(lambda_N, chunk, state_BHN, written_BGHM, document_BG):
    """The states [B,G,H,N] that the chunks leave: the one that enters and what each wrote, of the document that it ends in."""
    total_BGHN = jax.lax.complex(*jnp.split(written_BGHM, 2, axis=-1))
    total_BGHN = jnp.concatenate(
        [state_BHN[:, None], total_BGHN], axis=1
    )  # the entering state is as if a chunk had left it
    document_BG = jnp.pad(document_BG, ((0, 0), (1, 0)))
    reach = 1  # total_BGHN is what the last `reach` chunks wrote
    while reach < total_BGHN.shape[1]:
        earlier_BGHN = total_BGHN[:, :-reach]
        same_BG = document_BG[:, reach:] == document_BG[:, :-reach]
        # Not e^(reach C Lambda) times the state: that factor's rounding, over and over, would move a slow mode's decay.
        kept_BGHN = earlier_BGHN + scaled(earlier_BGHN, expm1(reach * chunk * lambda_N))
        kept_BGHN = jnp.where(same_BG[..., None, None], kept_BGHN, 0)
        total_BGHN = jnp.concatenate([total_BGHN[:, :reach], total_BGHN[:, reach:] + kept_BGHN], axis=1)
        reach *= 2
    return total_BGHN[:, 1:]
