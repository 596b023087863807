"""The Mesa layer: each token solves a ridge regression over the past for its query (MesaNet, arXiv 2506.05233).

B batch, T time, H heads, K head size (of keys, queries and values alike).
"""

import jax
import jax.numpy as jnp
import numpy as np

from mesanet_jax.errors import UserError
from mesanet_jax.flops import products, solves
from mesanet_jax.layers import param
from mesanet_jax.mixers.controlled import DECAY_FIELDS, PARALLEL_FIELDS, PROJECTION_FIELDS, Controlled
from mesanet_jax.schema import Field
from mesanet_kernels import mesa, mesa_step


class Mesa(Controlled):
    """Appendix E of the paper; its memory is (h_kk, h_kv), each [B, H, K, K]."""

    SECTION = "mesa"
    FIELDS = {
        **PROJECTION_FIELDS,
        "decay_cap": Field(0.9975, "b in gamma <- gamma (1 - (1 - b) beta^2); 1 switches the cap off (G.5)", fixed=True),
        **DECAY_FIELDS,
        "lambda_floor": Field(0.25, "lower bound of the ridge lambda (G.5)", at_least=0.0, fixed=True),
        "lambda_init": Field(1.0, "initial lambda, above the floor (G.5)", fixed=True),
        "solver": Field("cg", "linear solver of the kernel library", choices=("cg",)),
        "max_iters": Field(30, "solver iterations at most, in training, evaluation and decoding alike", at_least=1),
        "tol": Field(0.0, "stop a row at this residual relative to its first; 0: always max_iters", at_least=0.0),
        **PARALLEL_FIELDS,
    }  # fmt: skip

    @staticmethod
    def check(model) -> None:
        floor, initial = model.mesa.lambda_floor, model.mesa.lambda_init
        if initial <= floor:
            raise UserError(f"config.model.mesa.lambda_init={initial}: must be above lambda_floor={floor}")
        if not 0.0 < model.mesa.decay_cap <= 1.0:
            raise UserError(f"config.model.mesa.decay_cap={model.mesa.decay_cap}: must be above 0 and at most 1")

    def _add_parameters(self, options, *, rngs):
        self.decay_cap, self.lambda_floor = options.decay_cap, options.lambda_floor
        self.solve = {name: options[name] for name in ("solver", "max_iters", "tol")}
        raw = float(np.log(np.expm1(options.lambda_init - options.lambda_floor)))
        self.lambda_raw = param(rngs, jax.nn.initializers.constant(raw), (self.heads, self.head_dim), ("heads", None))

    def _gates(self, x):
        """log gamma with the cap of G.5, and beta."""
        log_decay, beta = super()._gates(x)
        return log_decay + jnp.log1p(-(1.0 - self.decay_cap) * jnp.square(beta)), beta

    def _lambda(self):
        return self.lambda_floor + jax.nn.softplus(self.lambda_raw[...])

    def _mix(self, q_BTHK, k_BTHK, v_BTHK, log_decay_BTH, beta_BTH, *, memory, segment_ids):
        o_BTHK, memory, _ = mesa(
            q_BTHK, k_BTHK, v_BTHK, log_decay_BTH, beta_BTH, self._lambda(),
            segment_ids=segment_ids, initial_state=memory, **self.solve, **self.parallel,
        )  # fmt: skip
        return o_BTHK, memory

    def _mix_token(self, q_BHK, k_BHK, v_BHK, log_decay_BH, beta_BH, *, memory):
        o_BHK, memory, _ = mesa_step(
            q_BHK, k_BHK, v_BHK, log_decay_BH, beta_BH, self._lambda(), memory, **self.solve
        )  # fmt: skip
        return o_BHK, memory

    def _empty_memory(self, batch):
        return super()._empty_memory(batch), super()._empty_memory(batch)

    def _op_flops(self, chunk):
        """The chunked states, `max_iters` products of the solve, readout."""
        size, width = self.head_dim, self.heads * self.head_dim
        product = 4 * chunk * width + 2 * size * width  # (P K^T . M) K + P S: one CG step, or the readout
        states = 2 * 2 * size * width  # two outer products
        iterations = self.solve["max_iters"] + 1  # and the residual of the starting point
        return products(states + product) + solves(iterations * product)
