"""What the Hopper kernels share: matrices in shared memory, loads, and matrix products of one warpgroup (Mosaic GPU).

docs/kernels.md, "GPU kernels (Hopper)", explains parts, barriers and layouts. A profile shows a kernel under the name
of its Python function, so these functions have telling names.

Letters at the end of names: C tokens of a chunk, D columns of a matrix.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

type Ref = Any  # a reference to memory on the GPU; Pallas has no public type for it
type Layout = Any  # a layout in registers; Pallas exports only one of its types
type Factors = tuple[Any, Any]  # a and b of a product a @ b: b in shared memory, a there or in registers

CHUNK = 64  # rows of a warpgroup's matrix instruction
BLOCK = 64  # columns computed together: 128 bytes of bfloat16, the widest tile that shared memory can swizzle
SIZES = (64, 128)  # supported key and value sizes
ROWS = plgpu.Layout.WGMMA  # layout in registers of the result of a matrix instruction
DROPPED = {jnp.dtype(jnp.float16): 13, jnp.dtype(jnp.bfloat16): 16}  # mantissa bits of float32 that the dtype lacks
# Lane semantics, because inferring the layouts of these kernels under the default semantics takes minutes.
# No scratch memory for reductions, because sums over a row stay within a warp.
# No automatic barriers, because they would surround every write; the kernels state themselves where warps wait for each
# other (`plgpu.commit_smem`).
COMPILER = plgpu.CompilerParams(
    approx_math=True,
    reduction_scratch_bytes=0,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,
)


def unsupported_reason(sizes: Iterable[int]) -> str:
    """Returns why these kernels cannot run here with keys and values of these sizes; empty if they can."""
    if jax.default_backend() != "gpu" or jax.devices()[0].compute_capability != "9.0":
        return "needs an NVIDIA Hopper GPU"
    return "" if set(sizes) <= set(SIZES) else f"needs key and value sizes in {SIZES}"


def kernel(body: Callable, **options) -> Callable:
    """Returns `plgpu.kernel(body, **options)` as a function that runs the kernel exactly once per call.

    Without the barriers, XLA (jaxlib 0.11.2) fuses a kernel with the write of its result into an array of all layers,
    and runs the kernel a second time for every other reader of the result, e.g. a solve that is kept for the backward
    pass.
    """
    run = plgpu.kernel(body, **options)
    return lambda *arrays: jax.tree.map(lax.optimization_barrier, run(*arrays))


def shared(*shape: int, dtype: DTypeLike):
    """Returns shared memory for matrices, laid out as matrix instructions read them: swizzled tiles 128 bytes wide."""
    tile = (8, 128 // jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform(tile)  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def tile(ref: Ref) -> jax.Array:
    """Loads a matrix from `shared` memory into registers, as float32."""
    return plgpu.load(ref, layout=ROWS).astype(jnp.float32)


def untiled(ref: Ref, layout: Layout = ROWS) -> jax.Array:
    """Loads a matrix from memory without tiles into registers; with a reduced layout, a vector from any memory."""
    return plgpu.load(ref, layout=layout, optimized=False)


def per_row(x_C: jax.Array, columns: int) -> jax.Array:
    """Returns [C, columns] with one number in each row, from a vector in layout `ROWS.reduce(1)`."""
    return lax.broadcast_in_dim(x_C, (x_C.shape[0], columns), [0])


def per_column(x_D: jax.Array, rows: int) -> jax.Array:
    """Returns [rows, D] with one number in each column, from a vector in layout `ROWS.reduce(0)`."""
    return lax.broadcast_in_dim(x_D, (rows, x_D.shape[0]), [1])


class Sum(NamedTuple):
    """A float32 sum of matrix products that the matrix unit computes asynchronously, in the accumulator `ref`."""

    ref: Ref

    def add(self, *factors: Factors) -> None:
        """Starts a @ b for each (a, b) of `factors`; a may be in registers. Each counts as one product in `value`."""
        for a, b in factors:
            plgpu.wgmma(self.ref, a, b)

    def value(self, *, running: int = 0) -> jax.Array:
        """Returns the sum once it is complete; the `running` products started last, of other sums, may go on."""
        return plgpu.wgmma_accumulator_load(self.ref, wait_n=running)

    def restart(self, x: jax.Array) -> None:
        """Sets the sum to x. No product of this sum may be running."""
        self.ref[...] = x


def with_sums(body: Callable, *shapes: tuple[int, int]):
    """Returns body(*sums), where each of the `Sum`s has one of the shapes and begins at 0."""
    accumulators = [plgpu.ACC(shape, jnp.float32) for shape in shapes]  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(lambda *refs: body(*map(Sum, refs)), *accumulators)


def products(*terms: tuple[tuple[int, int], jax.Array | None, Sequence[Factors]]) -> list[jax.Array]:
    """Returns several `product`s, each a (shape, start or None, factors), that are computed back to back."""

    def multiply(*sums):
        for total, (_, start, factors) in zip(sums, terms):
            if start is not None:
                total.restart(start)
            total.add(*factors)
        later = [sum(len(factors) for *_, factors in terms[i + 1 :]) for i in range(len(terms))]
        return [total.value(running=running) for total, running in zip(sums, later)]

    return with_sums(multiply, *(shape for shape, *_ in terms))


def product(shape: tuple[int, int], *factors: Factors, start: jax.Array | None = None) -> jax.Array:
    """Returns `start` plus the sum of a @ b over all (a, b) of `factors`, float32 [*shape] in registers."""
    return products((shape, start, factors))[0]


def fetch(copies: Iterable[tuple[Ref, Ref]], loaded: Ref) -> None:
    """Starts copies (source, target) from global to shared memory; each arrives once at the barrier `loaded`."""
    for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target, loaded)


def cross_products(a_parts: Sequence, b_parts: Sequence) -> list[Factors]:
    """Returns the factors of the product of two sums of parts, without the products of two small parts.

    The omitted products are about as small as what the last parts round off.
    """
    most = max(len(a_parts), len(b_parts))
    return [(a, b) for i, a in enumerate(a_parts) for j, b in enumerate(b_parts) if i + j < most]


def transposed(parts: Iterable[Ref]) -> list[Ref]:
    """Returns transposed views of matrices in shared memory."""
    return [part.transpose((1, 0)) for part in parts]


def sum_parts(parts: Iterable[Ref]) -> jax.Array:
    """Loads the parts of a matrix from shared memory and returns their sum, float32 in registers."""
    first, *others = map(tile, parts)
    return sum(others, start=first)


def split_parts(x: jax.Array, count: int, dtype: DTypeLike) -> tuple[jax.Array, ...]:
    """Returns float32 arrays whose sum is x. All but the last are representable in `dtype`; a cast rounds the last."""
    parts = []
    for _ in range(count - 1):
        parts.append(leading_bits(x, dropped=DROPPED[jnp.dtype(dtype)]))
        x = x - parts[-1]
    return *parts, x


def store_parts(parts: Sequence[jax.Array], targets: Sequence[Ref]) -> None:
    """Writes parts from registers to memory in its dtype. The caller still has to call `plgpu.commit_smem`."""
    for part, target in zip(parts, targets, strict=True):
        target[...] = part.astype(target.dtype)


def leading_bits(x: jax.Array, *, dropped: int) -> jax.Array:
    """Returns float32 x with the last `dropped` bits of its mantissa set to 0.

    This works on the bits because the compiler may remove a cast to a short dtype and back.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << dropped))
    return lax.bitcast_convert_type(bits, jnp.float32)
