"""One training step as a pure function, and its compilation for a mesh.

A parts of an accumulated batch, B rows of the batch, T time.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mesanet_jax import mesh as mesh_lib
from mesanet_jax.errors import UserError
from mesanet_jax.models import Model
from mesanet_jax.schema import Config
from mesanet_jax.training import optimizer as optimizer_lib
from mesanet_jax.training import schedule

State = dict[str, Any]  # "step", "params", "opt_state", "skipped" (consecutive skipped updates)
DeviceBatch = dict[str, jax.Array]  # the arrays of BATCH, [B, T]
Metrics = dict[str, jax.Array]  # scalars

BATCH = {"inputs": jnp.int32, "targets": jnp.int32, "segment_ids": jnp.int32, "weights": jnp.float32}

# XLA for TPUs turns the product with a weight that is split over fsdp into a loop of small products and permutations
# ("windowed einsum"). In the compiler's estimate that makes the step of transformer:140m with fsdp=16 on a v5e-16 more
# than twice as long, and its temporary arrays almost twice as large. A threshold that no array reaches turns it off.
COMPILER_OPTIONS = {"tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}}


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled functions of a run, with the shapes and shardings of their arguments.

    Attributes:
      mesh: the device mesh.
      state: shape structs of the training state.
      batch: shape structs of a batch.
      accumulation: into how many parts a training step splits its batch.
      init: (key) -> state.
      train: (state, batch) -> (state, metrics); it donates the buffers of the state it is given.
      scores: (params, batch) -> losses per token, as `Model.scores`.
      layer_stats: (params, batch) -> statistics of the layers, as `Model.layer_stats`.
    """

    mesh: jax.sharding.Mesh
    state: State
    batch: dict[str, jax.ShapeDtypeStruct]
    accumulation: int
    init: jax.stages.Wrapped
    train: jax.stages.Wrapped
    scores: jax.stages.Wrapped
    layer_stats: jax.stages.Wrapped


def accumulation(config: Config, mesh: jax.sharding.Mesh) -> int:
    """Returns the number of parts into which each batch is split. A device holds at most `train.rows_per_device` rows.

    Raises:
      UserError: the mesh does not divide the batch.
    """
    rows, shards = config.data.batch_size, mesh_lib.batch_shards(mesh)
    if rows % shards:
        nearest = shards * max(1, round(rows / shards))
        raise UserError(
            f"config.data.batch_size={rows}: not a multiple of the {shards} ways in which the mesh splits a batch;"
            f" the nearest multiple is {nearest}"
        )
    per_device = rows // shards
    least = math.ceil(per_device / config.train.rows_per_device)
    return next(parts for parts in range(least, per_device + 1) if per_device % parts == 0)


def compile_program(config: Config, model: Model, mesh: jax.sharding.Mesh) -> Program:
    """Builds the jitted functions; XLA compiles each at its first call (or in `.lower(...).compile()`)."""
    transformation = optimizer_lib.make(config, model)
    parts = accumulation(config, mesh)

    def init(key: jax.Array) -> State:
        params = model.init(key)
        zero = jnp.zeros((), jnp.int32)
        return {"step": zero, "params": params, "opt_state": transformation.init(params), "skipped": zero}

    def train(state: State, batch: DeviceBatch) -> tuple[State, Metrics]:
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


def compile_call(call: Callable, model: Model, mesh: jax.sharding.Mesh) -> jax.stages.Wrapped:
    """Jits `call(params, batch)` for a mesh: parameters and batch are sharded, the result is replicated."""
    params = mesh_lib.shardings(model.axes, model.shapes, mesh)
    return jax.jit(
        call,
        in_shardings=(params, mesh_lib.batch_sharding(mesh)),
        out_shardings=mesh_lib.replicated(mesh),
        compiler_options=_compiler_options(mesh),
    )


def _compiler_options(mesh: jax.sharding.Mesh) -> dict | None:
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].platform)


def _with_shardings(state: State, model: Model, mesh: jax.sharding.Mesh) -> State:
    """Adds shardings to the abstract state: what the optimizer keeps of a parameter is sharded like the parameter."""
    axes = dict(jax.tree_util.tree_leaves_with_path(model.axes, is_leaf=lambda axes: isinstance(axes, tuple)))

    def sharding(path, leaf):
        # The path of a leaf of the optimizer's state ends with the path of its parameter. A mean over an axis keeps the
        # axis, with size 1.
        ends = (path[first:] for first in range(len(path)))
        names = next((axes[end] for end in ends if end in axes), ())
        return jax.sharding.NamedSharding(mesh, mesh_lib.partition_spec(names, leaf.shape, mesh))

    return mesh_lib.with_shardings(state, jax.tree_util.tree_map_with_path(sharding, state))


def _train_step(
    state: State,
    batch: DeviceBatch,
    *,
    config: Config,
    model: Model,
    transformation: optax.GradientTransformationExtraArgs,
    parts: int,
) -> tuple[State, Metrics]:
    params = state["params"]
    count = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
    (loss, terms), grads = _accumulate(params, batch, count, model=model, parts=parts)
    grad_norm = optax.tree.norm(grads)
    updates, opt_state = transformation.update(grads, state["opt_state"], params, step=state["step"])
    updated = optax.apply_updates(params, updates)
    # An update that is not finite is not applied, so the state that is saved is always good. The updated parameters are
    # checked too: a finite gradient may still overflow them, and the loss would show that one step too late.
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(optax.tree.norm(updated))

    def if_good(new, old):
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

    after = {
        "step": state["step"] + 1,
        "params": if_good(updated, params),
        "opt_state": if_good(opt_state, state["opt_state"]),
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


def _accumulate(params: Any, batch: DeviceBatch, count: jax.Array, *, model: Model, parts: int) -> tuple[Any, Any]:
    """Returns ((loss, its terms by name), gradient) of sum(objective) / count, summed over `parts` parts of the rows.

    `count` is the number of valid tokens of the whole batch. Dividing by it makes the result independent of the number
    of parts, of the mesh, and of how the valid tokens are distributed over the rows; a mean of means would not be.
    """

    def loss(params, batch):
        total_BT, terms = model.objective(params, batch, share)
        return jnp.sum(total_BT) / count, {name: jnp.sum(term_BT) / count for name, term_BT in terms.items()}

    share = count / batch["weights"].size
    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if parts == 1:
        return value_and_grad(params, batch)

    # Row r belongs to part r % parts, so that every device keeps its own rows and nothing moves between devices.
    split_ABT = {name: x.reshape(-1, parts, x.shape[-1]).swapaxes(0, 1) for name, x in batch.items()}

    def add_part(total, batch):
        return jax.tree.map(jnp.add, total, value_and_grad(params, batch)), None

    first = {name: x[0] for name, x in split_ABT.items()}
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(value_and_grad, params, first))
    return jax.lax.scan(add_part, zero, split_ABT)[0]
