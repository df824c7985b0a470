"""Optimizers: the learning rate, and what every optimizer has around its direction."""

from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Int

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
    """AdamW: `chained` with Adam's direction."""
    return chained(config, adam(config), updates=updates)


def chained(
    config: OptimizerConfig, direction: optax.GradientTransformation, *, updates: int
) -> optax.GradientTransformation:
    """Returns the optimizer that moves by the `learning_rate`, in a run of `updates` updates, times a direction.

    Gradients are clipped by their global norm before; weight decay is added to the direction, as AdamW does
    (Loshchilov & Hutter 2019). Matrices decay, with tables, heads and adapters; norms and biases do not, as in
    transformers' Trainer. direction: such as `optax.scale_by_adam`; its state is the first part of the second part.
    """
    clip = optax.identity() if config.max_grad_norm is None else optax.clip_by_global_norm(config.max_grad_norm)
    decay = optax.add_decayed_weights(config.weight_decay, matrices)
    rate = optax.scale_by_learning_rate(learning_rate(config, updates=updates))
    return optax.chain(clip, optax.chain(direction, decay, rate))  # nested as optax.adamw, for states of earlier runs


def updates_of(opt_state: Any) -> Int[Array, ""]:
    """Returns the number of updates that an optimizer of `chained` has applied: that of its schedule."""
    return opt_state[1][-1].count


def adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Adam's direction."""
    return optax.scale_by_adam(config.b1, config.b2, config.eps)
