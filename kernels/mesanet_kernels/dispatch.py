"""Which implementations an op has."""

import importlib


def implementations(op: str) -> tuple[str, ...]:
    """Returns the names that the `implementation` argument of `op` accepts, e.g. `implementations("mesa")`.

    Raises:
      ModuleNotFoundError: there is no such op.
    """
    return tuple(importlib.import_module(f"mesanet_kernels.ops.{op}.api").IMPLEMENTATIONS)
