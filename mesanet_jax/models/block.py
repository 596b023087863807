"""The residual block: x += mixer(norm(x)); x += mlp(norm(x)) (MesaNet, appendix E).

B batch, T time, D model width.
"""

from collections.abc import Callable, Sequence

from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import RMSNorm, SwiGLU, fan_in_normal
from mesanet_jax.mesh import constrain
from mesanet_jax.mixers import MIXERS
from mesanet_jax.remat import MIXER_OUTPUT

ACTIVATION = ("batch", "time", None)
# What comes out of an embedding, split as its vectors are: from here one exchange gives each device its rows. Without this
# stop on the way, XLA would give every device all of it first where time is split.
LOOKED_UP = ("replica", "time", "embed")


class Block(nnx.Module):
    """One mixer and one SwiGLU, each behind a pre-norm."""

    def __init__(self, model, mixer: str, *, rngs: nnx.Rngs):
        self.mixer_norm = RMSNorm(model.dim, rngs=rngs, eps=model.norm_eps)
        self.mixer = MIXERS[mixer](model, rngs=rngs)
        self.mlp_norm = RMSNorm(model.dim, rngs=rngs, eps=model.norm_eps)
        hidden = round(model.mlp_ratio * model.dim)
        out_init = fan_in_normal(model.residual_init_scale / model.layers)
        self.mlp = SwiGLU(model.dim, hidden, rngs=rngs, out_init=out_init)

    def _feed_forward(self, x):
        return x + self.mlp(self.mlp_norm(x))

    def __call__(self, x_BTD, segment_ids_BT):
        return self._add(x_BTD, self.mixer(self.mixer_norm(x_BTD), segment_ids_BT))

    def _add(self, x_BTD, mixed_BTD):
        x_BTD = x_BTD + checkpoint_name(mixed_BTD, MIXER_OUTPUT)
        return constrain(self._feed_forward(constrain(x_BTD, ACTIVATION)), ACTIVATION)

    def observe(self, x_BTD, segment_ids_BT):
        """As a call, with what the mixer tells about its work."""
        if not hasattr(self.mixer, "with_stats"):
            return self(x_BTD, segment_ids_BT), {}
        mixed_BTD, seen = self.mixer.with_stats(self.mixer_norm(x_BTD), segment_ids_BT)
        return self._add(x_BTD, mixed_BTD), seen

    def init_state(self, batch: int, *, max_length: int, dtype):
        return self.mixer.init_state(batch, max_length=max_length, dtype=dtype)

    def extend(self, x_BTD, state):
        mixed_BTD, state = self.mixer.extend(self.mixer_norm(x_BTD), state)
        return self._feed_forward(x_BTD + mixed_BTD), state

    def step(self, x_BD, state):
        mixed_BD, state = self.mixer.decode_step(self.mixer_norm(x_BD), state)
        return self._feed_forward(x_BD + mixed_BD), state

    def flops_per_token(self, seq_len: int) -> Flops:
        dim, hidden = self.mlp.up.kernel.shape
        return self.mixer.flops_per_token(seq_len) + products(3 * 2 * dim * hidden)


class Group(nnx.Module):
    """The blocks that `makers` make, in turn: one period of the model's blocks, or the part of it at the model's end."""

    def __init__(self, makers: Sequence[Callable[..., nnx.Module]], *, rngs: nnx.Rngs):
        self.names = tuple(f"block_{index}" for index in range(len(makers)))
        for name, make in zip(self.names, makers, strict=True):
            setattr(self, name, make(rngs=rngs))

    @property
    def blocks(self) -> list[nnx.Module]:
        return [getattr(self, name) for name in self.names]

    def __call__(self, x_BTD, segment_ids_BT):
        for block in self.blocks:
            x_BTD = block(x_BTD, segment_ids_BT)
        return x_BTD

    def observe(self, x_BTD, segment_ids_BT):
        """As a call, with what each block tells, in their order."""
        told = []
        for block in self.blocks:
            x_BTD, seen = block.observe(x_BTD, segment_ids_BT)
            told.append(seen)
        return x_BTD, tuple(told)

    def init_state(self, batch: int, *, max_length: int, dtype):
        return tuple(block.init_state(batch, max_length=max_length, dtype=dtype) for block in self.blocks)

    def extend(self, x_BTD, states):
        return self._thread("extend", x_BTD, states)

    def step(self, x_BD, states):
        return self._thread("step", x_BD, states)

    def _thread(self, call: str, x, states):
        after = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = getattr(block, call)(x, state)
            after.append(state)
        return x, tuple(after)

    def flops_per_token(self, seq_len: int) -> Flops:
        return sum((block.flops_per_token(seq_len) for block in self.blocks), Flops())
