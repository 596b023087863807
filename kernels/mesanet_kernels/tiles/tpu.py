"""What the TPU kernels of a linear recurrence share: grid, blocks and matrix products (Pallas, Mosaic TPU).

A grid step computes one chunk of a few heads. The chains of products of different heads are independent, so one fills
the gaps of another. The last axis of the grid walks over the chunks in order, so that states stay in VMEM from one grid
step to the next (docs/kernels.md, "TPU kernels").

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size, G heads of a grid step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

type Ref = Any  # a reference to memory on the TPU; Pallas has no public type for it

CHUNK = 128  # rows of the matrix unit, and lanes of a row of weights
LANES = 128
HEADS = (4, 2, 1)  # heads of a grid step: the largest that divides the heads and fills whole lanes; otherwise all heads
HALF = jnp.bfloat16
EXACT = 3  # parts in bfloat16 that hold every bit of a float32
COMPILER = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=32 * 2**20)


class Grid(NamedTuple):
    """Grid steps (row of the batch, group of heads, chunk), and which block of an array each of them sees.

    Attributes:
      group: heads of a grid step.
      backwards: whether the last chunk comes first.
    """

    batch: int
    heads: int
    chunks: int
    group: int
    backwards: bool = False

    @property
    def steps(self) -> tuple[int, int, int]:
        """The shape of the grid."""
        return self.batch, self.heads // self.group, self.chunks

    def tokens(self, size: int) -> pl.BlockSpec:
        """Returns the block [C, G * size] of an array [B, T, H * size], as `flat` makes it."""
        return pl.BlockSpec((None, CHUNK, self.group * size), lambda b, h, n: (b, self._chunk(n), h))

    def of_chunk(self, *matrix: int) -> pl.BlockSpec:
        """Returns the block [G, *matrix] of an array [N, B, H, *matrix]."""
        return pl.BlockSpec((None, None, self.group, *matrix), lambda b, h, n: (self._chunk(n), b, h, 0, 0))

    def of_row(self, *matrix: int) -> pl.BlockSpec:
        """Returns the block [G, *matrix] of an array [B, H, *matrix]: the same one for all chunks."""
        return pl.BlockSpec((None, self.group, *matrix), lambda b, h, n: (b, h, 0, 0))

    def of_heads(self, *matrix: int) -> pl.BlockSpec:
        """Returns the block [G, *matrix] of an array [H, *matrix]: the same one for all rows and chunks."""
        return pl.BlockSpec((self.group, *matrix), lambda b, h, n: (h, 0, 0))

    def _chunk(self, n):
        return self.chunks - 1 - n if self.backwards else n


def grid(k_BTHK: jax.Array, *values: jax.Array, backwards: bool = False) -> Grid:
    """Returns the grid for keys and any number of values [B, T, H, V], with T a multiple of CHUNK."""
    batch, time, heads, _ = k_BTHK.shape
    sizes = [x.shape[-1] for x in (k_BTHK, *values)]

    def fills_lanes(count):
        return heads % count == 0 and all(count * size % LANES == 0 for size in sizes)

    group = next((count for count in HEADS if fills_lanes(count)), heads)
    return Grid(batch, heads, time // CHUNK, group, backwards)


def flat(x_BTHK: jax.Array) -> jax.Array:
    """Returns [B, T, H * K]: with the heads of a token side by side, no block needs a transposition."""
    return x_BTHK.reshape(*x_BTHK.shape[:2], -1)


def lanes(head: int, size: int) -> tuple[slice, slice]:
    """Returns the index of one head in a block of `Grid.tokens`."""
    return slice(None), slice(head * size, (head + 1) * size)


def begin_state(state: Ref, initial: Ref) -> None:
    """Copies `initial` to `state`, which is carried over the chunks, in the grid step of the first chunk."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = initial[...]


def advance_state(state_KV, k_CK, v_CV, weight_1C, carry_11, *, parts: int = 1) -> jax.Array:
    """Returns the state after a chunk: carry S + sum_s weight_s k_s v_s^T.

    The weighted keys, and values if they are float32, are multiplied in `parts` bfloat16 parts.
    """
    weighted_KC = k_CK.astype(jnp.float32).T * weight_1C
    return carry_11 * state_KV + product(split_parts(weighted_KC, parts), split_parts(v_CV, parts))


def split_parts(x: jax.Array, parts: int) -> list[jax.Array]:
    """Returns bfloat16 matrices whose sum is x to `parts` times 8 bits; [x] if x is bfloat16."""
    if x.dtype == HALF:
        return [x]
    found = []
    for _ in range(parts - 1):
        high = _leading_bits(x)
        found.append(high.astype(HALF))
        x = x - high
    return [*found, x.astype(HALF)]


def part_count(dtype: DTypeLike) -> int:
    """Returns in how many parts the kernels multiply an array of this dtype."""
    return {jnp.dtype(HALF): 1, jnp.dtype(jnp.float32): 2}[jnp.dtype(dtype)]


def _leading_bits(x):
    """Returns float32 x, nearly rounded to the bits that bfloat16 has.

    The other bits are set to 0, because the compiler may remove a cast to bfloat16 and back. Before that, x grows by
    about half of the last bit that is kept, which makes the result nearly a rounding. Adding that half to the integer
    bits instead crashes the compiler (libtpu 0.0.50).
    """
    bits = lax.bitcast_convert_type(x * (1 + 2.0**-8.5), jnp.int32)
    return lax.bitcast_convert_type(bits & jnp.int32(-(1 << 16)), jnp.float32)


def product(a_parts: Sequence[jax.Array], b_parts: Sequence[jax.Array], **transposed: bool) -> jax.Array:
    """Returns the `dot` of two sums of parts, float32, without the products of two small parts."""
    most = max(len(a_parts), len(b_parts))
    pairs = [(a, b) for i, a in enumerate(a_parts) for j, b in enumerate(b_parts) if i + j < most]
    return cast(jax.Array, sum(dot(a, b, **transposed) for a, b in pairs))


def dot(a: jax.Array, b: jax.Array, *, a_transposed: bool = False, b_transposed: bool = False) -> jax.Array:
    """Returns the product of two bfloat16 matrices, float32."""
    contracting = ((0 if a_transposed else 1,), (1 if b_transposed else 0,))
    return lax.dot_general(a, b, (contracting, ((), ())), preferred_element_type=jnp.float32)


def column(x_1C: jax.Array) -> jax.Array:
    """Returns [C, 1] from [1, C]. The compiler estimates less time for a masked sum than for a transposition."""
    return jnp.sum(_on_diagonal(x_1C, CHUNK), axis=1, keepdims=True)


def row(x_C1: jax.Array) -> jax.Array:
    """Returns [1, C] from [C, 1]."""
    return jnp.sum(_on_diagonal(x_C1, CHUNK), axis=0, keepdims=True)


def diagonal(x_KK: jax.Array) -> jax.Array:
    """Returns the diagonal of a matrix, [1, K]."""
    return jnp.sum(_on_diagonal(x_KK, len(x_KK)), axis=0, keepdims=True)


def _on_diagonal(x, size):
    """Returns [size, size] with x, broadcast if it is a vector, on the diagonal and 0 elsewhere."""
    row_number, column_number = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return jnp.where(row_number == column_number, x, 0)


def out(*shape: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a kernel's result."""
    return jax.ShapeDtypeStruct(shape, dtype)
