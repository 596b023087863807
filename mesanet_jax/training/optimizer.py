"""The update rules: AdamW, or Muon for matrices and AdamW in groups for the other parameters."""

from typing import Any

import jax
import optax

from mesanet_jax.errors import UserError
from mesanet_jax.models import Model
from mesanet_jax.schema import Config, Field
from mesanet_jax.training import muon, schedule


def _group(what: str) -> Field:
    settings = "learning rate, b1, b2 and weight decay, as in 0.3,0.8,0.995,0.001; empty: the settings in optimizer.*"
    return Field((), f"with name=muon, the AdamW settings of {what}: {settings}", fixed=True)


# A group contains the parameters that have its name in their path.
GROUPS = {
    "embedding": _group("the token embedding"),
    "head": _group("an untied output head"),
    "value_embedding": _group("the value embeddings"),
    "residual_scale": _group("the scales of the residual stream"),
    "embedding_scale": _group("the scales of the embedding that is added in every block"),
    "smear": _group("the share of the previous token's embedding"),
    "backout": _group("the share of the middle of the residual stream that is subtracted at the end"),
}


def make(config: Config, model: Model) -> optax.GradientTransformationExtraArgs:
    """Builds the transformation from gradients to what is added to the parameters.

    Call `update(grads, state, params, step=step)`. The schedules take the trainer's step, from 0, and do not count
    updates, because a skipped update must not shift them.
    """
    optimizer = config.optimizer
    clip = optax.identity() if optimizer.clip_norm is None else optax.clip_by_global_norm(optimizer.clip_norm)
    if optimizer.name == "adamw":
        return optax.chain(clip, *_adamw(config))
    labels = groups(config, model)
    rules = {label: optax.chain(*_rule(config, model, labels, label)) for label in sorted(set(jax.tree.leaves(labels)))}
    return optax.chain(clip, optax.partition(rules, labels))


def groups(config: Config, model: Model) -> Any:
    """Labels each parameter with what updates it under Muon: "muon", a key of GROUPS, or "other".

    Muon takes the matrices of the blocks: every `kernel` with two axes, however many layers are stacked before them.
    The taps of a convolution are not a matrix, and neither are the blocks of a block-diagonal kernel, which has a third
    axis.
    """
    optimizer = config.optimizer

    def label(path, _, axes) -> str:
        names = [entry.key for entry in path]
        group = next((name for name in GROUPS if name in names), None)
        if group is not None:
            return group if optimizer.groups[group] else "other"
        matrix = names[-1] == "kernel" and len(axes) == 2 and not set(names) & set(optimizer.muon.excluded)
        return "muon" if matrix else "other"

    return jax.tree_util.tree_map_with_path(label, model.shapes, model.axes)


def _rule(config: Config, model: Model, labels: Any, label: str) -> tuple[optax.GradientTransformation, ...]:
    """The transformations of one group."""
    if label == "muon":
        return _muon(config, axes=_only(label, labels, model.axes))
    return _adamw(config) if label == "other" else _adamw_group(config, *config.optimizer.groups[label])


def _only(label: str, labels: Any, tree: Any) -> Any:
    """Masks `tree` in the way `optax.partition` masks the trees that it gives to a group."""
    return jax.tree.map(lambda found, part: part if found == label else optax.MaskedNode(), labels, tree)


def _adamw(config: Config) -> tuple[optax.GradientTransformation, ...]:
    optimizer = config.optimizer
    return (
        optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps),
        optax.add_decayed_weights(optimizer.weight_decay, mask=lambda params: decayed(params, optimizer.no_decay)),
        _scale_by_rate(schedule.learning_rate(config)),
    )


def _adamw_group(
    config: Config, peak: float, b1: float, b2: float, weight_decay: float
) -> tuple[optax.GradientTransformation, ...]:
    return (
        optax.scale_by_adam(b1=b1, b2=b2, eps=config.optimizer.eps),
        optax.add_decayed_weights(weight_decay),
        _scale_by_rate(schedule.learning_rate(config, peak=peak)),
    )


def _muon(config: Config, *, axes: Any) -> tuple[optax.GradientTransformation, ...]:
    options = config.optimizer.muon
    return (
        muon.scale_by_muon(options, momentum=schedule.muon_momentum(config), axes=axes),
        muon.add_decayed_weights(schedule.muon_weight_decay(config), cautious=options.cautious),
        muon.scale_by_shape(),
        _scale_by_rate(schedule.learning_rate(config, peak=options.learning_rate)),
    )


def _scale_by_rate(rate: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Turns directions into updates: multiplies them by -rate(step)."""

    def update(directions, state, params=None, *, step, **_):
        return optax.tree.scale(-rate(step), directions), state  # pyright: ignore[reportOperatorIssue]

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def decayed(params: Any, no_decay: tuple[str, ...]) -> Any:
    """Marks the parameters that weight decay applies to: those without a name of `no_decay` in their path."""

    def applies(path, _) -> bool:
        return not {entry.key for entry in path} & set(no_decay)

    return jax.tree_util.tree_map_with_path(applies, params)


def check(config: Config) -> None:
    """Raises UserError for a warm-up that does not fit into the run, and for a group that is not four valid numbers."""
    optimizer = config.optimizer
    last = schedule.warmdown_start(config) if optimizer.schedule == "warmdown" else config.steps - 1
    if optimizer.warmup_steps > last:
        below = f"below config.steps={config.steps}"
        where = below if optimizer.schedule == "cosine" else f"at most {last}, where the warm-down begins"
        raise UserError(f"config.optimizer.warmup_steps={optimizer.warmup_steps}: must be {where}")
    for name, values in optimizer.groups.items():
        numbers = len(values) == 4 and all(type(value) in (int, float) and value >= 0 for value in values)
        if values and not (numbers and values[1] < 1 and values[2] < 1):
            raise UserError(
                f"config.optimizer.groups.{name}={values}: needs learning rate, b1, b2 (both below 1) and weight decay,"
                " as in 0.3,0.8,0.995,0.001"
            )
