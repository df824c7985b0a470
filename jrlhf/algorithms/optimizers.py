"""The optimizer that a section of the config names."""

import optax

from jrlhf.config.stages import OptimizerConfig
from jrlhf.roles.optimizers import adamw, chained


def make_optimizer(config: OptimizerConfig, key: str, *, updates: int) -> optax.GradientTransformation:
    """Returns the optimizer that a section names, for a run of `updates` updates.

    key: of the section, such as `ppo.actor`. Raises UserError for a function that makes no optimizer.
    """
    if config.optimizer == "adamw":
        return adamw(config, updates=updates)
    from jrlhf.algorithms.own_optimizers import direction_of

    return chained(config, direction_of(config, key), updates=updates)
