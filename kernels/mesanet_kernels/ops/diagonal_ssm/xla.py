"""The diagonal state space model in chunks, in plain XLA.

Inside a chunk, the output is a convolution with the kernel K[t - s] = Re(sum_n C_n gain_n e^{(t - s) Lambda_n}), masked
exactly between documents. Between chunks, the state is carried. All channels share the modes, so that reading and
writing the state are matrix products with one matrix C x 2N.

The chunks of a block are computed at once, and their states by a parallel scan (Hillis and Steele 1986), because a loop
over chunks would make a GPU wait for each. A loop over blocks limits the memory of long rows. Complex numbers are
multiplied as pairs of real ones, which halves the work if one factor is real.

B batch, T time, G chunks of a block, C tokens of a chunk (t is the token that reads, s the token that is read),
H channels, N modes, M = 2 N real and imaginary parts.
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

BLOCK_TOKENS = 512  # tokens per block; the states of a block take 2 N / C times the memory of its inputs


class System(NamedTuple):
    """The matrices for chunks of C tokens, which do not depend on the input.

    Attributes:
      kernel_CCH: [s, t], the weight of input s in output t.
      read_CM: the weights of the state that enters the chunk in the output of each token.
      write_CM: the weights of the input of each token in the state that leaves the chunk.
      lambda_N: Lambda, complex.
      c_HN: C, complex.
      skip_H: the weight of each input in its own output.
    """

    kernel_CCH: jax.Array
    read_CM: jax.Array
    write_CM: jax.Array
    lambda_N: jax.Array
    c_HN: jax.Array
    skip_H: jax.Array


@recomputed
def diagonal_ssm_xla(
    chunk: int, u_BTH, log_rate_N, log_frequency_N, c_re_HN, c_im_HN, skip_H, state, segment_ids_BT
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes `api.diagonal_ssm`."""
    dtype, length = accumulation_dtype(u_BTH), u_BTH.shape[1]
    starts_BT = state_resets(segment_ids_BT)
    system = partial(_system, log_rate_N, log_frequency_N, jax.lax.complex(c_re_HN, c_im_HN), skip_H)
    state_BHN, outputs = jax.lax.complex(*state), []
    for begin, end, size, chunks in _time_ranges(length, chunk):
        inputs = u_BTH[:, begin:end].astype(dtype), starts_BT[:, begin:end]
        state_BHN, y_BTH = _scan(system(size), state_BHN, inputs, chunk=size, chunks=chunks)
        outputs.append(y_BTH)
    return jnp.concatenate(outputs, axis=1).astype(u_BTH.dtype), (state_BHN.real, state_BHN.imag)


def _time_ranges(length: int, chunk: int) -> list[tuple[int, int, int, int]]:
    """Divides a row into whole blocks, the remaining whole chunks, and the rest as one shorter chunk.

    The row is not padded, because padding would let the final state decay.

    Returns:
      For each part that is not empty: (begin, end, tokens per chunk, chunks per block).
    """
    block = max(1, BLOCK_TOKENS // chunk) * chunk
    ends = (length - length % block, length - length % chunk, length)
    ranges = zip((0, *ends), ends, (chunk, chunk, length % chunk))
    return [(begin, end, size, min(end - begin, block) // size) for begin, end, size in ranges if begin < end]


def _system(log_rate_N, log_frequency_N, c_HN, skip_H, chunk: int) -> System:
    """Returns the matrices for chunks of `chunk` tokens."""
    lambda_N, gain_N = zero_order_hold(log_rate_N, log_frequency_N)

    def powers(exponents):
        return jnp.exp(exponents[..., None] * lambda_N)

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


def _toeplitz(kernel_CH: jax.Array) -> jax.Array:
    """Returns [C, C, H] whose element [s, t] is kernel[t - s], or zero for t < s.

    It avoids a gather, whose gradient would be a scatter. The kernel followed by C zeros is repeated, and the result is
    cut into rows of 2C - 1 numbers. This is one less than the period, so the kernel starts one place later in each row.
    """
    chunk, channels = kernel_CH.shape
    period = jnp.concatenate([kernel_CH, jnp.zeros_like(kernel_CH)])
    rows = jnp.tile(period, (chunk, 1))[: chunk * (2 * chunk - 1)]
    return rows.reshape(chunk, 2 * chunk - 1, channels)[:, :chunk]


def parts(z_N: jax.Array) -> jax.Array:
    """Returns the real parts followed by the imaginary parts, along the last axis.

    Re(sum(a b)) is the dot product of parts(conj(a)) and parts(b).
    """
    return jnp.concatenate([z_N.real, z_N.imag], axis=-1)


def scaled(z: jax.Array, by: jax.Array) -> jax.Array:
    """Returns the complex product `z * by`, with `by` broadcast to the shape of z.

    The broadcast is of the real and imaginary parts, so that its gradient is a sum of real numbers. TPUs have no
    complex all-reduce and would gather the terms of a complex sum.
    """
    return z * jax.lax.complex(jnp.broadcast_to(by.real, z.shape), jnp.broadcast_to(by.imag, z.shape))


def _scan(system: System, state_BHN, inputs, *, chunk: int, chunks: int) -> tuple[jax.Array, jax.Array]:
    """Returns (the state after the last token, y [B, T, H]).

    Args:
      inputs: (u [B, T, H], bool [B, T]: whether the state is zero before a token).
      chunk: tokens per chunk.
      chunks: chunks per block; T is a multiple of the block.
    """

    @partial(jax.checkpoint, prevent_cse=False)  # the backward pass keeps only the states between blocks
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
        )  # the document of the state that enters each chunk
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


def _carried(lambda_N, chunk: int, state_BHN, written_BGHM, document_BG) -> jax.Array:
    """Returns the states [B, G, H, N] that leave the chunks.

    Args:
      state_BHN: the state that enters the first chunk.
      written_BGHM: what each chunk writes into a zero state.
      document_BG: the document in which each chunk ends; 0 is that of the entering state.
    """
    total_BGHN = jax.lax.complex(*jnp.split(written_BGHM, 2, axis=-1))
    total_BGHN = jnp.concatenate(
        [state_BHN[:, None], total_BGHN], axis=1
    )  # the entering state counts as one more chunk
    document_BG = jnp.pad(document_BG, ((0, 0), (1, 0)))
    reach = 1  # total_BGHN is the sum over the last `reach` chunks
    while reach < total_BGHN.shape[1]:
        earlier_BGHN = total_BGHN[:, :-reach]
        same_BG = document_BG[:, reach:] == document_BG[:, :-reach]
        # Not e^(reach C Lambda) times the state, because rounding that factor repeatedly would change slow decays.
        kept_BGHN = earlier_BGHN + scaled(earlier_BGHN, expm1(reach * chunk * lambda_N))
        kept_BGHN = jnp.where(same_BG[..., None, None], kept_BGHN, 0)
        total_BGHN = jnp.concatenate([total_BGHN[:, :reach], total_BGHN[:, reach:] + kept_BGHN], axis=1)
        reach *= 2
    return total_BGHN[:, 1:]
