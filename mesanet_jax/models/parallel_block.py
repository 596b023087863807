"""The block of PHA (arXiv 2606.16093, abstract): mixers and feed-forward networks side by side, in a weighted sum.

    h = RMSNorm(x)    z_i = RMSNorm_i(branch_i(h))    x = RMSNorm(alpha x + sum_i w_i z_i)

The abstract states the branches, their norms, static softplus-normalised weights w and alpha = (2 layers)^(1/4). The
rest is an interpretation, and each choice is a field of `mesanet_jax.models.pha`.

B batch, T time, D model width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from mesanet_jax.flops import Flops
from mesanet_jax.layers import Linear, RMSNorm
from mesanet_jax.mesh import constrain
from mesanet_jax.mixers import MIXERS
from mesanet_jax.models.block import ACTIVATION
from mesanet_jax.models.feed_forward import FeedForward
from mesanet_jax.models.mixture import Mixture
from mesanet_jax.remat import MIXER_OUTPUT
from mesanet_jax.schema import Config

# The feed-forward branches by `model.auxiliary`: name -> the width ratios that `FeedForward` takes.
FEED_FORWARDS = {
    "inside": lambda model: {"ffn": (model.mlp_ratio, model.auxiliary_mlp_ratio)},
    "branch": lambda model: {"ffn": (model.mlp_ratio,), "ffn_auxiliary": (model.auxiliary_mlp_ratio,)},
    "none": lambda model: {"ffn": (model.mlp_ratio,)},
}
RunBranch = Callable[[str, jax.Array], jax.Array]  # (name of the branch, its input) -> its output


class Branches(nnx.Module):
    """The branches of a block, each an attribute with its name; a subclass adds norms and says how they are composed.

    Subclasses implement `compose`, and all calls (training, prefill, decoding) go through it.
    """

    def __init__(self, model: Config, mixers: tuple[str, ...], *, rngs: nnx.Rngs):
        for name in mixers:
            setattr(self, name, MIXERS[name](model, rngs=rngs))
        feed_forwards = FEED_FORWARDS[model.auxiliary](model)
        for name, ratios in feed_forwards.items():
            setattr(self, name, FeedForward(model, *ratios, rngs=rngs))
        self.names = (*mixers, *feed_forwards)
        self.alpha = (2 * model.layers) ** 0.25 if model.alpha is None else model.alpha
        if model.deepnorm_init:
            _scale_kernels(self, _deepnorm_factors(model))

    def compose(self, x: jax.Array, run: RunBranch) -> jax.Array:
        """The block's output for the stream x, where `run` computes one branch."""
        raise NotImplementedError

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """The stream after this block, for whole rows."""

        def run(name, h_BTD):
            return checkpoint_name(getattr(self, name)(h_BTD, segment_ids_BT), MIXER_OUTPUT)

        return constrain(self.compose(constrain(x_BTD, ACTIVATION), run), ACTIVATION)

    def with_stats(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The stream after this block, and the statistics of its branches and of its mixture."""
        stats = {}

        def run(name, h_BTD):
            branch = getattr(self, name)
            if not hasattr(branch, "with_stats"):
                return branch(h_BTD, segment_ids_BT)
            y_BTD, of_branch = branch.with_stats(h_BTD, segment_ids_BT)
            stats.update(of_branch)
            return y_BTD

        y_BTD = self.compose(x_BTD, run)  # which fills stats
        return y_BTD, stats | self.mixture_stats()

    def mixture_stats(self) -> dict[str, jax.Array]:
        """The weights of the branches; empty if none are learned."""
        return {}

    def init_state(self, batch: int, *, max_length: int, dtype: DTypeLike) -> dict[str, Any]:
        """The decoding state of each branch for an empty past."""
        return {name: getattr(self, name).init_state(batch, max_length=max_length, dtype=dtype) for name in self.names}

    def extend(self, x_BTD: jax.Array, states: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        """Reads T further tokens of one document."""
        after = {}

        def run(name, h_BTD):
            y_BTD, after[name] = getattr(self, name).extend(h_BTD, states[name])
            return y_BTD

        return self.compose(x_BTD, run), after

    def decode_step(self, x_BD: jax.Array, states: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        """Reads one further token."""
        after = {}

        def run(name, h_BD):
            y_BD, after[name] = getattr(self, name).decode_step(h_BD, states[name])
            return y_BD

        return self.compose(x_BD, run), after

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`."""
        return sum((getattr(self, name).flops_per_token(seq_len) for name in self.names), Flops())


class ParallelBlock(Branches):
    """All branches read the same stream, and their weighted sum is added to it."""

    def __init__(self, model: Config, mixers: tuple[str, ...], *, rngs: nnx.Rngs):
        super().__init__(model, mixers, rngs=rngs)
        self.mixture = Mixture(self.names, model.mixing, rngs=rngs)
        self.pre_norm = _norm(model, model.pre_norm, rngs)
        self.outer_norm = _norm(model, model.outer_norm, rngs)
        for name in self.names:
            setattr(self, f"{name}_norm", _norm(model, model.branch_norm, rngs))

    def compose(self, x: jax.Array, run: RunBranch) -> jax.Array:
        """RMSNorm(alpha x + sum_i w_i RMSNorm_i(branch_i(RMSNorm(x))))."""
        h = _normed(self.pre_norm, x)
        branches = [_normed(getattr(self, f"{name}_norm"), run(name, h)) for name in self.names]
        return _residual(self.alpha, x, self.mixture(branches), self.outer_norm)

    def mixture_stats(self) -> dict[str, jax.Array]:
        """{"mixture/branch": its weight}; empty if none are learned."""
        return self.mixture.stats("mixture")


class SequentialBlock(Branches):
    """The same branches one after another, each with its own norms and residual: the hybrid that PHA compares with."""

    def __init__(self, model: Config, mixers: tuple[str, ...], *, rngs: nnx.Rngs):
        super().__init__(model, mixers, rngs=rngs)
        for name in self.names:
            for place in ("pre", "branch", "outer"):
                setattr(self, f"{name}_{place}_norm", _norm(model, model[f"{place}_norm"], rngs))

    def compose(self, x: jax.Array, run: RunBranch) -> jax.Array:
        """x = RMSNorm(alpha x + RMSNorm_i(branch_i(RMSNorm(x)))) for each branch in turn."""
        for name in self.names:
            pre, branch, outer = (getattr(self, f"{name}_{place}_norm") for place in ("pre", "branch", "outer"))
            x = _residual(self.alpha, x, _normed(branch, run(name, _normed(pre, x))), outer)
        return x


BLOCKS = {"parallel": ParallelBlock, "sequential": SequentialBlock}


def _norm(model: Config, used: bool, rngs: nnx.Rngs) -> RMSNorm | None:
    return RMSNorm(model.dim, rngs=rngs, eps=model.norm_eps) if used else None


def _normed(norm: RMSNorm | None, x):
    return x if norm is None else norm(x)


def _residual(alpha: float, x, branch, norm: RMSNorm | None):
    """RMSNorm(alpha x + branch) in x's dtype. The sum is in float32: without a norm, alpha makes it grow with depth."""
    return _normed(norm, alpha * x.astype(jnp.float32) + branch).astype(x.dtype)


def _deepnorm_factors(model: Config) -> dict[str, float]:
    """Kernel name -> the factor that gives it DeepNet's initial gain for decoders, (8 layers)^(-1/4).

    The gain applies to value, output and feed-forward projections (arXiv 2203.00555, Fig. 2). Kernels into the stream
    start at another scale in this repository, which their factor undoes.
    """
    gain = (8 * model.layers) ** -0.25
    into_stream = gain / (model.residual_init_scale / model.layers) ** 0.5
    return {"value": gain, "up": gain, "out": into_stream, "down": into_stream}


def _scale_kernels(block: nnx.Module, factors: dict[str, float]) -> None:
    """Multiplies the initial kernel of each `Linear` whose name is in `factors`."""
    for path, module in nnx.iter_graph(block):
        if isinstance(module, Linear) and (name := str(path[-1])) in factors:
            module.kernel[...] *= factors[name]
