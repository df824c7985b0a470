"""Preflight: opens everything a run needs later (reward functions, tokenizers, adapters), so that typos fail early."""

from functools import partial
from typing import Literal

from jax.sharding import Mesh

from jrlhf.config.schema import Config, RewardConfig
from jrlhf.data.task import Task
from jrlhf.errors import UserError
from jrlhf.models import ModelConfig
from jrlhf.rewards.functions import FunctionReward
from jrlhf.rewards.text_model import reward_tokenizer
from jrlhf.roles.pretrained import actor_adapter, check_weights, reward_adapter
from jrlhf.run.processes import from_main
from jrlhf.run.tracking import check_wandb


def check_sources(config: Config, task: Task, actor: ModelConfig, mesh: Mesh) -> None:
    """Reads every model's headers and all adapters, and imports every reward function once. Loads no weights."""
    from_main(partial(check_wandb, config))
    if config.model.path is not None:
        check_weights(config.model.path, "model.path")
    if config.lora is not None:
        actor_adapter(config.lora, actor, mesh)
    if config.algorithm is not None and config.roles.critic is not None:
        check_weights(config.roles.critic, "roles.critic", head="scalar")
    if config.roles.reference is not None and (config.algorithm is not None or "dpo" in config.stages):
        check_weights(config.roles.reference, "roles.reference")
    if config.algorithm is None:
        return
    keys = {f"rewards[{index}]": reward for index, reward in enumerate(config.rewards)}
    keys |= {f"costs[{index}]": cost for index, cost in enumerate(config.costs)}
    for key, reward in keys.items():
        if reward.model is not None:
            _check_reward_model(reward.model, f"{key}.model")
        elif reward.adapter is not None:
            reward_adapter(config, reward.adapter, f"{key}.adapter", actor, mesh)
        elif reward.function is not None:
            kind = "cost" if key.startswith("costs") else "reward"
            from_main(partial(_check_function, reward, config.seed, kind, task))


def _check_function(reward: RewardConfig, seed: int, kind: Literal["reward", "cost"], task: Task) -> None:
    with FunctionReward(reward, seed, kind=kind) as function:
        if task.prompts is not None:
            function.check_columns(task.prompts.examples[0].columns)


def _check_reward_model(path: str, key: str) -> None:
    checkpoint = check_weights(path, key, head="scalar")
    if checkpoint.head != "scalar":
        raise UserError(
            f"{key}={path} is a language model, which has no head to score with: name a sequence classifier with one "
            "label, such as the reward_model/ of a run"
        )
    reward_tokenizer(path, key, checkpoint.model)
