"""How a mixer chooses among the implementations that the kernel library has of each op."""

from mesanet_jax.schema import Field
from mesanet_kernels import implementations

# Every op has these two, so that a mixer can use them for all the ops that it calls.
COMMON = ("reference", "xla")


def implementation_field(op: str, *, without: tuple[str, ...] = ()) -> Field:
    """Returns the config field for the implementation of `op`, a mixer's main op.

    Args:
      op: its name in the kernel library, e.g. "mesa".
      without: implementations that the mixer cannot use.
    """
    return Field(
        None,
        f"implementation of {op} in the kernel library; reference and xla also hold for the other ops of the layer; "
        "none: the fastest one that supports the call",
        kind=str,
        choices=tuple(name for name in implementations(op) if name not in without),
    )


def for_other_ops(implementation: str | None) -> str | None:
    """Returns the implementation of the ops beside a mixer's main op, which uses `implementation`.

    A hardware-specific implementation is one of the main op alone: the others choose the fastest that supports them.
    """
    return implementation if implementation in COMMON else None
