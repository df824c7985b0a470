"""Optimizers: AdamW under a clipped global norm, with a warm-up and a decay."""

import optax

from jrlhf.config.stages import OptimizerConfig


def adamw(config: OptimizerConfig, *, updates: int) -> optax.GradientTransformation:
    """AdamW for a run of so many updates.

    The rate rises linearly over `config.warmup` updates, then falls by a cosine to `config.final` of itself.
    """
    warmup, fall_updates = config.duration(updates)
    rise = optax.linear_schedule(config.learning_rate / max(warmup, 1), config.learning_rate, max(warmup - 1, 1))
    fall = optax.constant_schedule(config.learning_rate)
    if fall_updates is not None:
        fall = optax.cosine_decay_schedule(config.learning_rate, fall_updates, alpha=config.final)
    schedule = optax.join_schedules([rise, fall], [warmup])
    clip = optax.identity() if config.max_grad_norm is None else optax.clip_by_global_norm(config.max_grad_norm)
    adam = optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay)
    return optax.chain(clip, adam)
