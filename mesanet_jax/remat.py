"""Rematerialisation: which values the backward pass keeps and which it computes again.

Modules mark the values that are worth keeping with `checkpoint_name(x, NAME)`. A policy lists the names that it keeps,
so both sides must use the constants below: a value marked with any other name would silently be recomputed.
"""

from collections.abc import Callable

import jax

from mesanet_kernels import MESA_SOLUTION

MIXER_OUTPUT = "mixer"  # what a mixer adds to the residual stream
MEMORY_READ = "read"  # what the op of a matrix memory returns, before the output norm, gate and projection

_policies = jax.checkpoint_policies

# From the policy that keeps most to the one that keeps least. Mesa's solution is the most expensive value of a Mesa
# layer. The op of a matrix memory costs as much as a matrix product, but the compiler does not see it as one, so
# "matmuls" keeps its result by name.
POLICIES = {
    "matmuls": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names(MEMORY_READ, MESA_SOLUTION)
    ),
    "mixer": _policies.save_only_these_names(MIXER_OUTPUT, MESA_SOLUTION),
    "full": _policies.nothing_saveable,
}


def remat(function: Callable, policy: str, *, scanned: bool = True) -> Callable:
    """Returns `function` with its values for the backward pass chosen by `policy`.

    Args:
      function: what is differentiated, e.g. the call of one group of blocks.
      policy: a name of `POLICIES`, or "none", which keeps every value.
      scanned: whether `function` is the body of a `jax.lax.scan`. There XLA cannot merge the forward and the backward
        computation across the loop's boundary, and the guard against such merging would only cost time.
    """
    if policy == "none":
        return function
    return jax.checkpoint(function, policy=POLICIES[policy], prevent_cse=not scanned)
