"""The optimizer of a trained model."""

import jax
import numpy as np
import optax
from jaxtyping import Float

from jrlhf.config.stages import OptimizerConfig
from jrlhf.models.params import matrices


def learning_rate(config: OptimizerConfig, *, updates: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of finished updates, for a run of `updates` updates.

    It rises linearly over `config.warmup` updates, then falls as `config.schedule` says to `config.final` times its
    maximum. wsd (warm-up, stable, decay): Hu et al. 2024, arXiv:2404.06395, section 4, with a linear decay.
    """
    most, (warmup, fall_updates) = config.learning_rate, config.duration(updates)
    rise, stable = optax.linear_schedule(most / max(warmup, 1), most, max(warmup - 1, 1)), optax.constant_schedule(most)
    if fall_updates is None:
        return optax.join_schedules([rise, stable], [warmup])
    fall = optax.linear_schedule(most, most * config.final, fall_updates)
    if config.schedule == "cosine":
        fall = optax.cosine_decay_schedule(most, fall_updates, alpha=config.final)
    return optax.join_schedules([rise, stable, fall], [warmup, max(updates - fall_updates, warmup)])


def learning_rates(config: OptimizerConfig, *, updates: int) -> Float[np.ndarray, "updates"]:
    """Returns the `learning_rate` of each update as a NumPy array."""
    return np.asarray(jax.vmap(learning_rate(config, updates=updates))(np.arange(updates)))


def adamw(config: OptimizerConfig, *, updates: int) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm, with the `learning_rate` of a run of `updates` updates.

    Matrices decay, with tables, heads and adapters; norms and biases do not, as in transformers' Trainer.
    """
    schedule = learning_rate(config, updates=updates)
    clip = optax.identity() if config.max_grad_norm is None else optax.clip_by_global_norm(config.max_grad_norm)
    decay = {"weight_decay": config.weight_decay, "mask": matrices}
    return optax.chain(clip, optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, **decay))
