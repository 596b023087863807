"""One update as a pure function, and how it is compiled onto a mesh.

A rows accumulated one after another, B rows of the batch, T time.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mesanet_jax import mesh as mesh_lib
from mesanet_jax.errors import UserError
from mesanet_jax.models import Model
from mesanet_jax.training import optimizer as optimizer_lib
from mesanet_jax.training import schedule

BATCH = {"inputs": jnp.int32, "targets": jnp.int32, "segment_ids": jnp.int32, "weights": jnp.float32}

# XLA for TPUs would turn a product with a weight that is split over fsdp into a loop of small products and permutes
# ("windowed einsum"). By the compiler's own cycles that takes transformer:140m with fsdp 16 on v5e from 1.19 to 3.02 s a
# step, and from 4.7 to 8.1 GB of temporaries (docs/results/pods.md). A threshold that no array reaches turns it off.
COMPILER_OPTIONS = {"tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}}


@dataclasses.dataclass(frozen=True)
class Program:
    """The run's compiled functions, with the shapes and shardings of what they take.

    `init(key)` -> state, `train(state, batch)` -> (state, metrics), `scores(params, batch)` -> weighted nats [B,T] in
    every mode (`Model.scores`), `layer_stats(params, batch)` -> statistics of the layers (`Model.layer_stats`).
    The state is {"step", "params", "opt_state", "skipped"}; `train` consumes (donates) the one that it is given.
    """

    mesh: jax.sharding.Mesh
    state: Any
    batch: Any
    accumulation: int
    init: Any
    train: Any
    scores: Any
    layer_stats: Any


def accumulation(config, mesh: jax.sharding.Mesh) -> int:
    """Into how many parts a step's batch is split, so that a device holds at most `train.rows_per_device` rows."""
    rows, shards = config.data.batch_size, mesh_lib.batch_shards(mesh)
    if rows % shards:
        nearest = shards * max(1, round(rows / shards))
        raise UserError(
            f"config.data.batch_size={rows}: not a multiple of the {shards} ways the mesh splits it; the nearest is {nearest}"
        )
    per_device = rows // shards
    least = math.ceil(per_device / config.train.rows_per_device)
    return next(parts for parts in range(least, per_device + 1) if per_device % parts == 0)


def compile_program(config, model: Model, mesh: jax.sharding.Mesh) -> Program:
    """Builds the jitted functions; XLA compiles each at its first call (or by `.lower(...).compile()`)."""
    transformation = optimizer_lib.make(config, model)
    parts = accumulation(config, mesh)

    def init(key):
        params = model.init(key)
        zero = jnp.zeros((), jnp.int32)
        return {"step": zero, "params": params, "opt_state": transformation.init(params), "skipped": zero}

    def train(state, batch):
        return _train_step(state, batch, config=config, model=model, transformation=transformation, parts=parts)

    state = _with_shardings(jax.eval_shape(init, jax.random.key(0)), model, mesh)
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    rows = mesh_lib.batch_sharding(mesh)
    shape = (config.data.batch_size, config.data.seq_len)
    return Program(
        mesh=mesh,
        state=state,
        batch={name: jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for name, dtype in BATCH.items()},
        accumulation=parts,
        init=jax.jit(init, out_shardings=state_shardings),
        train=jax.jit(
            train,
            in_shardings=(state_shardings, rows),
            out_shardings=(state_shardings, mesh_lib.replicated(mesh)),
            donate_argnums=0,
            compiler_options=_compiler_options(mesh),
        ),
        scores=compile_call(model.scores, model, mesh),
        layer_stats=compile_call(model.layer_stats, model, mesh),
    )


def compile_call(call, model: Model, mesh: jax.sharding.Mesh):
    """The jitted `call(params, batch)` of a model on a mesh: parameters and rows split, its result whole everywhere."""
    params = mesh_lib.shardings(model.axes, model.shapes, mesh)
    return jax.jit(
        call,
        in_shardings=(params, mesh_lib.batch_sharding(mesh)),
        out_shardings=mesh_lib.replicated(mesh),
        compiler_options=_compiler_options(mesh),
    )


def _compiler_options(mesh: jax.sharding.Mesh) -> dict | None:
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].platform)


def _with_shardings(state, model: Model, mesh: jax.sharding.Mesh):
    """The abstract state with its shardings: what the optimizer keeps of a parameter is split as the parameter is."""
    axes = dict(jax.tree_util.tree_leaves_with_path(model.axes, is_leaf=lambda axes: isinstance(axes, tuple)))

    def sharding(path, leaf):
        """By the end of the leaf's path, which is the path of its parameter; a mean over an axis keeps it, with size 1."""
        ends = (path[first:] for first in range(len(path)))
        names = next((axes[end] for end in ends if end in axes), ())
        return jax.sharding.NamedSharding(mesh, mesh_lib.partition_spec(names, leaf.shape, mesh))

    return mesh_lib.with_shardings(state, jax.tree_util.tree_map_with_path(sharding, state))


def _train_step(state, batch, *, config, model: Model, transformation, parts: int):
    params = state["params"]
    count = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
    (loss, terms), grads = _accumulate(params, batch, count, model=model, parts=parts)
    grad_norm = optax.tree.norm(grads)
    updates, opt_state = transformation.update(grads, state["opt_state"], params, step=state["step"])
    updated = optax.apply_updates(params, updates)
    # A step that is not finite changes nothing, so there is never a poisoned state to save: a finite gradient may
    # still overflow the parameters, which the loss would show one step too late.
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(optax.tree.norm(updated))
    keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
    after = {
        "step": state["step"] + 1,
        "params": keep(updated, params),
        "opt_state": keep(opt_state, state["opt_state"]),
        "skipped": jnp.where(good, 0, state["skipped"] + 1),
    }
    metrics = {
        "loss": loss,
        **terms,
        "grad_norm": grad_norm,
        "param_norm": optax.tree.norm(after["params"]),
        "learning_rate": schedule.learning_rate(config)(state["step"]),
        "valid_tokens": count,
        "skipped": after["skipped"],
    }
    return after, metrics


def _accumulate(params, batch, count, *, model: Model, parts: int):
    """((Loss, its terms by name), gradient) of sum(objective) / count, with the rows taken in `parts` turns.

    Dividing by the count of the whole batch makes the result independent of `parts`, of the mesh and of how ragged
    the valid tokens are; a mean of means would not be.
    """

    def loss(params, batch):
        total_BT, terms = model.objective(params, batch, share)
        return jnp.sum(total_BT) / count, {name: jnp.sum(term_BT) / count for name, term_BT in terms.items()}

    share = count / batch["weights"].size
    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if parts == 1:
        return value_and_grad(params, batch)

    # Row r goes to turn r % parts: every device then keeps its own rows, and nothing moves between devices.
    split_ABT = {name: x.reshape(-1, parts, x.shape[-1]).swapaxes(0, 1) for name, x in batch.items()}

    def turn(total, batch):
        return jax.tree.map(jnp.add, total, value_and_grad(params, batch)), None

    first = {name: x[0] for name, x in split_ABT.items()}
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(value_and_grad, params, first))
    return jax.lax.scan(turn, zero, split_ABT)[0]
