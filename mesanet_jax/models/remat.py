"""What the backward pass recomputes, by name: from most memory to least."""

from collections.abc import Callable

import jax

_policies = jax.checkpoint_policies

# "mixer" marks every mixer's output, "read" what its memory gave, and "mesa_q_star" the solution of Mesa's linear systems
# (its costliest value). A memory's op is as costly as a product, though the compiler does not see it as one.
POLICIES = {
    "matmuls": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names("read", "mesa_q_star")
    ),
    "mixer": _policies.save_only_these_names("mixer", "mesa_q_star"),
    "full": _policies.nothing_saveable,
}


def remat(function: Callable, policy: str, *, scanned: bool = True) -> Callable:
    """`function`, to be scanned over unless not `scanned`, with its residuals chosen by `policy`; "none" keeps them all."""
    if policy == "none":
        return function
    # Inside a scan nothing can be merged across the loop's boundary, so the guard against CSE only costs time.
    return jax.checkpoint(function, policy=POLICIES[policy], prevent_cse=not scanned)
