"""What the TPU kernels of a linear recurrence share: their grid, the blocks of its steps, products (Pallas, Mosaic TPU).

A step of the grid takes one chunk of a few heads, whose chains of products are independent and fill each other's gaps.
The last axis of the grid walks over the chunks in order, so that states stay in VMEM from one step to the next.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

CHUNK = 128  # rows of the matrix unit, and lanes of a row of weights
LANES = 128
HEADS = (4, 2, 1)  # of a step: the most that divide the heads and fill whole lanes; else all
HALF = jnp.bfloat16
EXACT = 3  # parts in bfloat16 that hold all of float32
COMPILER = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=32 * 2**20)


class Grid(NamedTuple):
    """Steps (row, group of heads, chunk), and the block of an array that a step sees. `backwards`: last chunk first."""

    batch: int
    heads: int
    chunks: int
    group: int  # heads of a step
    backwards: bool = False

    @property
    def steps(self):
        return self.batch, self.heads // self.group, self.chunks

    def tokens(self, size):
        """Of [B, T, H size], as `flat` gives it."""
        return pl.BlockSpec((None, CHUNK, self.group * size), lambda b, h, n: (b, self._chunk(n), h))

    def of_chunk(self, *matrix):
        """Of [N, B, H, *matrix]."""
        return pl.BlockSpec((None, None, self.group, *matrix), lambda b, h, n: (self._chunk(n), b, h, 0, 0))

    def of_row(self, *matrix):
        """Of [B, H, *matrix]: the same for all chunks."""
        return pl.BlockSpec((None, self.group, *matrix), lambda b, h, n: (b, h, 0, 0))

    def of_heads(self, *matrix):
        """Of [H, *matrix]."""
        return pl.BlockSpec((self.group, *matrix), lambda b, h, n: (h, 0, 0))

    def _chunk(self, n):
        return self.chunks - 1 - n if self.backwards else n


def grid(k_BTHK, *values, backwards=False):
    """Of keys and any values [B,T,H,V]."""
    batch, time, heads, _ = k_BTHK.shape
    sizes = [x.shape[-1] for x in (k_BTHK, *values)]
    fills = lambda count: heads % count == 0 and all(count * size % LANES == 0 for size in sizes)
    group = next((count for count in HEADS if fills(count)), heads)
    return Grid(batch, heads, time // CHUNK, group, backwards)


def flat(x_BTHK):
    """[B, T, H K]: the heads of a token side by side, so that a block needs no transposition."""
    return x_BTHK.reshape(*x_BTHK.shape[:2], -1)


def lanes(head, size):
    """The part of a `Grid.tokens` block that is one head's."""
    return slice(None), slice(head * size, (head + 1) * size)


def begin(state, initial):
    """Sets a state that is carried over the chunks, in the first of them."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = initial[...]


def advanced(state_KV, k_CK, v_CV, weight_1C, carry_11, *, parts=1):
    """carry S + sum_s weight_s k_s v_s^T; the weighted k, and v in float32, are multiplied in `parts` parts."""
    weighted_KC = k_CK.astype(jnp.float32).T * weight_1C
    return carry_11 * state_KV + product(cut(weighted_KC, parts), cut(v_CV, parts))


def cut(x, parts):
    """x as a list of bfloat16 matrices that sum to 8 `parts` bits of it; of bfloat16, x alone."""
    if x.dtype == HALF:
        return [x]
    found = []
    for _ in range(parts - 1):
        high = _leading_bits(x)
        found.append(high.astype(HALF))
        x = x - high
    return [*found, x.astype(HALF)]


def parts_of(dtype):
    """In how many parts the kernels multiply an array."""
    return {jnp.dtype(HALF): 1, jnp.dtype(jnp.float32): 2}[jnp.dtype(dtype)]


def _leading_bits(x):
    """x with the bits that bfloat16 has; not by a cast there and back, which may be taken for nothing.

    Further bits are cut off, once about half of the last kept is added: nearly rounding. To add it to the bits themselves
    crashes the compiler (libtpu 0.0.50).
    """
    bits = lax.bitcast_convert_type(x * (1 + 2.0**-8.5), jnp.int32)
    return lax.bitcast_convert_type(bits & jnp.int32(-(1 << 16)), jnp.float32)


def product(a_parts, b_parts, **transposed):
    """The `dot` of two sums of parts, without the products of two small ones."""
    most = max(len(a_parts), len(b_parts))
    pairs = [(a, b) for i, a in enumerate(a_parts) for j, b in enumerate(b_parts) if i + j < most]
    return sum(dot(a, b, **transposed) for a, b in pairs)


def dot(a, b, *, a_transposed=False, b_transposed=False):
    """The product of two bfloat16 matrices, float32."""
    contracting = ((0 if a_transposed else 1,), (1 if b_transposed else 0,))
    return lax.dot_general(a, b, (contracting, ((), ())), preferred_element_type=jnp.float32)


def column(x_1C):
    """[1, C] -> [C, 1]: a sum over a masked square, of which the compiler expects less time than of a transposition."""
    return jnp.sum(_on_diagonal(x_1C, CHUNK), axis=1, keepdims=True)


def row(x_C1):
    """[C, 1] -> [1, C]."""
    return jnp.sum(_on_diagonal(x_C1, CHUNK), axis=0, keepdims=True)


def diagonal(x_KK):
    """[K, K] -> [1, K]."""
    return jnp.sum(_on_diagonal(x_KK, len(x_KK)), axis=0, keepdims=True)


def _on_diagonal(x, size):
    """x, spread over a square where it must be, and 0 off the diagonal."""
    position = lambda axis: lax.broadcasted_iota(jnp.int32, (size, size), axis)
    return jnp.where(position(0) == position(1), x, 0)


def out(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)
