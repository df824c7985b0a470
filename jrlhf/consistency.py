"""What the sections of a config demand of each other, of the models and of the devices."""

import math
from collections.abc import Mapping, Sequence

from jrlhf.config import Config, MeshConfig
from jrlhf.errors import UserError
from jrlhf.models.config import ModelConfig
from jrlhf.strict import Section


def mesh_sizes(mesh: MeshConfig, device_count: int) -> tuple[int, int, int]:
    """The sizes of (data, fsdp, tensor) on so many devices, -1 resolved.

    Raises:
        UserError: their product is not the number of devices.
    """
    sizes = [mesh.data, mesh.fsdp, mesh.tensor]
    written = f"mesh data={mesh.data}, fsdp={mesh.fsdp}, tensor={mesh.tensor}"
    if sizes.count(-1) > 1:
        raise UserError(f"{written}: only one axis may be -1, give the others a size")
    known = math.prod(size for size in sizes if size != -1)
    wrong = device_count % known if -1 in sizes else device_count - known
    if wrong:
        divisors = ", ".join(map(str, _divisors(device_count)))
        raise UserError(
            f"{written} does not fit {device_count} device(s): choose sizes whose product is {device_count} "
            f"(its divisors are {divisors}), or set device.simulated={known} to simulate that many on the CPU"
        )
    data, fsdp, tensor = (device_count // known if size == -1 else size for size in sizes)
    return data, fsdp, tensor


def validate(config: Config, device_count: int, models: Mapping[str, ModelConfig]) -> None:
    """Checks what no section can check alone, before anything is compiled or written.

    models: role -> architecture, of the roles that the stages need.

    Raises:
        UserError: the first violation, with its remedy.
    """
    _check_stages(config)
    _check_data(config)
    _check_used(config)
    _check_profile(config)
    data, fsdp, tensor = mesh_sizes(config.mesh, device_count)
    for role, model in models.items():
        _check_model(config, role, model, fsdp, tensor, device_count)
    _check_batches(config, data * fsdp * tensor)
    _check_shared_passes(config)
    _check_sampling(config, models["actor"])


def _check_stages(config: Config) -> None:
    stages = config.stages
    if not stages:
        raise UserError("stages=[]: name at least one of sft, reward_model, ppo")
    repeated = [stage for stage in stages if stages.count(stage) > 1]
    if repeated:
        raise UserError(f"stages={_list(stages)}: {repeated[0]} is named more than once, keep one")
    if list(stages) != sorted(stages, key=("sft", "reward_model", "ppo").index):
        raise UserError(
            f"stages={_list(stages)}: each starts from the result of those before it, write them in the order sft, "
            "reward_model, ppo"
        )
    if config.model.path is None and stages[0] != "sft":
        raise UserError(
            f"stages={_list(stages)}: {stages[0]} would start from random weights, name sft before it or give "
            "model.path"
        )
    if "ppo" in stages and "reward_model" not in stages and not config.rewards:
        raise UserError(
            f"stages={_list(stages)}: ppo has nothing to optimise, name reward_model before it or give rewards"
        )
    names = [reward.name for reward in config.rewards]
    for index, reward in enumerate(config.rewards):
        if sum(each is not None for each in (reward.model, reward.adapter, reward.function)) != 1:
            raise UserError(f"rewards[{index}] ({reward.name}) must be a model, an adapter or a function: give one")
        if names.count(reward.name) > 1 or reward.name == "reward_model":
            whose = "" if names.count(reward.name) > 1 else " by the stage"
            raise UserError(f"rewards[{index}].name={reward.name} is taken{whose}: it names metrics, choose another")


def _check_data(config: Config) -> None:
    data = config.data
    if data.source == "docstrings":
        for key in ("sft", "preferences", "prompts", "heldout"):
            path = getattr(data, key).path
            if path is not None:
                raise UserError(f"data.{key}.path={path} is not read by the built-in task: set data.source=datasets")
        if config.model.path is not None:
            raise UserError(
                f"model.path={config.model.path}: the built-in task trains a tokenizer and a model of its own, set "
                "data.source=datasets and name your data"
            )
    elif config.model.path is None:
        raise UserError("data.source=datasets needs a tokenizer: give model.path, the directory of a model")


def _check_used(config: Config) -> None:
    """A setting that has no effect is a mistake, and is not taken in silence."""
    data, lora, evaluation = config.data, config.lora, config.evaluation
    cases: list[tuple[bool, str, Section, tuple[str, ...], str]] = [
        (
            data.source == "docstrings",
            "data",
            data,
            ("chat", "system", "template", "eos", "overlong"),
            "the built-in task",
        ),
        (
            data.source == "datasets",
            "reward_model",
            config.reward_model,
            ("prompts", "samples_per_prompt", "foreign_lines", "margin", "heldout_prompts", "label_flip"),
            "data.source=datasets",
        ),
        (data.source == "datasets", "sft", config.sft, ("renaming",), "data.source=datasets"),
        (not lora.on, "lora", lora, ("alpha", "rslora", "targets", "base", "critic"), "a run without lora.rank"),
        (lora.path is not None, "lora", lora, ("alpha", "rslora", "targets"), "lora.path, whose adapter has its own"),
        (evaluation.every is None, "evaluation", evaluation, ("k", "temperature"), "a run without evaluation.every"),
    ]
    for applies, where, section, names, reason in cases:
        plain = type(section)()
        for name in names if applies else ():
            if getattr(section, name) != getattr(plain, name):
                raise UserError(f"{where}.{name}={getattr(section, name)} has no effect with {reason}: leave it out")
    if evaluation.every is not None and evaluation.k > 1 and evaluation.temperature == 0:
        raise UserError(f"evaluation.k={evaluation.k} answers of temperature 0 are all the same: set one of them")
    if evaluation.every is not None and data.source == "datasets" and not data.heldout_rows and not data.heldout.path:
        raise UserError(
            f"evaluation.every={evaluation.every} has no prompts to validate on: raise data.heldout_rows, or give "
            "data.heldout.path"
        )


def _check_profile(config: Config) -> None:
    profile = config.profile
    if not profile.iterations:
        return
    if profile.stage not in config.stages:
        raise UserError(
            f"profile.stage={profile.stage} is not among stages={_list(config.stages)}: name one that the run has"
        )
    steps = {"sft": config.sft.steps, "reward_model": config.reward_model.steps, "ppo": config.ppo.iterations}
    beyond = [each for each in profile.iterations if each > steps[profile.stage]]
    if beyond:
        raise UserError(
            f"profile.iterations has {beyond[0]}, but {profile.stage} ends after {steps[profile.stage]}: choose "
            "earlier ones"
        )


def _check_model(config: Config, role: str, model: ModelConfig, fsdp: int, tensor: int, device_count: int) -> None:
    data = config.data
    where = "model" if role == "actor" else f"the {role}"
    if data.max_prompt + data.max_response > model.max_positions and not role.startswith("reward "):
        raise UserError(
            f"data.max_prompt={data.max_prompt} and data.max_response={data.max_response} need "
            f"{data.max_prompt + data.max_response} positions, and {where} has max_positions={model.max_positions}: "
            "lower them, or choose a model with more"
        )
    kv_heads = tensor if model.kv_heads < tensor else model.kv_heads  # fewer kv-heads than slices are repeated
    for key, written, size, axis, parts in (
        ("embed", model.embed, model.embed, "fsdp", fsdp),
        ("heads", model.heads, model.heads, "tensor", tensor),
        ("kv_heads", model.kv_heads, kv_heads, "tensor", tensor),
        ("mlp", model.mlp, model.mlp, "tensor", tensor),
        ("vocab_size", model.vocab_size, model.padded_vocab, "tensor", tensor),
    ):
        if size % parts:
            choices = ", ".join(str(divisor) for divisor in _divisors(size) if divisor <= device_count)
            raise UserError(
                f"{where}.{key}={written} does not divide over mesh.{axis}={parts}: "
                f"choose another model, or mesh.{axis} from {choices}"
            )


def _check_batches(config: Config, devices: int) -> None:
    sft, reward, ppo = config.sft, config.reward_model, config.ppo
    for stage, key, rows, minibatches, micro_batches in (
        ("sft", "sft.batch", sft.batch, 1, sft.micro_batches),
        ("reward_model", "reward_model.batch", reward.batch, 1, reward.micro_batches),
        # The last one whatever the stages: texts are also sampled and scored by so many.
        (None, "ppo.rollout_batch", ppo.rollout_batch, ppo.algorithm.minibatches, ppo.algorithm.micro_batches),
    ):
        divisor = devices * minibatches * micro_batches
        if (stage is None or stage in config.stages) and rows % divisor:
            below = rows // divisor * divisor
            choices = " or ".join(str(size) for size in (below, below + divisor) if size)
            parts = f"{devices} device(s)"
            parts += f" x {minibatches} minibatches" if stage is None else ""
            parts += f" x {micro_batches} micro-batches" if stage is None or micro_batches > 1 else ""
            raise UserError(
                f"{key}={rows} does not divide over {parts}: choose a multiple of {divisor}, such as {choices}"
            )
    if config.rollout.slots is not None and config.rollout.slots % devices:
        raise UserError(
            f"rollout.slots={config.rollout.slots} does not divide over {devices} device(s): choose a multiple of "
            f"{devices}, or null for all rows at a time"
        )


def _check_shared_passes(config: Config) -> None:
    if not config.compute.shared_passes:
        return
    algorithm = config.ppo.algorithm
    for name, single in (("epochs", 1), ("minibatches", 1), ("micro_batches", 1), ("micro_batch_tokens", None)):
        if getattr(algorithm, name) != single:
            raise UserError(
                f"compute.shared_passes needs a single update on the whole batch, and not ppo.algorithm.{name}="
                f"{getattr(algorithm, name)}: set that to {'null' if single is None else single}, or this to false"
            )
    if config.compute.score_tokens is not None:
        raise UserError(
            f"compute.shared_passes reads a batch as a whole, which compute.score_tokens={config.compute.score_tokens} "
            "would divide: leave one of them out"
        )
    if config.lora.on:
        raise UserError("compute.shared_passes is for models that are trained whole, not lora: set it to false")


def _check_sampling(config: Config, actor: ModelConfig) -> None:
    ppo = config.ppo  # whatever the stages: a policy is also looked at when PPO does not train it
    if ppo.algorithm.kl_target is not None and ppo.rollout_batch >= 5 * ppo.algorithm.kl_horizon:
        raise UserError(
            f"ppo.algorithm.kl_horizon={ppo.algorithm.kl_horizon:g} must exceed a fifth of "
            f"ppo.rollout_batch={ppo.rollout_batch}: the KL coefficient could turn negative, raise the horizon"
        )
    if ppo.min_new_tokens > config.data.max_response:
        raise UserError(
            f"ppo.min_new_tokens={ppo.min_new_tokens} exceeds data.max_response={config.data.max_response}: lower it"
        )
    if ppo.top_k is not None and ppo.top_k > actor.vocab_size:
        raise UserError(f"ppo.top_k={ppo.top_k} exceeds the vocabulary of {actor.vocab_size}: lower it, or null")
    buffer = ppo.scores.overlong_buffer
    if buffer is not None and buffer > config.data.max_response:
        raise UserError(
            f"ppo.scores.overlong_buffer={buffer} exceeds data.max_response={config.data.max_response}: lower it"
        )


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _list(items: Sequence[str]) -> str:
    return f"[{', '.join(items)}]"
