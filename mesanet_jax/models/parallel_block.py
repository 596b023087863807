"""The block of PHA (arXiv 2606.16093): sequence mixers and feed-forward networks side by side, summed by learned scalars.

    h = RMSNorm(x)    z_i = RMSNorm_i(branch_i(h))    x = RMSNorm(alpha x + sum_i w_i z_i)

The abstract settles the branches, their norms, the static softplus-normalised w and alpha = (2L)^(1/4); everything else is
a reading, and a field of `mesanet_jax.models.pha`.

B batch, T time, D model width.
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mesanet_jax.flops import Flops
from mesanet_jax.layers import Linear, RMSNorm
from mesanet_jax.mesh import constrain
from mesanet_jax.mixers import MIXERS
from mesanet_jax.models.block import ACTIVATION
from mesanet_jax.models.feed_forward import FeedForward
from mesanet_jax.models.mixture import Mixture
from mesanet_jax.remat import MIXER_OUTPUT

# Which feed-forward branches there are, and what `FeedForward` is given besides the model.
FEED_FORWARDS = {
    "inside": lambda model: {"ffn": (model.mlp_ratio, model.auxiliary_mlp_ratio)},
    "branch": lambda model: {"ffn": (model.mlp_ratio,), "ffn_auxiliary": (model.auxiliary_mlp_ratio,)},
    "none": lambda model: {"ffn": (model.mlp_ratio,)},
}


class Branches(nnx.Module):
    """The modules of a block, each an attribute with its branch's name, and its calls; a subclass says how they meet."""

    def __init__(self, model, mixers: tuple[str, ...], *, rngs: nnx.Rngs):
        for name in mixers:
            setattr(self, name, MIXERS[name](model, rngs=rngs))
        feed_forwards = FEED_FORWARDS[model.auxiliary](model)
        for name, ratios in feed_forwards.items():
            setattr(self, name, FeedForward(model, *ratios, rngs=rngs))
        self.names = (*mixers, *feed_forwards)
        self.alpha = (2 * model.layers) ** 0.25 if model.alpha is None else model.alpha
        if model.deepnorm_init:
            self._scale_kernels(_deepnorm_factors(model))

    def _scale_kernels(self, factors: dict[str, float]) -> None:
        for path, module in nnx.iter_graph(self):
            if isinstance(module, Linear) and path[-1] in factors:
                module.kernel[...] *= factors[path[-1]]

    def _compose(self, x, run: Callable):
        """The block's output, where `run(name, h)` is that of a branch."""
        raise NotImplementedError

    def __call__(self, x_BTD, segment_ids_BT):
        def run(name, h_BTD):
            return checkpoint_name(getattr(self, name)(h_BTD, segment_ids_BT), MIXER_OUTPUT)

        return constrain(self._compose(constrain(x_BTD, ACTIVATION), run), ACTIVATION)

    def init_state(self, batch: int, *, max_length: int, dtype):
        empty = lambda name: getattr(self, name).init_state(batch, max_length=max_length, dtype=dtype)
        return {name: empty(name) for name in self.names}

    def extend(self, x_BTD, states):
        return self._thread("extend", x_BTD, states)

    def step(self, x_BD, states):
        return self._thread("decode_step", x_BD, states)

    def _thread(self, call: str, x, states):
        after = {}

        def run(name, h):
            y, after[name] = getattr(getattr(self, name), call)(h, states[name])
            return y

        return self._compose(x, run), after

    def observe(self, x_BTD, segment_ids_BT):
        """As a call, with what the branches tell about their work."""
        told = {}

        def run(name, h_BTD):
            branch = getattr(self, name)
            if not hasattr(branch, "with_stats"):
                return branch(h_BTD, segment_ids_BT)
            y_BTD, seen = branch.with_stats(h_BTD, segment_ids_BT)
            told.update(seen)
            return y_BTD

        return self._compose(x_BTD, run), told

    def flops_per_token(self, seq_len: int) -> Flops:
        return sum((getattr(self, name).flops_per_token(seq_len) for name in self.names), Flops())


class ParallelBlock(Branches):
    """All branches read the same stream, and their weighted sum enters it."""

    def __init__(self, model, mixers: tuple[str, ...], *, rngs: nnx.Rngs):
        super().__init__(model, mixers, rngs=rngs)
        self.mixture = Mixture(self.names, model.mixing, rngs=rngs)
        self.pre_norm = _norm(model, model.pre_norm, rngs)
        self.outer_norm = _norm(model, model.outer_norm, rngs)
        for name in self.names:
            setattr(self, f"{name}_norm", _norm(model, model.branch_norm, rngs))

    def _compose(self, x, run: Callable):
        h = _normed(self.pre_norm, x)
        branches = [_normed(getattr(self, f"{name}_norm"), run(name, h)) for name in self.names]
        return _residual(self.alpha, x, self.mixture(branches), self.outer_norm)

    def observe(self, x_BTD, segment_ids_BT):
        """As a call, with the learned weights and what the branches tell."""
        y_BTD, told = super().observe(x_BTD, segment_ids_BT)
        return y_BTD, told | self.mixture.observe("mixture")


class SequentialBlock(Branches):
    """The same modules one after another, each with norms and a residual of its own: the hybrid that PHA compares with."""

    def __init__(self, model, mixers: tuple[str, ...], *, rngs: nnx.Rngs):
        super().__init__(model, mixers, rngs=rngs)
        for name in self.names:
            for place in ("pre", "branch", "outer"):
                setattr(self, f"{name}_{place}_norm", _norm(model, model[f"{place}_norm"], rngs))

    def _compose(self, x, run: Callable):
        for name in self.names:
            pre, branch, outer = (getattr(self, f"{name}_{place}_norm") for place in ("pre", "branch", "outer"))
            x = _residual(self.alpha, x, _normed(branch, run(name, _normed(pre, x))), outer)
        return x


BLOCKS = {"parallel": ParallelBlock, "sequential": SequentialBlock}


def _norm(model, used: bool, rngs: nnx.Rngs) -> RMSNorm | None:
    return RMSNorm(model.dim, rngs=rngs, eps=model.norm_eps) if used else None


def _normed(norm: RMSNorm | None, x):
    return x if norm is None else norm(x)


def _residual(alpha: float, x, branch, norm: RMSNorm | None):
    """RMSNorm(alpha x + branch) in x's dtype, the sum in float32: without the norm it grows by alpha a layer."""
    return _normed(norm, alpha * x.astype(jnp.float32) + branch).astype(x.dtype)


def _deepnorm_factors(model) -> dict[str, float]:
    """What makes DeepNet's initial gain, (8 L)^(-1/4) for a decoder (arXiv 2203.00555, Fig. 2), of the kernels so named.

    They are the value, output and feed-forward projections; those into the stream have another scale without it.
    """
    gain = (8 * model.layers) ** -0.25
    into_stream = gain / (model.residual_init_scale / model.layers) ** 0.5
    return {"value": gain, "up": gain, "out": into_stream, "down": into_stream}
