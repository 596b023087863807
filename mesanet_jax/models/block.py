"""The residual block of MesaNet (arXiv 2506.05233, appendix E): x += mixer(norm(x)); x += mlp(norm(x)).

B batch, T time, D model width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import RMSNorm, SwiGLU, fan_in_normal
from mesanet_jax.mesh import constrain
from mesanet_jax.mixers import MIXERS
from mesanet_jax.remat import MIXER_OUTPUT
from mesanet_jax.schema import Config

ACTIVATION = ("batch", "time", None)  # logical axes of the residual stream [B,T,D]
# Logical axes of looked-up embeddings, split as the table's columns are. Constraining them to this layout first, and to
# ACTIVATION afterwards, lets one exchange move the rows to their devices. Without the intermediate layout, XLA gives
# every device the whole array if time is split.
LOOKED_UP = ("replica", "time", "embed")


class Block(nnx.Module):
    """One mixer and one SwiGLU network, each behind a pre-norm."""

    def __init__(self, model: Config, mixer: str, *, rngs: nnx.Rngs):
        self.mixer_norm = RMSNorm(model.dim, rngs=rngs, eps=model.norm_eps)
        self.mixer = MIXERS[mixer](model, rngs=rngs)
        self.mlp_norm = RMSNorm(model.dim, rngs=rngs, eps=model.norm_eps)
        hidden = round(model.mlp_ratio * model.dim)
        out_init = fan_in_normal(model.residual_init_scale / model.layers)
        self.mlp = SwiGLU(model.dim, hidden, rngs=rngs, out_init=out_init)

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """The stream after this block, for whole rows."""
        return self._add(x_BTD, self.mixer(self.mixer_norm(x_BTD), segment_ids_BT))

    def with_stats(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The stream after this block, and the mixer's statistics by name (empty if it has none)."""
        mixer_with_stats = getattr(self.mixer, "with_stats", None)
        if mixer_with_stats is None:
            return self(x_BTD, segment_ids_BT), {}
        mixed_BTD, stats = mixer_with_stats(self.mixer_norm(x_BTD), segment_ids_BT)
        return self._add(x_BTD, mixed_BTD), stats

    def _add(self, x_BTD, mixed_BTD):
        x_BTD = x_BTD + checkpoint_name(mixed_BTD, MIXER_OUTPUT)
        return constrain(self._feed_forward(constrain(x_BTD, ACTIVATION)), ACTIVATION)

    def _feed_forward(self, x):
        return x + self.mlp(self.mlp_norm(x))

    def init_state(self, batch: int, *, max_length: int, dtype: DTypeLike) -> Any:
        """The mixer's decoding state for an empty past."""
        return self.mixer.init_state(batch, max_length=max_length, dtype=dtype)

    def extend(self, x_BTD: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Reads T further tokens of one document."""
        mixed_BTD, state = self.mixer.extend(self.mixer_norm(x_BTD), state)
        return self._feed_forward(x_BTD + mixed_BTD), state

    def decode_step(self, x_BD: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Reads one further token."""
        mixed_BD, state = self.mixer.decode_step(self.mixer_norm(x_BD), state)
        return self._feed_forward(x_BD + mixed_BD), state

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`."""
        dim, hidden = self.mlp.up.kernel.shape
        return self.mixer.flops_per_token(seq_len) + products(3 * 2 * dim * hidden)


class Group(nnx.Module):
    """Consecutive blocks, one made by each of `makers`: a period of the model's blocks, or the tail at its end."""

    def __init__(self, makers: Sequence[Callable[..., nnx.Module]], *, rngs: nnx.Rngs):
        self.names = tuple(f"block_{index}" for index in range(len(makers)))
        for name, make in zip(self.names, makers, strict=True):
            setattr(self, name, make(rngs=rngs))

    @property
    def blocks(self) -> list[Any]:
        """The blocks in their order."""
        return [getattr(self, name) for name in self.names]

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """The stream after all blocks, for whole rows."""
        for block in self.blocks:
            x_BTD = block(x_BTD, segment_ids_BT)
        return x_BTD

    def with_stats(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> tuple[jax.Array, tuple[dict, ...]]:
        """The stream after all blocks, and the statistics of each block."""
        stats = []
        for block in self.blocks:
            x_BTD, of_block = block.with_stats(x_BTD, segment_ids_BT)
            stats.append(of_block)
        return x_BTD, tuple(stats)

    def init_state(self, batch: int, *, max_length: int, dtype: DTypeLike) -> tuple[Any, ...]:
        """The decoding states of the blocks for an empty past."""
        return tuple(block.init_state(batch, max_length=max_length, dtype=dtype) for block in self.blocks)

    def extend(self, x_BTD: jax.Array, states: tuple[Any, ...]) -> tuple[jax.Array, tuple[Any, ...]]:
        """Reads T further tokens of one document."""
        after = []
        for block, state in zip(self.blocks, states, strict=True):
            x_BTD, state = block.extend(x_BTD, state)
            after.append(state)
        return x_BTD, tuple(after)

    def decode_step(self, x_BD: jax.Array, states: tuple[Any, ...]) -> tuple[jax.Array, tuple[Any, ...]]:
        """Reads one further token."""
        after = []
        for block, state in zip(self.blocks, states, strict=True):
            x_BD, state = block.decode_step(x_BD, state)
            after.append(state)
        return x_BD, tuple(after)

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`."""
        return sum((block.flops_per_token(seq_len) for block in self.blocks), Flops())
