"""Settings that every implementation of Mesa takes, and the name under which its solution is kept."""

from typing import NamedTuple

# The checkpoint name of q*, the solution of the layer's linear systems and its most expensive value. A
# rematerialisation policy that keeps this name, e.g. `jax.checkpoint_policies.save_only_these_names(MESA_SOLUTION)`,
# avoids a third solve.
MESA_SOLUTION = "mesa_q_star"


class MesaOptions(NamedTuple):
    """The static settings of one call of `mesa`.

    Attributes:
      solver: "cg" or "pcg".
      max_iters: the largest number of solver iterations.
      tol: the relative residual at which a token's system counts as solved; 0 runs all iterations.
      chunk: tokens per chunk of the plain XLA implementation, a power of two; kernels have chunks of their own size.
    """

    solver: str
    max_iters: int
    tol: float
    chunk: int
