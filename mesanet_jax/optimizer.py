"""The update rule, its learning-rate schedule and its weight-decay mask."""

import jax
import optax


def learning_rate(config) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine to `final_ratio` of it at the last step (MesaNet, appendix G)."""
    optimizer = config.optimizer
    return optax.warmup_cosine_decay_schedule(
        init_value=min(optimizer.warmup_from, optimizer.learning_rate),
        peak_value=optimizer.learning_rate,
        warmup_steps=optimizer.warmup_steps,
        decay_steps=config.steps,
        end_value=optimizer.learning_rate * optimizer.final_ratio,
    )


def make(config) -> optax.GradientTransformation:
    """Gradients to update directions; the caller multiplies by minus the learning rate of the step.

    The rate is applied outside, because it belongs to the step: a skipped update must not shift the schedule.
    """
    optimizer = config.optimizer
    return optax.chain(
        optax.identity() if optimizer.clip_norm is None else optax.clip_by_global_norm(optimizer.clip_norm),
        optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps),
        optax.add_decayed_weights(optimizer.weight_decay, mask=lambda params: decayed(params, optimizer.no_decay)),
    )


def decayed(params, no_decay: tuple[str, ...]):
    """True for each parameter that weight decay applies to: those with no component of their path in `no_decay`."""

    def applies(path, _) -> bool:
        return not {entry.key for entry in path} & set(no_decay)

    return jax.tree_util.tree_map_with_path(applies, params)
