"""The layer around a matrix memory: what Mamba2, GLA, DeltaNet, Gated DeltaNet, mLSTM and Mesa have in common.

    q, k, v = projections of the stream, convolved and SiLU-activated (`convolution.py`), q and k L2-normalised
    o = the family's op on q, k, v and the family's gates (`gates.py`)
    y = output norm, output gate and projection of o (`readout.py`)

MesaNet (arXiv 2506.05233, Table 1 and appendices E.1 and G.2) compares the families in this one layer. The layers in
the families' own papers differ around the memory; each such difference is an option (`configs/*.py:SIZE-published`).

B batch, T time, D model width, H heads, G heads of queries and keys, K key size, V value size, C channels of a
projection, W conv taps.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import Linear, fan_in_normal, l2_normalize
from mesanet_jax.mixers.convolution import convolve_rows, convolve_token, empty_tail, make_taps
from mesanet_jax.mixers.gates import DECAYS, Decay, InputGate, check_ranges
from mesanet_jax.mixers.readout import READOUT_FIELDS, make_output_norm, read_out
from mesanet_jax.remat import MEMORY_READ
from mesanet_jax.schema import Config, Field

# The options that the layer itself reads. A family's FIELDS are these, those of its gates and its own.
LAYER_FIELDS = {
    "heads": Field(None, "heads of the memory; none: model.heads", kind=int, at_least=1, fixed=True),
    "key_heads": Field(
        None,
        "heads of queries and keys, a divisor of the memory's heads, which share them; none: one for each head",
        kind=int,
        at_least=1,
        fixed=True,
    ),
    "key_size": Field(
        None,
        "size of the queries and keys of a head; none: model.head_dim",
        kind=int,
        at_least=1,
        fixed=True,
    ),
    "value_size": Field(
        None,
        "size of the values of a head; none: model.head_dim",
        kind=int,
        at_least=1,
        fixed=True,
    ),
    "conv_width": Field(
        4,
        "taps of the causal convolution on queries and keys; none: neither convolution nor SiLU",
        kind=int,
        at_least=2,
        fixed=True,
    ),
    "conv_on_value": Field(
        False,
        "apply convolution and SiLU to the values too (as MesaNet's appendix E says; E.1 and G.2 do not)",
        fixed=True,
    ),
    **READOUT_FIELDS,
    "chunk_size": Field(
        None,
        "tokens that the op computes together as one chunk; none: the kernel library's choice",
        kind=int,
        at_least=1,
    ),
}


class MatrixMemoryState(NamedTuple):
    """The decoding state of one layer; its size does not depend on the number of tokens."""

    conv_q: jax.Array | None  # [B, W-1, C], the last inputs of the convolution on queries; [B, 0, C] without one
    conv_k: jax.Array | None  # [B, W-1, C]
    conv_v: jax.Array | None  # [B, W-1, C]
    memory: Any  # the state of the family's op, float32


NO_STATE = MatrixMemoryState(None, None, None, None)  # before the first token of a whole row


class MatrixMemory(nnx.Module):
    """A layer whose memory is a matrix per head.

    A family defines
      SECTION, FIELDS         its section of the model's config (LAYER_FIELDS and its own options),
      ROW_OP, TOKEN_OP        its op in the kernel library, for whole rows and for one token,
      _add_gates              its gates and other parameters,
      _call_op                which arguments its op gets,
      _op_flops               what the op costs,
    and `_empty_memory` if its memory is more than one matrix [K, V] per head.
    """

    SECTION: str
    FIELDS: dict[str, Field]
    ROW_OP: Callable[..., Any]
    TOKEN_OP: Callable[..., Any]

    @classmethod
    def check(cls, model: Config) -> None:
        """Raises UserError for options that do not fit together."""
        options = model[cls.SECTION]
        section, heads, key_heads = f"config.model.{cls.SECTION}", options.heads or model.heads, options.key_heads
        if key_heads is not None and heads % key_heads:
            raise UserError(f"{section}.key_heads={key_heads}: must divide its {heads} heads")
        if "decay" in cls.FIELDS:
            check_ranges(cls.SECTION, options)
        if options.conv_on_value and options.conv_width is None:
            raise UserError(f"{section}.conv_on_value: needs a conv_width")

    def __init__(self, model: Config, *, rngs: nnx.Rngs):
        options = model[self.SECTION]
        self.heads = options.heads or model.heads
        self.key_heads = options.key_heads or self.heads
        self.key_size, self.value_size = options.key_size or model.head_dim, options.value_size or model.head_dim
        self.chunk_size, self.implementation = options.chunk_size, options.implementation
        self.normalize_keys = True  # L2-normalise the queries and keys of each head; a family may switch it off
        keys, values = self.key_heads * self.key_size, self.heads * self.value_size
        linear = partial(Linear, model.dim, axes=("embed", "heads"), rngs=rngs)
        self.query, self.key, self.value = linear(keys), linear(keys), linear(values)
        taps = partial(make_taps, options.conv_width, rngs=rngs)
        self.conv_q = taps(keys) if options.conv_width else None
        self.conv_k = taps(keys) if options.conv_width else None
        self.conv_v = taps(values) if options.conv_on_value else None
        self.output_gate = linear(values) if options.output_gate else None
        self.output_gate_form = options.output_gate_form
        self._add_gates(model, options, rngs=rngs)
        self.norm = make_output_norm(options, self.heads, self.value_size, eps=model.norm_eps, rngs=rngs)
        out_init = fan_in_normal(model.residual_init_scale / model.layers)
        self.out = Linear(values, model.dim, axes=("heads", "embed"), rngs=rngs, init=out_init)

    # ---- what a family defines

    def _add_gates(self, model: Config, options: Config, *, rngs: nnx.Rngs) -> None:
        """Sets the attributes that the family has beyond the layer: its gates and other parameters."""
        raise NotImplementedError

    def _call_op(self, op: Callable[..., Any], x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        """Calls the family's op on its gates and returns the op's results: (o, memory, ...).

        Args:
          op: ROW_OP or TOKEN_OP with the memory, the documents, the chunk size and the implementation already set.
          x: the stream [..., D], from which gates are computed. Leading axes are [B, T] for rows, [B] for one token.
          q: queries [..., H, K].
          k: keys [..., H, K].
          v: values [..., H, V].
        """
        raise NotImplementedError

    def _empty_memory(self, batch: int) -> Any:
        """Returns the op's state before the first token."""
        return jnp.zeros((batch, self.heads, self.key_size, self.value_size), jnp.float32)

    def _op_flops(self, chunk: int) -> Flops:
        """Returns the op's FLOPs per token in chunks of `chunk` tokens."""
        raise NotImplementedError

    def _make_input_gate(self, model: Config, *, rngs: nnx.Rngs) -> InputGate:
        return InputGate(model.dim, self.heads, rngs=rngs)

    def _make_decay(self, model: Config, options: Config, *, rngs: nnx.Rngs) -> Decay:
        return DECAYS[options.decay](model.dim, self.heads, self.key_size, options=options, rngs=rngs)

    # ---- the layer

    def _run(self, x: jax.Array, state: MatrixMemoryState, *, convolve: Callable[..., Any], op: Callable[..., Any]):
        """Computes the layer for rows or for one token, as `convolve` and `op` are.

        Returns:
          (y [..., D], the new state, the list of the op's further results).
        """
        q, conv_q = convolve(self.query(x), self.conv_q, state.conv_q)
        k, conv_k = convolve(self.key(x), self.conv_k, state.conv_k)
        v, conv_v = convolve(self.value(x), self.conv_v, state.conv_v)
        v = v.reshape(*x.shape[:-1], self.heads, self.value_size)
        o, memory, *reported = self._call_op(op, x, self._heads_of(q), self._heads_of(k), v)
        o = checkpoint_name(o, MEMORY_READ)
        y = read_out(o, x, norm=self.norm, gate=self.output_gate, gate_form=self.output_gate_form, out=self.out)
        return y, MatrixMemoryState(conv_q, conv_k, conv_v, memory), reported

    def _heads_of(self, x: jax.Array) -> jax.Array:
        """Splits queries or keys into normalised heads, shared ones repeated: [..., G*K] -> [..., H, K]."""
        x = x.reshape(*x.shape[:-1], self.key_heads, self.key_size)
        x = l2_normalize(x) if self.normalize_keys else x
        return x if self.key_heads == self.heads else jnp.repeat(x, self.heads // self.key_heads, axis=-2)

    def _run_rows(self, x_BTD: jax.Array, state: MatrixMemoryState, *, segment_ids: jax.Array | None):
        """`_run` for rows; `segment_ids` [B, T], or None if each row is one document."""
        shared = {"segment_ids": segment_ids, "implementation": self.implementation}
        op = partial(self.ROW_OP, initial_state=state.memory, chunk_size=self.chunk_size, **shared)
        return self._run(x_BTD, state, convolve=partial(convolve_rows, **shared), op=op)

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        return self._run_rows(x_BTD, NO_STATE, segment_ids=segment_ids_BT)[0]

    def init_state(self, batch: int, *, max_length: int, dtype: jax.typing.DTypeLike) -> MatrixMemoryState:
        del max_length  # the state has a constant size
        tail = lambda taps, linear: empty_tail(taps, batch, linear.kernel.shape[-1], dtype)
        return MatrixMemoryState(
            conv_q=tail(self.conv_q, self.query),
            conv_k=tail(self.conv_k, self.key),
            conv_v=tail(self.conv_v, self.value),
            memory=self._empty_memory(batch),
        )

    def extend(self, x_BTD: jax.Array, state: MatrixMemoryState) -> tuple[jax.Array, MatrixMemoryState]:
        y_BTD, state, _ = self._run_rows(x_BTD, state, segment_ids=None)
        return y_BTD, state

    def decode_step(self, x_BD: jax.Array, state: MatrixMemoryState) -> tuple[jax.Array, MatrixMemoryState]:
        convolve = partial(convolve_token, implementation=self.implementation)
        op = partial(self.TOKEN_OP, state=state.memory, implementation=self.implementation)
        y_BD, state, _ = self._run(x_BD, state, convolve=convolve, op=op)
        return y_BD, state

    def flops_per_token(self, seq_len: int) -> Flops:
        """Counts projections, convolutions and the op in its chunks."""
        kernels = [layer.kernel for _, layer in nnx.iter_modules(self) if isinstance(layer, Linear)]
        taps = [taps for taps in (self.conv_q, self.conv_k, self.conv_v) if taps is not None]
        chunk = min(self.chunk_size or 64, seq_len)
        return products(sum(2 * math.prod(weights.shape) for weights in kernels + taps)) + self._op_flops(chunk)
