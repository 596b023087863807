"""Memory of one chip during a step, by kind, from the compiler's own count."""

import math

import jax

from mesanet_jax.aot.build import Build

GIBIBYTE = 2**30


def measure(build: Build) -> dict[str, int]:
    """Bytes on a chip by kind; the gradients are among the temporaries.

    Of a step that does not fit, what the compiler gave as the reason, beside what can be counted without it.
    """
    state = build.program.state
    known = {
        "parameters": _shard_bytes(state["params"]),
        "optimizer state": _shard_bytes(state["opt_state"]),
        "batch": _shard_bytes(build.program.batch),
    }
    if build.executable is None:
        if "total" in build.shortage:
            return known | {"temporaries and program": build.shortage["total"] - sum(known.values())}
        return known | build.shortage
    counted = build.executable.memory_analysis()
    return known | {
        "padding of these": counted.argument_size_in_bytes - sum(known.values()),
        "temporaries": counted.temp_size_in_bytes,
        "outputs": counted.output_size_in_bytes
        - counted.alias_size_in_bytes,  # the new state takes the old one's place
        "program": counted.generated_code_size_in_bytes,
    }


def limit(build: Build) -> int | None:
    """Bytes of a chip's memory, None on the CPU."""
    chip = build.topology.chip
    return None if chip is None else int(chip.hbm * GIBIBYTE)


def fits(build: Build) -> bool:
    """Whether the compiler found room for the step, and its parts together stay below the chip's memory."""
    bound = limit(build)
    return build.executable is not None and (bound is None or sum(measure(build).values()) <= bound)


def _shard_bytes(tree) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
