"""The Mesa layer: each token solves a ridge regression over the past for its query (MesaNet, arXiv 2506.05233).

B batch, T time, D model width, H heads, K head size (of keys, queries and values alike), C = H*K, W conv taps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, products, solves
from mesanet_jax.layers import Linear, RMSNorm, fan_in_normal, l2_normalize, param
from mesanet_jax.schema import Field
from mesanet_kernels import causal_conv1d, causal_conv1d_step, mesa, mesa_step


class MesaState(NamedTuple):
    """What one layer remembers; its size does not depend on the length."""

    conv_q: jax.Array  # [B, W-1, C] the last inputs of the convolution on queries
    conv_k: jax.Array  # [B, W-1, C]
    conv_v: jax.Array  # [B, W-1, C], or [B, 0, C] where values are not convolved
    h_kk: jax.Array  # [B, H, K, K] float32
    h_kv: jax.Array  # [B, H, K, K] float32


class Mesa(nnx.Module):
    """Appendix E of the paper: convolved, SiLU-activated, L2-normalised queries and keys; scalar gates a head."""

    FIELDS = {
        "conv_width": Field(4, "taps of the causal convolution on queries and keys", at_least=2, fixed=True),
        "conv_on_value": Field(False, "convolve and activate the values too (the paper contradicts itself)", fixed=True),
        "output_gate": Field(False, "multiply the normalised output by SiLU of a projection (not in the paper)", fixed=True),
        "decay_cap": Field(0.9975, "b in gamma <- gamma (1 - (1 - b) beta^2); 1 switches the cap off (G.5)", fixed=True),
        "decay_bias_init": Field(0.0, "initial bias of the decay gate, 0 starts gamma at one half", fixed=True),
        "decay_bias_init_last": Field(None, "bias of the last head, the others spaced from the first", kind=float, fixed=True),
        "lambda_floor": Field(0.25, "lower bound of the ridge lambda (G.5)", at_least=0.0, fixed=True),
        "lambda_init": Field(1.0, "initial lambda, above the floor (G.5)", fixed=True),
        "solver": Field("cg", "linear solver of the kernel library", choices=("cg",)),
        "max_iters": Field(30, "solver iterations at most, in training, evaluation and decoding alike", at_least=1),
        "tol": Field(0.0, "stop a row at this residual relative to its first; 0: always max_iters", at_least=0.0),
        "chunk_size": Field(None, "tokens a chunk of the parallel form; none: the kernel library's choice", kind=int, at_least=1),
        "implementation": Field(None, "mesa backend of the kernel library; none: the best that applies", kind=str, choices=("reference", "xla")),
    }  # fmt: skip

    @staticmethod
    def check(model) -> None:
        floor, initial = model.mesa.lambda_floor, model.mesa.lambda_init
        if initial <= floor:
            raise UserError(f"config.model.mesa.lambda_init={initial}: must be above lambda_floor={floor}")
        if not 0.0 < model.mesa.decay_cap <= 1.0:
            raise UserError(f"config.model.mesa.decay_cap={model.mesa.decay_cap}: must be above 0 and at most 1")

    def __init__(self, model, *, rngs: nnx.Rngs):
        options = model.mesa
        self.heads, self.head_dim = model.heads, model.head_dim
        self.decay_cap, self.lambda_floor = options.decay_cap, options.lambda_floor
        self.solve = {name: options[name] for name in ("solver", "max_iters", "tol")}
        self.parallel = {name: options[name] for name in ("chunk_size", "implementation")}
        width = self.heads * self.head_dim
        linear = lambda: Linear(model.dim, width, axes=("embed", "heads"), rngs=rngs)
        taps = lambda: param(rngs, _conv_init, (options.conv_width, width), (None, "heads"))
        self.query, self.key, self.value = linear(), linear(), linear()
        self.conv_q, self.conv_k = taps(), taps()
        self.conv_v = taps() if options.conv_on_value else None
        self.output_gate = linear() if options.output_gate else None
        last = options.decay_bias_init if options.decay_bias_init_last is None else options.decay_bias_init_last
        decay_biases = np.linspace(options.decay_bias_init, last, self.heads)
        gate = lambda bias: Linear(model.dim, self.heads, axes=("embed", "heads"), rngs=rngs, bias_init=bias)
        self.input_gate = gate(jax.nn.initializers.zeros)
        self.decay_gate = gate(lambda key, shape, dtype: jnp.asarray(decay_biases, dtype))
        raw = float(np.log(np.expm1(options.lambda_init - options.lambda_floor)))
        self.lambda_raw = param(rngs, jax.nn.initializers.constant(raw), (self.heads, self.head_dim), ("heads", None))
        self.norm = RMSNorm(self.head_dim, rngs=rngs, eps=model.norm_eps, axes=(None,))
        out_init = fan_in_normal(model.residual_init_scale / model.layers)
        self.out = Linear(width, model.dim, axes=("heads", "embed"), rngs=rngs, init=out_init)

    def _gates(self, x):
        """log gamma and beta, [..., H] float32 (G.2 and the cap of G.5)."""
        x32 = x.astype(jnp.float32)
        beta = jax.nn.sigmoid(self.input_gate(x32))
        cap = jnp.log1p(-(1.0 - self.decay_cap) * jnp.square(beta))
        return jax.nn.log_sigmoid(self.decay_gate(x32)) + cap, beta

    def _lambda(self):
        return self.lambda_floor + jax.nn.softplus(self.lambda_raw[...])

    def _heads(self, x):
        return x.reshape(*x.shape[:-1], self.heads, self.head_dim)

    def _output(self, x, o):
        o = self.norm(o).reshape(*o.shape[:-2], -1)
        if self.output_gate is not None:
            o = o * jax.nn.silu(self.output_gate(x))
        return self.out(o)

    def _forward(self, x_BTD, *, segment_ids, state: MesaState | None):
        """The parallel form, from a state or from nothing: outputs, and the state after the last token."""
        carried = state or MesaState(None, None, None, None, None)

        def convolve(x, taps, initial):
            taps = taps[...].astype(x.dtype)
            return causal_conv1d(x, taps, activation="silu", segment_ids=segment_ids, initial_state=initial)

        q_BTC, conv_q = convolve(self.query(x_BTD), self.conv_q, carried.conv_q)
        k_BTC, conv_k = convolve(self.key(x_BTD), self.conv_k, carried.conv_k)
        v_BTC, conv_v = self.value(x_BTD), carried.conv_v
        if self.conv_v is not None:
            v_BTC, conv_v = convolve(v_BTC, self.conv_v, conv_v)
        log_decay_BTH, beta_BTH = self._gates(x_BTD)
        result = mesa(
            l2_normalize(self._heads(q_BTC)), l2_normalize(self._heads(k_BTC)), self._heads(v_BTC),
            log_decay_BTH, beta_BTH, self._lambda(),
            segment_ids=segment_ids, initial_state=None if state is None else (state.h_kk, state.h_kv),
            **self.solve, **self.parallel,
        )  # fmt: skip
        return self._output(x_BTD, result.o), MesaState(conv_q, conv_k, conv_v, *result.final_state)

    def __call__(self, x_BTD, segment_ids_BT):
        return self._forward(x_BTD, segment_ids=segment_ids_BT, state=None)[0]

    def init_state(self, batch: int, *, max_length: int, dtype) -> MesaState:
        del max_length  # the state is of constant size
        tails, width = self.conv_q.shape[-2] - 1, self.heads * self.head_dim
        tail = lambda taps: jnp.zeros((batch, tails if taps is not None else 0, width), dtype)
        hidden = lambda: jnp.zeros((batch, self.heads, self.head_dim, self.head_dim), jnp.float32)
        return MesaState(tail(self.conv_q), tail(self.conv_k), tail(self.conv_v), hidden(), hidden())

    def extend(self, x_BTD, state: MesaState):
        return self._forward(x_BTD, segment_ids=None, state=state)

    def step(self, x_BD, state: MesaState):
        def convolve(x, taps, initial):
            return causal_conv1d_step(x, taps[...].astype(x.dtype), initial, activation="silu")

        q_BC, conv_q = convolve(self.query(x_BD), self.conv_q, state.conv_q)
        k_BC, conv_k = convolve(self.key(x_BD), self.conv_k, state.conv_k)
        v_BC, conv_v = self.value(x_BD), state.conv_v
        if self.conv_v is not None:
            v_BC, conv_v = convolve(v_BC, self.conv_v, conv_v)
        log_decay_BH, beta_BH = self._gates(x_BD)
        result = mesa_step(
            l2_normalize(self._heads(q_BC)), l2_normalize(self._heads(k_BC)), self._heads(v_BC),
            log_decay_BH, beta_BH, self._lambda(), (state.h_kk, state.h_kv), **self.solve,
        )  # fmt: skip
        return self._output(x_BD, result.o), MesaState(conv_q, conv_k, conv_v, *result.final_state)

    def flops_per_token(self, seq_len: int) -> Flops:
        """Projections, convolutions, the chunked states, `max_iters` products of the solve, readout."""
        dim, width, size = self.out.kernel.shape[-1], self.heads * self.head_dim, self.head_dim
        chunk = min(self.parallel["chunk_size"] or 64, seq_len)
        projections = 2 * dim * (width * (4 + (self.output_gate is not None)) + 2 * self.heads)
        convolutions = 2 * self.conv_q.shape[-2] * width * (2 + (self.conv_v is not None))
        product = 4 * chunk * width + 2 * size * width  # (P K^T . M) K + P S: one CG step, or the readout
        states = 2 * 2 * size * width  # two outer products
        iterations = self.solve["max_iters"] + 1  # and the residual of the starting point
        return products(projections + convolutions + states + product) + solves(iterations * product)


def _conv_init(key, shape, dtype):
    """Fan-in normal over the taps: the paper gives no initialisation for its depthwise convolutions."""
    return jax.random.normal(key, shape, dtype) / np.sqrt(shape[0])
