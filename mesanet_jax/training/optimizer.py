"""The update rules: AdamW, and Muon for matrices with groups of AdamW for what is none."""

import jax
import optax

from mesanet_jax.errors import UserError
from mesanet_jax.models import Model
from mesanet_jax.schema import Field
from mesanet_jax.training import muon, schedule

_DOC = "with muon: learning rate, b1, b2, weight decay of {}; empty: as optimizer.* has them"
# A group takes the parameters that have its name in their path.
GROUPS = {
    "embedding": Field((), _DOC.format("the embedding"), fixed=True),
    "head": Field((), _DOC.format("an untied head"), fixed=True),
    "value_embedding": Field((), _DOC.format("value embeddings"), fixed=True),
    "residual_scale": Field((), _DOC.format("the scales of the residual stream"), fixed=True),
    "embedding_scale": Field((), _DOC.format("the scales of the embedding in every block"), fixed=True),
    "smear": Field((), _DOC.format("the share of the previous token's embedding"), fixed=True),
    "backout": Field((), _DOC.format("the share of the middle stream taken out at the end"), fixed=True),
}


def make(config, model: Model) -> optax.GradientTransformationExtraArgs:
    """Gradients to what is added to the parameters: `update(grads, state, params, step=step)`.

    Every schedule takes the trainer's step (from 0) and none counts updates, since a skipped one must not shift it.
    """
    optimizer = config.optimizer
    clip = optax.identity() if optimizer.clip_norm is None else optax.clip_by_global_norm(optimizer.clip_norm)
    if optimizer.name == "adamw":
        return optax.chain(clip, *_adamw(config))
    labels = groups(config, model)
    rules = {label: optax.chain(*_rule(config, model, labels, label)) for label in sorted(set(jax.tree.leaves(labels)))}
    return optax.chain(clip, optax.partition(rules, labels))


def groups(config, model: Model):
    """What updates each parameter under Muon: "muon", a name of GROUPS, or "other". A tree of the parameters.

    Muon takes the matrices of the blocks: each `kernel` of two axes, however many layers are stacked before them. A
    convolution's taps are no matrix, nor are blocks of a block-diagonal one, which have a third axis.
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


def _rule(config, model: Model, labels, label: str) -> tuple[optax.GradientTransformation, ...]:
    """The transformations of one group."""
    if label == "muon":
        return _muon(config, axes=_only(label, labels, model.axes))
    return _adamw(config) if label == "other" else _adamw_group(config, *config.optimizer.groups[label])


def _only(label: str, labels, tree):
    """`tree`, masked as `optax.partition` masks what it gives to a group."""
    return jax.tree.map(lambda found, part: part if found == label else optax.MaskedNode(), labels, tree)


def _adamw(config) -> tuple[optax.GradientTransformation, ...]:
    optimizer = config.optimizer
    return (
        optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps),
        optax.add_decayed_weights(optimizer.weight_decay, mask=lambda params: decayed(params, optimizer.no_decay)),
        _scale_by_rate(schedule.learning_rate(config)),
    )


def _adamw_group(
    config, peak: float, b1: float, b2: float, weight_decay: float
) -> tuple[optax.GradientTransformation, ...]:
    return (
        optax.scale_by_adam(b1=b1, b2=b2, eps=config.optimizer.eps),
        optax.add_decayed_weights(weight_decay),
        _scale_by_rate(schedule.learning_rate(config, peak=peak)),
    )


def _muon(config, *, axes) -> tuple[optax.GradientTransformation, ...]:
    options = config.optimizer.muon
    return (
        muon.scale_by_muon(options, momentum=schedule.muon_momentum(config), axes=axes),
        muon.add_decayed_weights(schedule.muon_weight_decay(config), cautious=options.cautious),
        muon.scale_by_shape(),
        _scale_by_rate(schedule.learning_rate(config, peak=options.learning_rate)),
    )


def _scale_by_rate(rate: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Directions to updates: times minus the rate of the trainer's `step=`."""

    def update(directions, state, params=None, *, step, **_):
        return optax.tree.scale(-rate(step), directions), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def decayed(params, no_decay: tuple[str, ...]):
    """True for each parameter that weight decay applies to: those with no component of their path in `no_decay`."""

    def applies(path, _) -> bool:
        return not {entry.key for entry in path} & set(no_decay)

    return jax.tree_util.tree_map_with_path(applies, params)


def check(config) -> None:
    """Raises UserError for a schedule that does not fit into the run, or a group that is not four numbers."""
    optimizer = config.optimizer
    last = schedule.warmdown_start(config) if optimizer.schedule == "warmdown" else config.steps - 1
    if optimizer.warmup_steps > last:
        limit = f"config.steps={config.steps}"
        where = f"below {limit}" if optimizer.schedule == "cosine" else f"at most {last}, where the warm-down begins"
        raise UserError(f"config.optimizer.warmup_steps={optimizer.warmup_steps}: must be {where}")
    for name, values in optimizer.groups.items():
        numbers = len(values) == 4 and all(type(value) in (int, float) and value >= 0 for value in values)
        if values and not (numbers and values[1] < 1 and values[2] < 1):
            raise UserError(
                f"config.optimizer.groups.{name}={values}: needs learning rate, b1, b2 (below 1), weight decay, as in 0.3,0.8,0.995,0.001"
            )
