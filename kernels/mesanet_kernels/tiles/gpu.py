"""What the Hopper kernels share: tiles in shared memory, loads and products of one warpgroup (Pallas, Mosaic GPU).

A profile shows a kernel by the name of its function.

C tokens of a chunk, D columns of a matrix.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64  # rows of a warpgroup's matrix instruction
BLOCK = 64  # columns computed together: 128 bytes of bfloat16, the widest tile that shared memory swizzles
SIZES = (64, 128)  # of keys and values
ROWS = plgpu.Layout.WGMMA  # of a matrix in registers
DROPPED = {jnp.dtype(jnp.float16): 13, jnp.dtype(jnp.bfloat16): 16}  # the mantissa bits that float32 has more
# The default semantics infer the layouts of such kernels for minutes. Sums over a row stay within a warp: no scratch.
# Kernels say themselves where warps wait for each other (`commit_smem`): before the copy engine or the matrix unit reads what
# they have written, and before memory is written that another warp may still read.
COMPILER = plgpu.CompilerParams(
    approx_math=True,
    reduction_scratch_bytes=0,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,
)


def unsupported_reason(sizes):
    """What these kernels miss for keys and values of these sizes on this machine: the end of a sentence, or ""."""
    if jax.default_backend() != "gpu" or jax.devices()[0].compute_capability != "9.0":
        return "needs an NVIDIA Hopper GPU"
    return "" if set(sizes) <= set(SIZES) else f"needs key and value sizes in {SIZES}"


def kernel(body, **options):
    """`plgpu.kernel` that runs once a call.

    Without the barriers XLA (of jaxlib 0.11.2) merges a kernel with the writing of its result among those of all layers, and
    runs it a second time for whoever else reads the result: a solve, say, that is kept for the gradients.
    """
    run = plgpu.kernel(body, **options)
    return lambda *arrays: jax.tree.map(lax.optimization_barrier, run(*arrays))


def shared(*shape, dtype):
    """Matrices in shared memory as the matrix instructions read them: tiles 128 bytes wide, swizzled."""
    tile = (8, 128 // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(128)))


def tile(ref):
    """A matrix of `shared` memory in registers, as float32."""
    return plgpu.load(ref, layout=ROWS).astype(jnp.float32)


def untiled(ref, layout=ROWS):
    """A matrix of global memory in registers; with a reduced layout a vector of any memory."""
    return plgpu.load(ref, layout=layout, optimized=False)


def per_row(x_C, columns):
    """[C, columns] whose rows repeat the numbers of a vector in `ROWS.reduce(1)`."""
    return lax.broadcast_in_dim(x_C, (x_C.shape[0], columns), [0])


def per_column(x_D, rows):
    """[rows, D] whose columns repeat the numbers of a vector in `ROWS.reduce(0)`."""
    return lax.broadcast_in_dim(x_D, (rows, x_D.shape[0]), [1])


class Sum(NamedTuple):
    """A sum of matrix products on its way, float32 [rows, columns]: the matrix unit goes on while others compute."""

    ref: object

    def add(self, *factors):
        """Starts a @ b for all (a, b) of `factors`; a may be in registers. Each counts as one in `value`."""
        for a, b in factors:
            plgpu.wgmma(self.ref, a, b)

    def value(self, *, running=0):
        """The sum once at most the `running` products started last are on their way: none of this sum's."""
        return plgpu.wgmma_accumulator_load(self.ref, wait_n=running)

    def restart(self, x):
        """Sets the sum, of which no product may be on its way."""
        self.ref[...] = x


def with_sums(body, *shapes):
    """body(*sums), each a `Sum` of one of the shapes that begins at 0."""
    return pl.run_scoped(lambda *refs: body(*map(Sum, refs)), *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def products(*terms):
    """Several `product`s, each a (shape, start, factors), that the matrix unit computes in a row."""

    def multiply(*sums):
        for total, (_, start, factors) in zip(sums, terms):
            if start is not None:
                total.restart(start)
            total.add(*factors)
        later = [sum(len(factors) for *_, factors in terms[i + 1 :]) for i in range(len(terms))]
        return [total.value(running=running) for total, running in zip(sums, later)]

    return with_sums(multiply, *(shape for shape, *_ in terms))


def product(shape, *factors, start=None):
    """The sum of a @ b over all (a, b) of `factors` and of `start`, float32 in registers; a may be in registers too."""
    return products((shape, start, factors))[0]


def fetch(copies, loaded):
    """Starts copies (source, target) to shared memory; the barrier `loaded` awaits as many arrivals."""
    for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target, loaded)


def crossed(a_parts, b_parts):
    """Factors for `product` of two sums, without the products of two small parts."""
    most = max(len(a_parts), len(b_parts))
    return [(a, b) for i, a in enumerate(a_parts) for j, b in enumerate(b_parts) if i + j < most]


def transposed(parts):
    return [part.transpose((1, 0)) for part in parts]


def total(parts):
    """The sum of parts in shared memory, float32 in registers."""
    first, *others = map(tile, parts)
    return sum(others, start=first)


def cut(x, count, dtype):
    """float32 x as the sum of `count` parts that `dtype` holds, but for what the last one rounds."""
    parts = []
    for _ in range(count - 1):
        parts.append(leading_bits(x, dropped=DROPPED[jnp.dtype(dtype)]))
        x = x - parts[-1]
    return *parts, x


def store(parts, targets):
    """Parts in registers to shared memory; `commit_smem` is yet to come."""
    for part, target in zip(parts, targets, strict=True):
        target[...] = part.astype(target.dtype)


def leading_bits(x, *, dropped):
    """x without the last `dropped` bits of its mantissa: a cast there and back may be taken for nothing."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << dropped))
    return lax.bitcast_convert_type(bits, jnp.float32)
