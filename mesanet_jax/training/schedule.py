"""What changes over a run, each as a function of the trainer's step (from 0), so that a skipped update shifts nothing."""

from collections.abc import Callable

import jax.numpy as jnp
import optax


def learning_rate(config, *, peak: float | None = None) -> optax.Schedule:
    """The learning rate of the parameters whose peak is `peak`, that of the run unless given."""
    return SCHEDULES[config.optimizer.schedule](config, config.optimizer.learning_rate if peak is None else peak)


def _cosine(config, peak: float) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine to `final_ratio` of it at the last step (MesaNet, appendix G)."""
    optimizer = config.optimizer
    return optax.warmup_cosine_decay_schedule(
        init_value=min(optimizer.warmup_from, peak),
        peak_value=peak,
        warmup_steps=optimizer.warmup_steps,
        decay_steps=config.steps,
        end_value=peak * optimizer.final_ratio,
    )


def _warmdown(config, peak: float) -> optax.Schedule:
    """Linear warm-up to the peak, constant, then linear to `final_ratio` of it at the last step (nanochat)."""
    optimizer = config.optimizer
    first = min(optimizer.warmup_from, peak)
    return _linear(
        (0, first), (optimizer.warmup_steps, peak), (warmdown_start(config), peak),
        (config.steps, peak * optimizer.final_ratio),
    )  # fmt: skip


SCHEDULES: dict[str, Callable] = {"cosine": _cosine, "warmdown": _warmdown}


def warmdown_start(config) -> int:
    """The step at which the last `warmdown_ratio` of the run begins."""
    return config.steps - round(config.optimizer.warmdown_ratio * config.steps)


def muon_momentum(config) -> optax.Schedule:
    """Muon's momentum: linear from `momentum_start` to `momentum`, and to `momentum_final` in the warm-down (nanochat)."""
    muon, start = config.optimizer.muon, warmdown_start(config)
    held = lambda value: muon.momentum if value is None else value
    return _linear(
        (0, held(muon.momentum_start)), (min(muon.momentum_warmup_steps, start), muon.momentum),
        (start, muon.momentum), (config.steps, held(muon.momentum_final)),
    )  # fmt: skip


def muon_weight_decay(config) -> optax.Schedule:
    """Muon's weight decay, constant or falling to zero at the last step by a cosine (nanochat)."""
    muon = config.optimizer.muon
    if muon.weight_decay_schedule == "constant":
        return optax.constant_schedule(muon.weight_decay)
    return optax.cosine_decay_schedule(muon.weight_decay, decay_steps=config.steps)


def _linear(*points: tuple[int, float]) -> optax.Schedule:
    """Straight lines between (step, value) points in the order of their steps."""
    steps, values = (jnp.array(column, jnp.float32) for column in zip(*points, strict=True))
    return lambda step: jnp.interp(step, steps, values)
