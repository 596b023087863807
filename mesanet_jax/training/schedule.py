"""Schedules: the learning rate, and Muon's momentum and weight decay, as functions of the training step.

Steps count from 0. Schedules take the trainer's step and do not count updates, so a skipped update shifts nothing.
"""

from collections.abc import Callable

import jax.numpy as jnp
import optax

from mesanet_jax.schema import Config


def learning_rate(config: Config, *, peak: float | None = None) -> optax.Schedule:
    """Returns the learning rate of `config.optimizer.schedule` with the given peak (default: that of the config)."""
    return SCHEDULES[config.optimizer.schedule](config, config.optimizer.learning_rate if peak is None else peak)


def _cosine(config: Config, peak: float) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine to `final_ratio` * peak at the last step (MesaNet, appendix G)."""
    optimizer = config.optimizer
    return optax.warmup_cosine_decay_schedule(
        init_value=min(optimizer.warmup_from, peak),
        peak_value=peak,
        warmup_steps=optimizer.warmup_steps,
        decay_steps=config.steps,
        end_value=peak * optimizer.final_ratio,
    )


def _warmdown(config: Config, peak: float) -> optax.Schedule:
    """Linear warm-up to the peak, constant, then linear to `final_ratio` * peak at the last step (nanochat)."""
    optimizer = config.optimizer
    return _linear(
        (0, min(optimizer.warmup_from, peak)),
        (optimizer.warmup_steps, peak),
        (warmdown_start(config), peak),
        (config.steps, peak * optimizer.final_ratio),
    )


SCHEDULES: dict[str, Callable[[Config, float], optax.Schedule]] = {"cosine": _cosine, "warmdown": _warmdown}


def warmdown_start(config: Config) -> int:
    """Returns the first step of the warm-down, which is the last `warmdown_ratio` of the run."""
    return config.steps - round(config.optimizer.warmdown_ratio * config.steps)


def muon_momentum(config: Config) -> optax.Schedule:
    """Returns Muon's momentum (nanochat).

    It rises linearly from `momentum_start` to `momentum`, and goes linearly to `momentum_final` in the warm-down.
    """
    muon, start = config.optimizer.muon, warmdown_start(config)
    first = muon.momentum if muon.momentum_start is None else muon.momentum_start
    last = muon.momentum if muon.momentum_final is None else muon.momentum_final
    return _linear(
        (0, first),
        (min(muon.momentum_warmup_steps, start), muon.momentum),
        (start, muon.momentum),
        (config.steps, last),
    )


def muon_weight_decay(config: Config) -> optax.Schedule:
    """Returns Muon's weight decay: constant, or a cosine that falls to zero at the last step (nanochat)."""
    muon = config.optimizer.muon
    if muon.weight_decay_schedule == "constant":
        return optax.constant_schedule(muon.weight_decay)
    return optax.cosine_decay_schedule(muon.weight_decay, decay_steps=config.steps)


def _linear(*points: tuple[int, float]) -> optax.Schedule:
    """Interpolates linearly between (step, value) points, which are sorted by step."""
    steps, values = (jnp.array(column, jnp.float32) for column in zip(*points, strict=True))
    return lambda step: jnp.interp(step, steps, values)
