"""From what a memory returned back to the residual stream: output norm, optional output gate, projection.

D model width, H heads, V value size.
"""

import jax
from flax import nnx

from mesanet_jax.layers import Linear, RMSNorm
from mesanet_jax.schema import Config, Field

# (activation, whether the gate comes before the norm) of an output gate, by name.
OUTPUT_GATES = {
    "silu": (jax.nn.silu, False),
    "silu_before_norm": (jax.nn.silu, True),  # Mamba2
    "sigmoid": (jax.nn.sigmoid, False),  # xLSTM
}
READOUT_FIELDS = {
    "output_norm": Field(
        "head",
        "what the RMSNorm of the output averages over: the channels of each head, or those of all heads",
        choices=("head", "all"),
        fixed=True,
    ),
    "output_gate": Field(
        False,
        "multiply the output by an activated projection of the stream (not in MesaNet's comparison)",
        fixed=True,
    ),
    "output_gate_form": Field(
        "silu",
        "activation of the output gate; silu_before_norm also applies the gate before the norm",
        choices=tuple(OUTPUT_GATES),
        fixed=True,
    ),
}


def make_output_norm(options: Config, heads: int, value_size: int, *, eps: float, rngs: nnx.Rngs) -> RMSNorm:
    """Returns the norm that `options.output_norm` names."""
    if options.output_norm == "head":
        return RMSNorm(value_size, rngs=rngs, eps=eps, axes=(None,))
    return RMSNorm(heads * value_size, rngs=rngs, eps=eps, axes=("heads",))


def read_out(
    o: jax.Array, x: jax.Array, *, norm: RMSNorm, gate: Linear | None, gate_form: str, out: Linear
) -> jax.Array:
    """Normalises, gates and projects what was read from a memory: [..., H, V] -> [..., D].

    Args:
      o: what was read.
      x: the stream [..., D], from which the gate is computed.
      norm: from `make_output_norm`; it averages over groups of as many channels as it has scales.
      gate: the projection of the output gate, [D, H * V]; None: no gate.
      gate_form: a name of `OUTPUT_GATES`.
      out: the projection to the stream, [H * V, D].
    """
    group = norm.scale.shape[-1]
    split = lambda o: o.reshape(*x.shape[:-1], -1, group)
    flat = lambda o: o.reshape(*x.shape[:-1], -1)
    if gate is None:
        return out(flat(norm(split(o))))
    activation, before_norm = OUTPUT_GATES[gate_form]
    gate_values = activation(gate(x))
    if before_norm:
        return out(flat(norm(split(flat(o) * gate_values))))
    return out(flat(norm(split(o))) * gate_values)
