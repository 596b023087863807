"""How an op chooses among its implementations.

The public function of an op (`ops/*/api.py`) holds a table of its implementations by name. A call with
`implementation="xla"` takes that one, and fails if it does not support the call. A call with `implementation=None`
takes the kernel of the platform that the program is lowered for, if there is one and it supports the call, and
otherwise the default.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax

PLATFORMS = ("cuda", "tpu")  # as `jax.lax.platform_dependent` names them


class PlatformKernel(NamedTuple):
    """The implementation that `implementation=None` prefers on one platform.

    Attributes:
      run: the implementation, a function of the op's static and array arguments.
      unsupported_reason: a function of the same arguments. It returns why the kernel cannot run this call, as the end
        of a sentence such as "needs an NVIDIA Hopper GPU"; empty if the kernel can.
      shortest_row: a call whose first array is shorter than this along axis 1 takes the default, which is faster then.
    """

    run: Callable[..., Any]
    unsupported_reason: Callable[..., str]
    shortest_row: int = 1


def choose(
    op: str,
    implementation: str | None,
    table: Mapping[str, Callable[..., Any]],
    *,
    default: Callable[..., Any],
    kernels: Mapping[str, PlatformKernel] | None = None,
    static_arguments: int = 0,
) -> Callable[..., Any]:
    """Returns the function that runs a call of `op`.

    Args:
      op: the public name of the op, for the message.
      implementation: a name in `table`, or None for the best implementation of each platform.
      table: the implementations of the op by name; all take the same arguments.
      default: what None runs if no kernel supports the call.
      kernels: the kernel that None prefers on each of `PLATFORMS`.
      static_arguments: how many of the first arguments are not arrays (options, a chunk size).

    Raises:
      NotImplementedError: the op has no implementation of that name.
    """
    if implementation is None:
        return partial(_run_best, default, kernels, static_arguments) if kernels else default
    if implementation not in table:
        raise NotImplementedError(
            f"{op}: no implementation {implementation!r}; choose from {', '.join(map(repr, table))}"
        )
    return table[implementation]


def _run_best(
    default: Callable[..., Any], kernels: Mapping[str, PlatformKernel], static_arguments: int, *arguments: Any
) -> Any:
    """Runs the kernel of the platform that the program is lowered for, which may differ from the one that traces it."""
    static, arrays = arguments[:static_arguments], arguments[static_arguments:]
    supported = {
        platform: partial(kernel.run, *static)
        for platform, kernel in kernels.items()
        if arrays[0].shape[1] >= kernel.shortest_row and not kernel.unsupported_reason(*arguments)
    }
    fallback = partial(default, *static)
    if not supported:
        return fallback(*arrays)
    return jax.lax.platform_dependent(*arrays, **supported, default=fallback)


def require(op: str, implementation: str, unsupported_reason: str) -> None:
    """Raises NotImplementedError if an implementation that was chosen by name does not support the call.

    Args:
      unsupported_reason: as `PlatformKernel.unsupported_reason` returns it; empty if the call is supported.
    """
    if unsupported_reason:
        raise NotImplementedError(f"{op}: {implementation!r} {unsupported_reason}")


def implementations(op: str) -> tuple[str, ...]:
    """Returns the names that the `implementation` argument of `op` accepts, as in `implementations("mesa")`.

    Raises:
      ModuleNotFoundError: there is no such op.
    """
    return tuple(importlib.import_module(f"mesanet_kernels.ops.{op}.api").IMPLEMENTATIONS)
