"""The Mesa layer: each token solves a ridge regression over the past for its query (MesaNet, arXiv 2506.05233).

docs/mesa.md explains its mathematics.

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, products, solves
from mesanet_jax.layers import param
from mesanet_jax.mixers.backends import implementation_field
from mesanet_jax.mixers.gates import DECAY_FIELDS
from mesanet_jax.mixers.matrix_memory import LAYER_FIELDS, NO_STATE, MatrixMemory
from mesanet_jax.schema import Config, Field
from mesanet_kernels import mesa, mesa_step

SOLVER_FIELDS = {
    "solver": Field(
        "cg",
        "linear solver of the kernel library: conjugate gradients, plain or preconditioned",
        choices=("cg", "pcg"),
    ),
    "max_iters": Field(
        30,
        "maximum number of solver iterations, the same in training, evaluation and decoding",
        at_least=1,
    ),
    "tol": Field(
        0.0,
        "stop a solve once its residual is at most this fraction of the initial one; 0: always max_iters iterations",
        at_least=0.0,
    ),
}


class Mesa(MatrixMemory):
    """Appendix E of the paper: H_t accumulates k k^T, G_t accumulates v k^T, o_t = G_t (H_t + diag(lambda))^{-1} q_t.

    Its memory is (h_kk [B, H, K, K], h_kv [B, H, K, V]).
    """

    SECTION = "mesa"
    FIELDS = {
        **LAYER_FIELDS,
        **DECAY_FIELDS,
        "decay_cap": Field(
            0.9975,
            "b in gamma (1 - (1 - b) beta^2), which replaces gamma; 1 switches the cap off (MesaNet, appendix G.5)",
            fixed=True,
        ),
        "lambda_floor": Field(
            0.25,
            "lower bound of the ridge parameter lambda (MesaNet, appendix G.5)",
            at_least=0.0,
            fixed=True,
        ),
        "lambda_init": Field(
            1.0,
            "initial lambda, above the floor (MesaNet, appendix G.5)",
            fixed=True,
        ),
        **SOLVER_FIELDS,
        "implementation": implementation_field("mesa"),
    }
    ROW_OP, TOKEN_OP = staticmethod(mesa), staticmethod(mesa_step)

    @classmethod
    def check(cls, model: Config) -> None:
        """Raises UserError for options that do not fit together."""
        super().check(model)
        floor, initial = model.mesa.lambda_floor, model.mesa.lambda_init
        if initial <= floor:
            raise UserError(f"config.model.mesa.lambda_init={initial}: must be above lambda_floor={floor}")
        if not 0.0 < model.mesa.decay_cap <= 1.0:
            raise UserError(f"config.model.mesa.decay_cap={model.mesa.decay_cap}: must be above 0 and at most 1")

    def _add_gates(self, model, options, *, rngs):
        self.input_gate = self._make_input_gate(model, rngs=rngs)
        self.decay_gate = self._make_decay(model, options, rngs=rngs)
        self.decay_cap, self.lambda_floor = options.decay_cap, options.lambda_floor
        self.solver_options = {name: options[name] for name in SOLVER_FIELDS}
        raw = float(np.log(np.expm1(options.lambda_init - options.lambda_floor)))
        self.lambda_raw = param(rngs, jax.nn.initializers.constant(raw), (self.heads, self.key_size), ("heads", None))

    def _lambda(self) -> jax.Array:
        """Returns the diagonal of the ridge regularisation, [H, K]."""
        return self.lambda_floor + jax.nn.softplus(self.lambda_raw[...])

    def _call_op(self, op, x, q, k, v):
        beta = self.input_gate(x)
        log_decay = self.decay_gate(x) + jnp.log1p(-(1.0 - self.decay_cap) * jnp.square(beta))
        return op(q, k, v, log_decay, beta, self._lambda(), **self.solver_options)

    def with_stats(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the layer's output and its statistics.

        These are {"solver_iterations": mean over the tokens for each head, [H]} if solves may stop early, else {}.
        """
        y_BTD, _, (iterations_BTH,) = self._run_rows(x_BTD, NO_STATE, segment_ids=segment_ids_BT)
        if self.solver_options["tol"] == 0:
            return y_BTD, {}
        return y_BTD, {"solver_iterations": jnp.mean(iterations_BTH.astype(jnp.float32), axis=(0, 1))}

    def _empty_memory(self, batch):
        h_kk_BHKK = jnp.zeros((batch, self.heads, self.key_size, self.key_size), jnp.float32)
        return h_kk_BHKK, super()._empty_memory(batch)

    def _op_flops(self, chunk) -> Flops:
        """Counts the states, the solve and the readout, and what their gradients cost beyond twice as much.

        That is the gradient of e* H q* in keys, state and decays (docs/mesa.md, "Its gradient"). The diagonal of the
        operator is computed once for the solves of both passes.
        """
        # One product of a token with a chunk, or with a state, of keys and of values.
        inside, outside = 2 * chunk * self.key_size, 2 * self.key_size**2
        value_inside, value_outside = 2 * chunk * self.value_size, 2 * self.key_size * self.value_size
        apply_operator = 2 * inside + outside  # (P K^T . M) K + P S
        applications = self.solver_options["max_iters"] + 1  # one more for the residual of the starting point
        diagonal, operator_gradient = inside, 3 * inside + 2 * outside
        per_head = (
            products(outside + value_outside)
            + products(inside + value_inside + value_outside)
            + solves(applications * apply_operator)
            + Flops(diagonal, diagonal + operator_gradient)
        )
        return per_head * self.heads
