"""mLSTM, the matrix memory of xLSTM (arXiv 2405.04517), in the block of the controlled comparison.

MesaNet leaves it its own parametrisation (Table 1): an exponential input gate, a normaliser in place of the
L2-normalised queries and keys, gates that start independent of their input. Convolution, output norm and the missing
output gate are those of the other families. The layer of xLSTM 7B (arXiv 2503.13427) has no convolution, keys half as
large as values, capped gates that start closed, and a sigmoid output gate (`configs/xlstm.py:440m-published`).

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_jax.flops import products
from mesanet_jax.layers import Linear
from mesanet_jax.mixers.gates import bias_init
from mesanet_jax.mixers.matrix_memory import PARALLEL_FIELDS, PROJECTION_FIELDS, Controlled
from mesanet_jax.schema import Field
from mesanet_kernels import mlstm, mlstm_step


class MLSTM(Controlled):
    """C_t = f_t C_{t-1} + i_t v_t k_t^T, n_t = f_t n_{t-1} + i_t k_t, o_t = C_t q_t / max(1, |n_t q_t|)."""

    SECTION = "mlstm"
    FIELDS = {
        **PROJECTION_FIELDS,
        "decay_bias_init": Field(3.0, "initial bias of the first head's forget gate", fixed=True),
        "decay_bias_init_last": Field(6.0, "bias of the last head, the others spaced from the first", kind=float, fixed=True),
        "input_bias_init": Field(0.0, "mean of the input gate's initial biases (-10 in xLSTM 7B)", fixed=True),
        "input_bias_init_std": Field(0.1, "standard deviation of the input gate's initial biases", at_least=0.0, fixed=True),
        "gate_softcap": Field(None, "c in c tanh(gate / c) before both gates (15 in xLSTM 7B); none: no cap", kind=float, above=0.0, fixed=True),
        **PARALLEL_FIELDS,
    }  # fmt: skip

    def _make_decay_gate(self, model, *, rngs):
        """Before its sigmoid; kernels of zero: at first a head's memory is of one length, whatever it reads."""
        zeros, biases = jax.nn.initializers.zeros, bias_init(model.mlstm)
        return Linear(model.dim, self.heads, axes=("embed", "heads"), rngs=rngs, init=zeros, bias_init=biases)

    def _normalize(self, x):
        return x

    def _add_parameters(self, options, *, rngs):
        self.gate_softcap = options.gate_softcap
        spread = jax.nn.initializers.normal(options.input_bias_init_std)
        self.input_gate = Linear(
            *self.input_gate.kernel.shape,
            axes=("embed", "heads"),
            rngs=rngs,
            init=jax.nn.initializers.zeros,
            bias_init=lambda *args: options.input_bias_init + spread(*args),
        )

    def _gates(self, x):
        """Forget and input gate before sigmoid and exp, [..., H] float32."""
        x32 = x.astype(jnp.float32)
        return tuple(self._cap(gate(x32)) for gate in (self.decay_gate, self.input_gate))

    def _cap(self, gate):
        return gate if self.gate_softcap is None else self.gate_softcap * jnp.tanh(gate / self.gate_softcap)

    def _mix(self, q_BTHK, k_BTHK, v_BTHV, forget_BTH, input_BTH, *, memory, segment_ids):
        return mlstm(
            q_BTHK, k_BTHK, v_BTHV, input_BTH, forget_BTH,
            segment_ids=segment_ids, initial_state=memory, **self.parallel,
        )  # fmt: skip

    def _mix_token(self, q_BHK, k_BHK, v_BHV, forget_BH, input_BH, *, memory):
        return mlstm_step(q_BHK, k_BHK, v_BHV, input_BH, forget_BH, memory)

    def _empty_memory(self, batch):
        cell_BHKV = super()._empty_memory(batch)
        return cell_BHKV, jnp.zeros_like(cell_BHKV[..., 0]), jnp.zeros_like(cell_BHKV[..., 0, 0])

    def _op_flops(self, chunk):
        """Scores and their product with the values inside a chunk, a write to the state and the normaliser, a read."""
        inside, state = 2 * chunk * (self.key_size + self.value_size), 4 * self.key_size * self.value_size
        return products(self.heads * (inside + state + 2 * self.key_size))
