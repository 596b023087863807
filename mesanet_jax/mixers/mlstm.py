"""mLSTM, the matrix memory of xLSTM (arXiv 2405.04517), in the layer that MesaNet's comparison shares.

As in MesaNet's Table 1, it keeps its own parametrisation: an exponential input gate, a normaliser instead of
L2-normalised queries and keys, and gates that at first do not depend on their input. Convolution, output norm and the
absence of an output gate are as in the other families. The layer of xLSTM 7B (arXiv 2503.13427,
`configs/xlstm.py:440m-published`) has no convolution, keys half as large as values, soft-capped gates, an input gate
that starts closed, and a sigmoid output gate.

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import Linear
from mesanet_jax.mixers.backends import implementation_field
from mesanet_jax.mixers.gates import spaced_biases
from mesanet_jax.mixers.matrix_memory import LAYER_FIELDS, MatrixMemory
from mesanet_jax.schema import Field
from mesanet_kernels import mlstm, mlstm_step


class MLSTM(MatrixMemory):
    """C_t = f_t C_{t-1} + i_t v_t k_t^T, n_t = f_t n_{t-1} + i_t k_t, o_t = C_t q_t / max(1, |n_t q_t|)."""

    SECTION = "mlstm"
    FIELDS = {
        **LAYER_FIELDS,
        "decay_bias_init": Field(3.0, "initial bias of the forget gate's first head", fixed=True),
        "decay_bias_init_last": Field(
            6.0,
            "initial bias of the last head, with the others equally spaced between; none: that of the first head",
            kind=float,
            fixed=True,
        ),
        "input_bias_init": Field(0.0, "mean of the input gate's initial biases (-10 in xLSTM 7B)", fixed=True),
        "input_bias_init_std": Field(
            0.1,
            "standard deviation of the input gate's initial biases",
            at_least=0.0,
            fixed=True,
        ),
        "gate_softcap": Field(
            None,
            "c in c tanh(gate / c), applied to both gates before their activation (15 in xLSTM 7B); none: no cap",
            kind=float,
            above=0.0,
            fixed=True,
        ),
        "implementation": implementation_field("mlstm"),
    }
    ROW_OP, TOKEN_OP = staticmethod(mlstm), staticmethod(mlstm_step)

    def _add_gates(self, model, options, *, rngs):
        """Makes the forget gate `decay_gate` and the input gate, both before their activation.

        Their kernels are zero, so at first each head has a fixed memory length, whatever it reads.
        """
        self.normalize_keys, self.gate_softcap = False, options.gate_softcap
        spread = jax.nn.initializers.normal(options.input_bias_init_std)

        def gate(bias_init):
            zeros = jax.nn.initializers.zeros
            axes = ("embed", "heads")
            return Linear(model.dim, self.heads, axes=axes, rngs=rngs, init=zeros, bias_init=bias_init)

        self.decay_gate = gate(spaced_biases(options.decay_bias_init, options.decay_bias_init_last))
        self.input_gate = gate(lambda *args: options.input_bias_init + spread(*args))

    def _call_op(self, op, x, q, k, v):
        x32 = x.astype(jnp.float32)
        return op(q, k, v, self._cap(self.input_gate(x32)), self._cap(self.decay_gate(x32)))

    def _cap(self, gate: jax.Array) -> jax.Array:
        return gate if self.gate_softcap is None else self.gate_softcap * jnp.tanh(gate / self.gate_softcap)

    def _empty_memory(self, batch):
        """Returns the cell [B, H, K, V], the normaliser [B, H, K] and the stabiliser [B, H]."""
        cell_BHKV = super()._empty_memory(batch)
        return cell_BHKV, jnp.zeros_like(cell_BHKV[..., 0]), jnp.zeros_like(cell_BHKV[..., 0, 0])

    def _op_flops(self, chunk) -> Flops:
        """Counts scores and their product with the values in a chunk; a write to cell and normaliser, and a read."""
        inside, state = 2 * chunk * (self.key_size + self.value_size), 4 * self.key_size * self.value_size
        return products(self.heads * (inside + state + 2 * self.key_size))
