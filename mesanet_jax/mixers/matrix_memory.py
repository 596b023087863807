"""The layer that MesaNet's comparison controls: Mamba2, GLA, DeltaNet, Gated DeltaNet and Mesa differ in their memory alone.

Queries and keys are convolved, SiLU-activated and L2-normalised; gates are one scalar a head; the output is normalised
a head (MesaNet, arXiv 2506.05233, Table 1 and appendices E.1, G.2). What the layers' own papers do differently around
the memory is an option here (`configs/*.py:SIZE-published`).

B batch, T time, D model width, H heads, G heads of queries and keys, K key size, V value size, C channels of a
projection, W conv taps.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import Linear, RMSNorm, fan_in_normal, l2_normalize, param
from mesanet_jax.mixers.gates import DECAYS, check_ranges
from mesanet_jax.schema import Field
from mesanet_kernels import causal_conv1d, causal_conv1d_step

# (activation, whether the gate comes before the norm) of an output gate, by name.
OUTPUT_GATES = {
    "silu": (jax.nn.silu, False),
    "silu_before_norm": (jax.nn.silu, True),  # Mamba2
    "sigmoid": (jax.nn.sigmoid, False),  # xLSTM
}
# The parts of a family's FIELDS that the layer reads itself.
PROJECTION_FIELDS = {
    "heads": Field(None, "heads of the memory; none: model.heads", kind=int, at_least=1, fixed=True),
    "key_heads": Field(None, "heads of queries and keys, a divisor of the heads that share them; none: as many", kind=int, at_least=1, fixed=True),
    "key_size": Field(None, "size of a head's queries and keys; none: model.head_dim", kind=int, at_least=1, fixed=True),
    "value_size": Field(None, "size of a head's values; none: model.head_dim", kind=int, at_least=1, fixed=True),
    "conv_width": Field(4, "taps of the causal convolution on queries and keys; none: neither convolution nor SiLU", kind=int, at_least=2, fixed=True),
    "conv_on_value": Field(False, "convolve and activate the values too (the paper contradicts itself)", fixed=True),
    "output_norm": Field("head", "what the RMSNorm of the output averages over: a head, or all of them", choices=("head", "all"), fixed=True),
    "output_gate": Field(False, "multiply the output by an activated projection of the stream (not in the paper)", fixed=True),
    "output_gate_form": Field("silu", "activation of the output gate, and its place", choices=tuple(OUTPUT_GATES), fixed=True),
}  # fmt: skip
PARALLEL_FIELDS = {
    "chunk_size": Field(None, "tokens a chunk of the parallel form; none: the kernel library's choice", kind=int, at_least=1),
    "implementation": Field(None, "backend of the kernel library; none: the best that applies", kind=str, choices=("reference", "xla")),
}  # fmt: skip


class LayerState(NamedTuple):
    """What one layer remembers; its size does not depend on the length."""

    conv_q: jax.Array | None  # [B, W-1, C] the last inputs of the convolution on queries; [B, 0, C] where there is none
    conv_k: jax.Array | None  # [B, W-1, C]
    conv_v: jax.Array | None  # [B, W-1, C]
    memory: Any  # the state of the family's op, float32


EMPTY = LayerState(None, None, None, None)  # before a row that is read whole


class Controlled(nnx.Module):
    """A family states its `SECTION` of the config, its `FIELDS`, its gates, and how its op reads and writes a memory."""

    SECTION: str
    FIELDS: dict[str, Field]
    INPUT_GATE = True  # beta, the strength of a write
    DECAY_GATE = True  # gamma, what remains of the memory

    @classmethod
    def check(cls, model) -> None:
        options = model[cls.SECTION]
        heads, key_heads = options.heads or model.heads, options.key_heads
        if key_heads is not None and heads % key_heads:
            raise UserError(f"config.model.{cls.SECTION}.key_heads={key_heads}: must divide its {heads} heads")
        if "decay" in cls.FIELDS:
            check_ranges(cls.SECTION, options)
        if options.conv_on_value and options.conv_width is None:
            raise UserError(f"config.model.{cls.SECTION}.conv_on_value: needs a conv_width")

    def __init__(self, model, *, rngs: nnx.Rngs):
        options = model[self.SECTION]
        self.heads = options.heads or model.heads
        self.key_heads = options.key_heads or self.heads
        self.key_size, self.value_size = options.key_size or model.head_dim, options.value_size or model.head_dim
        self.parallel = {name: options[name] for name in PARALLEL_FIELDS}
        keys, values = self.key_heads * self.key_size, self.heads * self.value_size
        linear = lambda width: Linear(model.dim, width, axes=("embed", "heads"), rngs=rngs)
        taps = lambda width: param(rngs, _conv_init, (options.conv_width, width), (None, "heads"))
        self.query, self.key, self.value = linear(keys), linear(keys), linear(values)
        self.conv_q = taps(keys) if options.conv_width else None
        self.conv_k = taps(keys) if options.conv_width else None
        self.conv_v = taps(values) if options.conv_on_value else None
        self.output_gate = linear(values) if options.output_gate else None
        self.output_gate_form = options.output_gate_form
        self.input_gate = self._make_input_gate(model, rngs=rngs) if self.INPUT_GATE else None
        self.decay_gate = self._make_decay_gate(model, rngs=rngs) if self.DECAY_GATE else None
        self._add_parameters(options, rngs=rngs)
        norm_size, norm_axes = {"head": (self.value_size, (None,)), "all": (values, ("heads",))}[options.output_norm]
        self.norm = RMSNorm(norm_size, rngs=rngs, eps=model.norm_eps, axes=norm_axes)
        out_init = fan_in_normal(model.residual_init_scale / model.layers)
        self.out = Linear(values, model.dim, axes=("heads", "embed"), rngs=rngs, init=out_init)

    def _make_input_gate(self, model, *, rngs: nnx.Rngs):
        zeros = jax.nn.initializers.zeros
        return Linear(model.dim, self.heads, axes=("embed", "heads"), rngs=rngs, bias_init=zeros)

    def _make_decay_gate(self, model, *, rngs: nnx.Rngs):
        options = model[self.SECTION]
        return DECAYS[options.decay](model.dim, self.heads, self.key_size, options=options, rngs=rngs)

    def _add_parameters(self, options, *, rngs: nnx.Rngs) -> None:
        """What a family has beyond the shared layer."""

    def _mix(self, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, *, memory, segment_ids):
        """The op over a row, from a memory or from nothing (None): (o_BTHV, memory); a gate it lacks is None."""
        raise NotImplementedError

    def _mix_token(self, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, *, memory):
        """The op's step: (o_BHV, memory)."""
        raise NotImplementedError

    def _empty_memory(self, batch: int):
        """One matrix a head, [B, H, K, V]."""
        return jnp.zeros((batch, self.heads, self.key_size, self.value_size), jnp.float32)

    def _op_flops(self, chunk: int) -> Flops:
        """The op for one token, in chunks of `chunk`."""
        raise NotImplementedError

    def _gates(self, x):
        """log gamma [..., H], or [..., H, K], and beta [..., H], float32; None for a gate that the family lacks (G.2)."""
        log_decay = None if self.decay_gate is None else self.decay_gate(x)
        beta = None if self.input_gate is None else jax.nn.sigmoid(self.input_gate(x.astype(jnp.float32)))
        return log_decay, beta

    def _normalize(self, x):
        """Queries or keys of a head, [..., K]."""
        return l2_normalize(x)

    def _run(self, x, state: LayerState, *, convolve, mix):
        """The layer in the form, parallel or of one token, that `convolve` and `mix` have."""

        def convolved(x, taps, tail):
            return (x, tail) if taps is None else convolve(x, taps[...].astype(x.dtype), tail)

        q, conv_q = convolved(self.query(x), self.conv_q, state.conv_q)
        k, conv_k = convolved(self.key(x), self.conv_k, state.conv_k)
        v, conv_v = convolved(self.value(x), self.conv_v, state.conv_v)
        v = v.reshape(*x.shape[:-1], self.heads, self.value_size)
        o, memory = mix(self._of_heads(q), self._of_heads(k), v, *self._gates(x), memory=state.memory)
        return self._read_out(checkpoint_name(o, "read"), x), LayerState(conv_q, conv_k, conv_v, memory)

    def _of_heads(self, x):
        """Normalised queries or keys, shared ones repeated: [..., G*K] -> [..., H, K]."""
        x = self._normalize(x.reshape(*x.shape[:-1], self.key_heads, self.key_size))
        return x if self.key_heads == self.heads else jnp.repeat(x, self.heads // self.key_heads, axis=-2)

    def _read_out(self, o, x):
        """Norm, gate and projection of what was read: [..., H, V] -> [..., D]."""
        grouped = lambda o: o.reshape(*x.shape[:-1], -1, self.norm.scale.shape[-1])
        flat = lambda o: o.reshape(*x.shape[:-1], -1)
        if self.output_gate is None:
            return self.out(flat(self.norm(grouped(o))))
        activation, before_norm = OUTPUT_GATES[self.output_gate_form]
        gate = activation(self.output_gate(x))
        if before_norm:
            return self.out(flat(self.norm(grouped(flat(o) * gate))))
        return self.out(flat(self.norm(grouped(o))) * gate)

    def _run_row(self, x_BTD, state: LayerState, *, segment_ids, mix=None):
        def convolve(x_BTC, taps_WC, tail):
            return causal_conv1d(x_BTC, taps_WC, activation="silu", segment_ids=segment_ids, initial_state=tail)

        mix = partial(mix or self._mix, segment_ids=segment_ids)
        return self._run(x_BTD, state, convolve=convolve, mix=mix)

    def __call__(self, x_BTD, segment_ids_BT):
        return self._run_row(x_BTD, EMPTY, segment_ids=segment_ids_BT)[0]

    def init_state(self, batch: int, *, max_length: int, dtype) -> LayerState:
        del max_length  # the state is of constant size
        tail = lambda taps, linear: jnp.zeros(
            (batch, 0 if taps is None else taps.shape[-2] - 1, linear.kernel.shape[-1]), dtype
        )
        return LayerState(
            conv_q=tail(self.conv_q, self.query),
            conv_k=tail(self.conv_k, self.key),
            conv_v=tail(self.conv_v, self.value),
            memory=self._empty_memory(batch),
        )

    def extend(self, x_BTD, state: LayerState):
        return self._run_row(x_BTD, state, segment_ids=None)

    def decode_step(self, x_BD, state: LayerState):
        convolve = partial(causal_conv1d_step, activation="silu")
        return self._run(x_BD, state, convolve=convolve, mix=self._mix_token)

    def flops_per_token(self, seq_len: int) -> Flops:
        """Projections, convolutions and the op in its chunks."""
        kernels = [layer.kernel for _, layer in nnx.iter_modules(self) if isinstance(layer, Linear)]
        taps = [taps for taps in (self.conv_q, self.conv_k, self.conv_v) if taps is not None]
        chunk = min(self.parallel["chunk_size"] or 64, seq_len)
        return products(sum(2 * math.prod(weights.shape) for weights in kernels + taps)) + self._op_flops(chunk)


def _conv_init(key, shape, dtype):
    """Fan-in normal over the taps: the paper gives no initialisation for its depthwise convolutions."""
    return jax.random.normal(key, shape, dtype) / np.sqrt(shape[0])
