"""The Mesa layer: each token solves a ridge regression over the past for its query (MesaNet, arXiv 2506.05233).

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, products, solves
from mesanet_jax.layers import param
from mesanet_jax.mixers.gates import DECAY_FIELDS
from mesanet_jax.mixers.matrix_memory import EMPTY, PARALLEL_FIELDS, PROJECTION_FIELDS, Controlled
from mesanet_jax.schema import Field
from mesanet_kernels import mesa, mesa_step


class Mesa(Controlled):
    """Appendix E of the paper; its memory is (h_kk [B, H, K, K], h_kv [B, H, K, V])."""

    SECTION = "mesa"
    FIELDS = {
        **PROJECTION_FIELDS,
        "decay_cap": Field(0.9975, "b in gamma <- gamma (1 - (1 - b) beta^2); 1 switches the cap off (G.5)", fixed=True),
        **DECAY_FIELDS,
        "lambda_floor": Field(0.25, "lower bound of the ridge lambda (G.5)", at_least=0.0, fixed=True),
        "lambda_init": Field(1.0, "initial lambda, above the floor (G.5)", fixed=True),
        "solver": Field("cg", "linear solver of the kernel library", choices=("cg", "pcg")),
        "max_iters": Field(30, "solver iterations at most, in training, evaluation and decoding alike", at_least=1),
        "tol": Field(0.0, "stop a row at this residual relative to its first; 0: always max_iters", at_least=0.0),
        **PARALLEL_FIELDS,
        "implementation": Field(None, "backend of the kernel library; none: the best that applies", kind=str, choices=("reference", "xla", "pallas_gpu", "pallas_tpu")),
    }  # fmt: skip

    @classmethod
    def check(cls, model) -> None:
        super().check(model)
        floor, initial = model.mesa.lambda_floor, model.mesa.lambda_init
        if initial <= floor:
            raise UserError(f"config.model.mesa.lambda_init={initial}: must be above lambda_floor={floor}")
        if not 0.0 < model.mesa.decay_cap <= 1.0:
            raise UserError(f"config.model.mesa.decay_cap={model.mesa.decay_cap}: must be above 0 and at most 1")

    def _add_parameters(self, options, *, rngs):
        self.decay_cap, self.lambda_floor = options.decay_cap, options.lambda_floor
        self.solve = {name: options[name] for name in ("solver", "max_iters", "tol")}
        raw = float(np.log(np.expm1(options.lambda_init - options.lambda_floor)))
        self.lambda_raw = param(rngs, jax.nn.initializers.constant(raw), (self.heads, self.key_size), ("heads", None))

    def _gates(self, x):
        """log gamma with the cap of G.5, and beta."""
        log_decay, beta = super()._gates(x)
        return log_decay + jnp.log1p(-(1.0 - self.decay_cap) * jnp.square(beta)), beta

    def _lambda(self):
        return self.lambda_floor + jax.nn.softplus(self.lambda_raw[...])

    def _mix(self, *args, **kwargs):
        return self._mesa(*args, **kwargs)[:2]

    def _mesa(self, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, *, memory, segment_ids):
        return mesa(
            q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, self._lambda(),
            segment_ids=segment_ids, initial_state=memory, **self.solve, **self.parallel,
        )  # fmt: skip

    def with_stats(self, x_BTD, segment_ids_BT):
        """The layer's output, and {"solver_iterations": mean steps of each head's solves [H]} where these may differ."""
        seen = {}

        def mix(*args, **kwargs):
            o_BTHV, memory, iterations_BTH = self._mesa(*args, **kwargs)
            if self.solve["tol"] > 0:
                seen["solver_iterations"] = jnp.mean(iterations_BTH.astype(jnp.float32), axis=(0, 1))
            return o_BTHV, memory

        return self._run_row(x_BTD, EMPTY, segment_ids=segment_ids_BT, mix=mix)[0], seen

    def _mix_token(self, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, *, memory):
        o_BHV, memory, _ = mesa_step(
            q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, self._lambda(), memory, **self.solve
        )  # fmt: skip
        return o_BHV, memory

    def _empty_memory(self, batch):
        h_kk_BHKK = jnp.zeros((batch, self.heads, self.key_size, self.key_size), jnp.float32)
        return h_kk_BHKK, super()._empty_memory(batch)

    def _op_flops(self, chunk):
        """The states, the solve and the readout, and beside their backward passes the gradient of e* H q* (mesanet.md 1.6)
        in keys, state and decays; the operator's diagonal serves both solves."""
        # One product of a token with a chunk or a state, of keys and of values.
        inside, outside = 2 * chunk * self.key_size, 2 * self.key_size**2
        value_inside, value_outside = 2 * chunk * self.value_size, 2 * self.key_size * self.value_size
        step = 2 * inside + outside  # (P K^T . M) K + P S
        iterations = self.solve["max_iters"] + 1  # and the residual of the starting point
        diagonal, operator_gradient = inside, 3 * inside + 2 * outside
        a_head = (
            products(outside + value_outside)
            + products(inside + value_inside + value_outside)
            + solves(iterations * step)
            + Flops(diagonal, diagonal + operator_gradient)
        )
        return a_head * self.heads
