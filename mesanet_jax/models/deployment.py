"""The deployed loss of models with a memory: each position reads the memory that the model itself has left.

There are two ways to compute it for whole rows. One is exact: one decoding step after another. The other sweeps over
whole rows, m <- P(x, shift(m)) from zeros, until the memory m settles (Jacobi iteration). Sweep k makes the first k
positions exact, so T sweeps always suffice, and usually far fewer do.

B batch, T time, D model width.
"""

import jax
import jax.numpy as jnp

from mesanet_jax.models.interface import Batch
from mesanet_jax.models.memory import MemoryRules
from mesanet_jax.models.nanochat_backbone import NanochatBackbone, State
from mesanet_kernels import state_resets


def deployed_states(model: NanochatBackbone, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The final states of the deployed decoder over whole rows, [B,T,D], and scalars about their computation.

    They are not meant to be differentiated; training minimises the model's `objective`.
    """
    rules = model.memory_rules
    assert rules is not None, "the model has no memory"
    compute = {"sweeps": _by_sweeps, "steps": _by_steps}[rules.deployed_by]
    return compute(model, rules, batch["inputs"], batch["segment_ids"])


def _by_sweeps(model: NanochatBackbone, rules: MemoryRules, tokens_BT, segment_ids_BT):
    x0_BTD, context = model.rows(tokens_BT, segment_ids_BT)
    length = tokens_BT.shape[1]
    most = min(rules.max_sweeps or length, length)

    def unsettled(carry):
        sweeps, change, *_ = carry
        return (change > rules.tolerance) & (sweeps < most)

    def sweep(carry):
        sweeps, _, before_BTD, _ = carry
        read_BTD = model.read_memory(before_BTD, segment_ids_BT)
        hidden_BTD = model.run_with_memory(x0_BTD, context, read_BTD)
        memory_BTD = model.write_memory(hidden_BTD, read_BTD)
        difference_BTD = memory_BTD.astype(jnp.float32) - before_BTD
        change = jnp.sqrt(jnp.max(jnp.mean(jnp.square(difference_BTD), axis=-1)))
        return sweeps + 1, change, memory_BTD, hidden_BTD

    zeros_BTD = jnp.zeros_like(x0_BTD)
    begin = (jnp.zeros((), jnp.int32), jnp.asarray(jnp.inf, jnp.float32), zeros_BTD, zeros_BTD)
    sweeps, _, _, hidden_BTD = jax.lax.while_loop(unsettled, sweep, begin)
    return hidden_BTD, {"sweeps": sweeps}


def _by_steps(model: NanochatBackbone, rules: MemoryRules, tokens_BT, segment_ids_BT):
    """One decoding step per token. Each row has a state of its own, since documents start at different positions."""

    def reset(state: State, empty: State, start):
        """Empties what the start of a document resets. Positions continue, as they do in rows."""

        def emptied(old, new):
            return jnp.where(start, new, old)

        after = jax.tree.map(emptied, state, empty) if model.resets else state
        memory_BD = emptied(state.memory_BD, empty.memory_BD) if rules.resets else state.memory_BD
        return after._replace(position=state.position, memory_BD=memory_BD)

    def row(tokens_T, starts_T):
        empty = model.init_state(1, max_length=len(tokens_T))

        def one(state, token_and_start):
            token, start = token_and_start
            hidden_11D, state = model.advance(token[None, None], reset(state, empty, start))
            return state, hidden_11D[0, 0]

        return jax.lax.scan(one, empty, (tokens_T, starts_T))[1]

    return jax.vmap(row)(tokens_BT, state_resets(segment_ids_BT)), {}


def extend_by_steps(model: NanochatBackbone, tokens_BT: jax.Array, state: State) -> tuple[jax.Array, State]:
    """Reads T further tokens of one document, one after another: (logits [B,T,V] float32, state).

    A recurrence through the final states has no other exact way.
    """

    def step(state, tokens_B):
        logits_BV, state = model.decode_step(tokens_B, state)
        return state, logits_BV

    state, logits_TBV = jax.lax.scan(step, state, tokens_BT.T)
    return jnp.moveaxis(logits_TBV, 0, 1), state
