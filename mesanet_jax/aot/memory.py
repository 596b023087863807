"""Reports the memory of one chip during a step, by kind, as the compiler counts it."""

import math

import jax

from mesanet_jax.aot.build import Build

GIBIBYTE = 2**30


def measure(build: Build) -> dict[str, int]:
    """Returns the bytes on a chip by kind; the gradients are among the temporaries.

    For a step that does not fit, it returns what the compiler gave as the reason and what can be counted without it.
    """
    state = build.program.state
    known = {
        "parameters": _shard_bytes(state["params"]),
        "optimizer state": _shard_bytes(state["opt_state"]),
        "batch": _shard_bytes(build.program.batch),
    }
    if build.executable is None:
        assert build.shortage is not None
        if "total" in build.shortage:
            return known | {"temporaries and program": build.shortage["total"] - sum(known.values())}
        return known | build.shortage
    counted = build.executable.memory_analysis()
    assert counted is not None
    return known | {
        "padding of these": counted.argument_size_in_bytes - sum(known.values()),
        "temporaries": counted.temp_size_in_bytes,
        # The new state takes the place of the old one.
        "outputs": counted.output_size_in_bytes - counted.alias_size_in_bytes,
        "program": counted.generated_code_size_in_bytes,
    }


def limit(build: Build) -> int | None:
    """Returns the bytes of a chip's memory; None on the CPU."""
    chip = build.topology.chip
    return None if chip is None else int(chip.hbm * GIBIBYTE)


def fits(build: Build) -> bool:
    """Whether the compiler found room for the step and all its parts together fit the chip's memory."""
    bound = limit(build)
    return build.executable is not None and (bound is None or sum(measure(build).values()) <= bound)


def _shard_bytes(tree) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
