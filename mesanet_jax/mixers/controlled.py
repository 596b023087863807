"""The layer that MesaNet's comparison controls: Mamba2, GLA, DeltaNet, Gated DeltaNet and Mesa differ in their memory alone.

Queries and keys are convolved, SiLU-activated and L2-normalised; gates are one scalar a head; the output is normalised
a head (MesaNet, arXiv 2506.05233, Table 1 and appendices E.1, G.2).

B batch, T time, D model width, H heads, K head size (of keys, queries and values alike), C = H*K, W conv taps.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import Linear, RMSNorm, fan_in_normal, l2_normalize, param
from mesanet_jax.schema import Field
from mesanet_kernels import causal_conv1d, causal_conv1d_step

# The parts of a family's FIELDS that the layer reads itself.
PROJECTION_FIELDS = {
    "conv_width": Field(4, "taps of the causal convolution on queries and keys", at_least=2, fixed=True),
    "conv_on_value": Field(False, "convolve and activate the values too (the paper contradicts itself)", fixed=True),
    "output_gate": Field(False, "multiply the normalised output by SiLU of a projection (not in the paper)", fixed=True),
}  # fmt: skip
DECAY_FIELDS = {
    "decay_bias_init": Field(0.0, "initial bias of the decay gate, 0 starts gamma at one half", fixed=True),
    "decay_bias_init_last": Field(None, "bias of the last head, the others spaced from the first", kind=float, fixed=True),
}  # fmt: skip
PARALLEL_FIELDS = {
    "chunk_size": Field(None, "tokens a chunk of the parallel form; none: the kernel library's choice", kind=int, at_least=1),
    "implementation": Field(None, "backend of the kernel library; none: the best that applies", kind=str, choices=("reference", "xla")),
}  # fmt: skip


class LayerState(NamedTuple):
    """What one layer remembers; its size does not depend on the length."""

    conv_q: jax.Array | None  # [B, W-1, C] the last inputs of the convolution on queries
    conv_k: jax.Array | None  # [B, W-1, C]
    conv_v: jax.Array | None  # [B, W-1, C], or [B, 0, C] where values are not convolved
    memory: Any  # the state of the family's op, float32


class Controlled(nnx.Module):
    """A family states its `SECTION` of the config, its `FIELDS`, its gates, and how its op reads and writes a memory."""

    SECTION: str
    FIELDS: dict[str, Field]
    INPUT_GATE = True  # beta, the strength of a write
    DECAY_GATE = True  # gamma, what remains of the memory
    _normalize = staticmethod(l2_normalize)  # queries and keys of a head

    @staticmethod
    def check(model) -> None:
        """Its fields have no combination that is impossible."""

    def __init__(self, model, *, rngs: nnx.Rngs):
        options = model[self.SECTION]
        self.heads, self.head_dim = model.heads, model.head_dim
        self.parallel = {name: options[name] for name in PARALLEL_FIELDS}
        width = self.heads * self.head_dim
        linear = lambda: Linear(model.dim, width, axes=("embed", "heads"), rngs=rngs)
        taps = lambda: param(rngs, _conv_init, (options.conv_width, width), (None, "heads"))
        gate = lambda bias: Linear(model.dim, self.heads, axes=("embed", "heads"), rngs=rngs, bias_init=bias)
        self.query, self.key, self.value = linear(), linear(), linear()
        self.conv_q, self.conv_k = taps(), taps()
        self.conv_v = taps() if options.conv_on_value else None
        self.output_gate = linear() if options.output_gate else None
        self.input_gate = gate(jax.nn.initializers.zeros) if self.INPUT_GATE else None
        self.decay_gate = gate(_decay_bias_init(options)) if self.DECAY_GATE else None
        self._add_parameters(options, rngs=rngs)
        self.norm = RMSNorm(self.head_dim, rngs=rngs, eps=model.norm_eps, axes=(None,))
        out_init = fan_in_normal(model.residual_init_scale / model.layers)
        self.out = Linear(width, model.dim, axes=("heads", "embed"), rngs=rngs, init=out_init)

    def _add_parameters(self, options, *, rngs: nnx.Rngs) -> None:
        """What a family has beyond the shared layer."""

    def _mix(self, q_BTHK, k_BTHK, v_BTHK, log_decay_BTH, beta_BTH, *, memory, segment_ids):
        """The op over a row, from a memory or from nothing (None): (o_BTHK, memory); a gate it lacks is None."""
        raise NotImplementedError

    def _mix_token(self, q_BHK, k_BHK, v_BHK, log_decay_BH, beta_BH, *, memory):
        """The op's step: (o_BHK, memory)."""
        raise NotImplementedError

    def _empty_memory(self, batch: int):
        """One matrix a head, [B, H, K, K]."""
        return jnp.zeros((batch, self.heads, self.head_dim, self.head_dim), jnp.float32)

    def _op_flops(self, chunk: int) -> Flops:
        """The op for one token, in chunks of `chunk`."""
        raise NotImplementedError

    def _gates(self, x):
        """log gamma and beta, [..., H] float32, None for a gate that the family lacks (G.2)."""
        x32 = x.astype(jnp.float32)
        log_decay = jax.nn.log_sigmoid(self.decay_gate(x32)) if self.DECAY_GATE else None
        beta = jax.nn.sigmoid(self.input_gate(x32)) if self.INPUT_GATE else None
        return log_decay, beta

    def _run(self, x, state: LayerState, *, convolve, mix):
        """The layer in the form, parallel or of one token, that `convolve` and `mix` have."""

        def convolved(x, taps, tail):
            return (x, tail) if taps is None else convolve(x, taps[...].astype(x.dtype), tail)

        heads = lambda x: x.reshape(*x.shape[:-1], self.heads, self.head_dim)
        q, conv_q = convolved(self.query(x), self.conv_q, state.conv_q)
        k, conv_k = convolved(self.key(x), self.conv_k, state.conv_k)
        v, conv_v = convolved(self.value(x), self.conv_v, state.conv_v)
        q, k, v = self._normalize(heads(q)), self._normalize(heads(k)), heads(v)
        o, memory = mix(q, k, v, *self._gates(x), memory=state.memory)
        o = self.norm(o).reshape(*x.shape[:-1], -1)
        if self.output_gate is not None:
            o = o * jax.nn.silu(self.output_gate(x))
        return self.out(o), LayerState(conv_q, conv_k, conv_v, memory)

    def _run_row(self, x_BTD, state: LayerState, *, segment_ids):
        def convolve(x_BTC, taps_WC, tail):
            return causal_conv1d(x_BTC, taps_WC, activation="silu", segment_ids=segment_ids, initial_state=tail)

        return self._run(x_BTD, state, convolve=convolve, mix=partial(self._mix, segment_ids=segment_ids))

    def __call__(self, x_BTD, segment_ids_BT):
        return self._run_row(x_BTD, LayerState(None, None, None, None), segment_ids=segment_ids_BT)[0]

    def init_state(self, batch: int, *, max_length: int, dtype) -> LayerState:
        del max_length  # the state is of constant size
        tails, width = self.conv_q.shape[-2] - 1, self.heads * self.head_dim
        tail = lambda taps: jnp.zeros((batch, tails if taps is not None else 0, width), dtype)
        return LayerState(tail(self.conv_q), tail(self.conv_k), tail(self.conv_v), self._empty_memory(batch))

    def extend(self, x_BTD, state: LayerState):
        return self._run_row(x_BTD, state, segment_ids=None)

    def step(self, x_BD, state: LayerState):
        convolve = partial(causal_conv1d_step, activation="silu")
        return self._run(x_BD, state, convolve=convolve, mix=self._mix_token)

    def flops_per_token(self, seq_len: int) -> Flops:
        """Projections, convolutions and the op in its chunks."""
        dim, width = self.out.kernel.shape[-1], self.heads * self.head_dim
        gates = self.INPUT_GATE + self.DECAY_GATE
        projections = 2 * dim * (width * (4 + (self.output_gate is not None)) + gates * self.heads)
        convolutions = 2 * self.conv_q.shape[-2] * width * (2 + (self.conv_v is not None))
        chunk = min(self.parallel["chunk_size"] or 64, seq_len)
        return products(projections + convolutions) + self._op_flops(chunk)


def _conv_init(key, shape, dtype):
    """Fan-in normal over the taps: the paper gives no initialisation for its depthwise convolutions."""
    return jax.random.normal(key, shape, dtype) / np.sqrt(shape[0])


def _decay_bias_init(options):
    """Biases of the heads in equal steps from the first to the last; all the first where no last is given."""
    last = options.decay_bias_init if options.decay_bias_init_last is None else options.decay_bias_init_last
    return lambda key, shape, dtype: jnp.asarray(np.linspace(options.decay_bias_init, last, *shape), dtype)
