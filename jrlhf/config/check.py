"""What the sections of a config demand of each other, of the models and of the devices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from jrlhf.config.schema import SLEEP_PARTS, ColumnsConfig, Config, MeshConfig
from jrlhf.config.stages import ALGORITHMS
from jrlhf.errors import UserError
from jrlhf.models.config import ModelConfig

# What stage dpo reads of section reward_model, and every run of section ppo where no algorithm trains the policy.
ANNOTATOR = ("prompts", "samples_per_prompt", "foreign_lines", "margin", "heldout_prompts", "label_flip")
DATASETS = ("sft", "preferences", "prompts", "heldout")
OF_DATASETS = ("split", *(f"columns.{each.name}" for each in fields(ColumnsConfig)))
SAMPLING = ("rollout_batch", "temperature", "top_k", "top_p", "min_new_tokens")


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
    _check_profile(config)
    _check_stages_read(config)
    _check_used(config)
    _check_evaluation(config)
    data, fsdp, tensor = mesh_sizes(config.mesh, device_count)
    for role, model in models.items():
        _check_model(config, role, model, fsdp, tensor, device_count)
    _check_batches(config, data * fsdp * tensor, data * fsdp)
    _check_algorithm(config)
    _check_shared_passes(config)
    _check_sampling(config, models["actor"])


def _check_stages(config: Config) -> None:
    stages = config.stages
    if not stages:
        raise UserError("stages=[]: name at least one of sft, reward_model, dpo or an algorithm, such as ppo")
    repeated = [stage for stage in stages if stages.count(stage) > 1]
    if repeated:
        raise UserError(f"stages={_list(stages)}: {repeated[0]} is named more than once, keep one")
    algorithms = [stage for stage in stages if stage == "dpo" or stage in ALGORITHMS]
    if len(algorithms) > 1:
        raise UserError(f"stages={_list(stages)}: a run has one algorithm, keep {' or '.join(algorithms)}")
    if "reward_model" in stages and "dpo" in stages:
        raise UserError(
            f"stages={_list(stages)}: dpo learns from the pairs themselves and uses no reward model, leave "
            "reward_model out, or name another algorithm"
        )
    order = ("sft", "dpo") if algorithms == ["dpo"] else ("sft", "reward_model", *(algorithms or ["ppo"]))
    if list(stages) != sorted(stages, key=order.index):
        raise UserError(
            f"stages={_list(stages)}: each starts from the result of those before it, write them in the order "
            f"{', '.join(order)}"
        )
    if config.model.path is None and stages[0] != "sft":
        raise UserError(
            f"stages={_list(stages)}: {stages[0]} would start from random weights, name sft before it or give "
            "model.path"
        )
    if algorithms not in ([], ["dpo"]) and "reward_model" not in stages and not config.rewards:
        raise UserError(
            f"stages={_list(stages)}: {algorithms[0]} has nothing to optimise, name reward_model before it or give "
            "rewards"
        )
    if "dpo" in stages and config.rewards:
        raise UserError(
            f"rewards have no effect with stages={_list(stages)}: leave them out, or name an algorithm, such as ppo"
        )
    if config.algorithm == "safe_rlhf" and not config.costs:
        raise UserError("stage safe_rlhf has nothing to keep below safe_rlhf.algorithm.cost_limit: give costs")
    if config.algorithm not in ("safe_rlhf", None) and config.costs:
        raise UserError("costs have no effect without stage safe_rlhf: leave them out, or make them rewards")
    for section in ("rewards", "costs"):
        parts = getattr(config, section)
        names = [part.name for part in parts]
        for index, part in enumerate(parts):
            if sum(each is not None for each in (part.model, part.adapter, part.function)) != 1:
                raise UserError(f"{section}[{index}] ({part.name}) must be a model, an adapter or a function: give one")
            if names.count(part.name) > 1 or part.name == "reward_model":
                whose = "" if names.count(part.name) > 1 else " by the stage"
                raise UserError(
                    f"{section}[{index}].name={part.name} is taken{whose}: it names metrics, choose another"
                )


def _check_data(config: Config) -> None:
    data = config.data
    if data.source != "datasets":
        for key in DATASETS:
            path = getattr(data, key).path
            if path is not None:
                raise UserError(f"data.{key}.path={path} is not read by the built-in task: set data.source=datasets")
        if config.model.path is not None:
            raise UserError(
                f"model.path={config.model.path}: the built-in task trains a tokenizer and a model of its own, set "
                "data.source=datasets and name your data"
            )
        unpaired = [stage for stage in config.stages if stage in ("reward_model", "dpo")]
        if data.source == "arithmetic" and unpaired:
            raise UserError(
                f"data.source=arithmetic has no preferences for stage {unpaired[0]}: leave it out, and give rewards to "
                "an algorithm such as grpo"
            )
    elif config.model.path is None:
        raise UserError("data.source=datasets needs a tokenizer: give model.path, the directory of a model")


def _check_stages_read(config: Config) -> None:
    """A section of an algorithm that does not run, where another does, is a mistake, but for what that one reads of it.

    A run that is narrowed to its first stages may keep the sections of the others.
    """
    learns = "dpo" if "dpo" in config.stages else config.algorithm
    if learns is None:
        return
    for stage in ("dpo", *ALGORITHMS):
        if stage == learns:
            continue
        reads = SAMPLING if (stage, learns) == ("ppo", "dpo") else ()
        for key, value in _changed(getattr(config, stage), getattr(Config(), stage)):
            if key not in reads:
                what = f"{stage}.{key}={value}" if reads else f"section {stage}"
                raise UserError(f"{what} has no effect with stages={_list(config.stages)}: leave it out")


def _check_used(config: Config) -> None:
    """A setting that has no effect is a mistake, and is not taken in silence."""
    data, lora, evaluation, roles = config.data, config.lora, config.evaluation, config.roles
    compute, sleep = config.compute, config.sleep
    name, algorithm, scores = config.algorithm, config.rl.algorithm, config.rl.scores
    stages, policy = f"stages={_list(config.stages)}", f"{name or 'ppo'}.algorithm"
    critic, trained = algorithm.has_critic, f"{name}, which has none"
    weighed = algorithm.importance is not None or algorithm.old_logprobs == "rollout"
    unweighed = f"{policy}.importance=null and old_logprobs=recompute"
    complete = name is not None or "dpo" in config.stages  # others may keep the data of stages after theirs
    pairs = {"reward_model", "dpo"} & set(config.stages)
    cases: list[tuple[bool, str, object, tuple[str, ...], str]] = [
        (
            data.source != "datasets",
            "data",
            data,
            ("chat", "system", "template", "eos", "overlong"),
            "the built-in task",
        ),
        (data.source == "docstrings", "data", data, ("heldout_rows",), "data.source=docstrings"),
        (complete and "sft" not in config.stages and not algorithm.ptx_coef, "data", data, ("sft.path",), stages),
        (complete and not pairs, "data", data, ("preferences.path",), stages),
        (complete and name is None, "data", data, ("prompts.path", "heldout.path"), stages),
        (data.source != "docstrings", "reward_model", config.reward_model, ANNOTATOR, f"data.source={data.source}"),
        (data.source != "docstrings", "sft", config.sft, ("renaming",), f"data.source={data.source}"),
        (
            data.source != "arithmetic",
            "arithmetic",
            config.arithmetic,
            tuple(each.name for each in fields(config.arithmetic)),
            f"data.source={data.source}",
        ),
        (not lora.on, "lora", lora, ("alpha", "rslora", "targets", "base", "critic"), "a run without lora.rank"),
        (lora.path is not None, "lora", lora, ("alpha", "rslora", "targets"), "lora.path, whose adapter has its own"),
        (
            config.model.path is None,
            "lora",
            lora,
            ("critic",),
            "fresh weights, which have no model.path for a critic of its own",
        ),
        (evaluation.every is None, "evaluation", evaluation, ("k", "temperature"), "a run without evaluation.every"),
        (config.wandb.project is None, "wandb", config.wandb, ("entity", "group", "mode"), "wandb.project=null"),
        (name is None, "reward_model", config.reward_model, ("weight",), stages),
        (name is None, "evaluation", evaluation, ("every",), stages),
        (name is None, "compute", compute, ("shared_passes", "fused_loss"), stages),
        (algorithm.ratio != "token", "compute", compute, ("fused_loss",), f"{policy}.ratio={algorithm.ratio}"),
        (compute.shared_passes, "compute", compute, ("fused_loss",), "compute.shared_passes"),
        (
            name is None and data.source == "datasets",
            "rollout",
            config.rollout,
            tuple(each.name for each in fields(config.rollout)),
            f"{stages}, which sample nothing",
        ),
        (not config.profile.iterations, "profile", config.profile, ("stage",), "profile.iterations=[]"),
        (name is None, "roles", roles, ("critic",), stages),
        (name is None, "lora", lora, ("critic",), stages),
        (name is None and "dpo" not in config.stages, "roles", roles, ("reference",), stages),
        (name is not None and not critic, "roles", roles, ("critic",), trained),
        (name is not None and not critic, "lora", lora, ("critic",), trained),
        (
            name is not None and not algorithm.needs_reference,
            "roles",
            roles,
            ("reference",),
            f"{policy}.kl_coef=0",
        ),
        (name is None, "sleep", sleep, SLEEP_PARTS, stages),
        (name is not None and not critic, "sleep", sleep, ("critic",), trained),
        (
            config.reference_is_base,
            "sleep",
            sleep,
            ("reference",),
            "lora, whose base is the reference",
        ),
        (not _has_reward_models(config), "sleep", sleep, ("reward",), "rewards that are all functions"),
        (all(getattr(sleep, key) == "device" for key in SLEEP_PARTS), "sleep", sleep, ("ahead",), "nothing asleep"),
        (not algorithm.needs_reference, policy, algorithm, ("kl_in", "kl_estimator"), f"{policy}.kl_coef=0"),
        (algorithm.kl_target is None, policy, algorithm, ("kl_horizon",), f"{policy}.kl_target=null"),
        (not weighed, policy, algorithm, ("importance_cap",), unweighed),
        (
            scores.overlong_buffer is None,
            f"{name or 'ppo'}.scores",
            scores,
            ("overlong_penalty",),
            f"{name or 'ppo'}.scores.overlong_buffer=null",
        ),
        (
            # ReMax's baselines are scores of such responses, too; a dataflow of one's own may read them.
            algorithm.truncation == "mask" and name != "remax" and config.rl.dataflow is None,
            f"{name or 'ppo'}.scores",
            scores,
            ("missing_eos_penalty",),
            f"{policy}.truncation=mask, which leaves such responses out",
        ),
        *_unused_by_rewards(config),
        *(
            (each.path is None, f"data.{part}", each, OF_DATASETS, f"data.{part}.path=null")
            for part, each in ((part, getattr(data, part)) for part in DATASETS)
        ),
    ]
    if name is None and config.plan != Config.plan:
        raise UserError(f"plan={config.plan} has no effect with {stages}: leave it out")
    for applies, where, section, names, reason in cases:
        for key, value in _changed(section, type(section)()) if applies else ():
            if key in names:
                raise UserError(f"{where}.{key}={value} has no effect with {reason}: leave it out")


def _unused_by_rewards(config: Config) -> Iterator[tuple[bool, str, object, tuple[str, ...], str]]:
    """What a model, an adapter or a function does not read of its section."""
    functions = ("workers", "deadline", "options", "columns")
    unread = {"model": functions, "adapter": (*functions, "batch", "on_failure"), "function": ("batch",)}
    for section in ("rewards", "costs"):
        for index, part in enumerate(getattr(config, section)):
            where = f"{section}[{index}]"
            for kind, names in unread.items():
                yield getattr(part, kind) is not None, where, part, names, f"{where}.{kind}"


def _has_reward_models(config: Config) -> bool:
    parts = (*config.rewards, *config.costs)
    return "reward_model" in config.stages or any(part.function is None for part in parts)


def _changed(section: Any, plain: Any) -> Iterator[tuple[str, object]]:
    """(key, value) of what differs from the defaults; of a section within by its dotted key."""
    for each in fields(section):
        value, default = getattr(section, each.name), getattr(plain, each.name)
        if is_dataclass(value) and value != default:
            yield from ((f"{each.name}.{key}", inner) for key, inner in _changed(value, default))
        elif value != default:
            yield each.name, value


def _check_evaluation(config: Config) -> None:
    data, evaluation = config.data, config.evaluation
    if evaluation.every is None:
        return
    if evaluation.k > 1 and evaluation.temperature == 0:
        raise UserError(f"evaluation.k={evaluation.k} answers of temperature 0 are all the same: set one of them")
    if data.source != "docstrings" and not data.heldout_rows and not data.heldout.path:
        other = ", or give data.heldout.path" if data.source == "datasets" else ", or set it to null"
        raise UserError(
            f"evaluation.every={evaluation.every} has no prompts to validate on: raise data.heldout_rows{other}"
        )


def _check_profile(config: Config) -> None:
    profile = config.profile
    if not profile.iterations:
        return
    stage = profile.stage or config.stages[-1]
    if stage not in config.stages:
        raise UserError(f"profile.stage={stage} is not among stages={_list(config.stages)}: name one that the run has")
    section = getattr(config, stage)
    steps = section.iterations if stage in ALGORITHMS else section.steps
    beyond = [each for each in profile.iterations if each > steps]
    if beyond:
        raise UserError(f"profile.iterations has {beyond[0]}, but {stage} ends after {steps}: choose earlier ones")


def _check_model(config: Config, role: str, model: ModelConfig, fsdp: int, tensor: int, device_count: int) -> None:
    data = config.data
    where = "model" if role == "actor" else f"the {role}"
    if data.max_prompt + data.max_response > model.max_positions and not role.startswith("reward "):
        raise UserError(
            f"data.max_prompt={data.max_prompt} and data.max_response={data.max_response} need "
            f"{data.max_prompt + data.max_response} positions, and {where} has max_positions={model.max_positions}: "
            "lower them, or choose a model with more"
        )
    for key, written, size, axis, parts in indivisible(model, fsdp, tensor):
        choices = ", ".join(str(divisor) for divisor in _divisors(size) if divisor <= device_count)
        raise UserError(
            f"{where}.{key}={written} does not divide over mesh.{axis}={parts}: "
            f"choose another model, or mesh.{axis} from {choices}"
        )


def indivisible(model: ModelConfig, fsdp: int, tensor: int) -> Iterator[tuple[str, int, int, str, int]]:
    """(key, its value, the size that is divided, mesh axis, its size) of each size of a model that does not divide."""
    kv_heads = tensor if model.kv_heads < tensor else model.kv_heads  # fewer kv-heads than slices are repeated
    for key, written, size, axis, parts in (
        ("embed", model.embed, model.embed, "fsdp", fsdp),
        ("heads", model.heads, model.heads, "tensor", tensor),
        ("kv_heads", model.kv_heads, kv_heads, "tensor", tensor),
        ("mlp", model.mlp, model.mlp, "tensor", tensor),
        ("vocab_size", model.vocab_size, model.padded_vocab, "tensor", tensor),
    ):
        if size % parts:
            yield key, written, size, axis, parts


def _check_batches(config: Config, devices: int, groups: int) -> None:
    """Rows divide over devices and parts. Groups of devices answer prompts, each all samples of a prompt."""
    sft, reward, dpo = config.sft, config.reward_model, config.dpo
    rl, name = config.rl, config.algorithm or "ppo"
    each, samples = f"{devices} device(s)", rl.samples
    for stage, rows, micro_batches in (
        ("sft", sft.batch, sft.micro_batches),
        ("reward_model", reward.batch, reward.micro_batches),
        ("dpo", dpo.batch, dpo.algorithm.micro_batches),
    ):
        if stage in config.stages:
            over = each + _times(micro_batches, "micro-batches")
            _check_rows(f"{stage}.batch", rows, devices * micro_batches, f"divide over {over}")
    # Whatever the stages: texts are also sampled and scored by so many.
    key = f"{name}.rollout_batch"
    divisor, over = devices, each
    if config.algorithm is not None:
        divisor *= rl.algorithm.minibatches * rl.algorithm.micro_batches
        over += _times(rl.algorithm.minibatches, "minibatches") + _times(rl.algorithm.micro_batches, "micro-batches")
    parts = f"divide over {over}"
    if samples > 1:
        divisor = math.lcm(divisor, samples * groups)
        parts += f" and into {samples} samples of each prompt on {groups} group(s) of devices"
    told = "" if config.algorithm is not None else " (so many answers are sampled at a time)"
    _check_rows(key, rl.rollout_batch, divisor, parts, told)
    slots = config.rollout.slots
    if slots is not None and slots % devices:
        raise UserError(
            f"rollout.slots={slots} does not divide over {devices} device(s): choose a multiple of {devices}, or null "
            "for all rows at a time"
        )
    if slots is not None and samples > 1 and slots < samples * groups:
        raise UserError(
            f"rollout.slots={slots} has no room for {samples} samples of a prompt on each of {groups} group(s) of "
            f"devices: choose a multiple of {devices}, {-(-samples * groups // devices) * devices} or more"
        )


def _check_rows(key: str, rows: int, divisor: int, parts: str, told: str = "") -> None:
    if rows % divisor:
        below = rows // divisor * divisor
        choices = " or ".join(str(size) for size in (below, below + divisor) if size)
        raise UserError(f"{key}={rows}{told} does not {parts}: choose a multiple of {divisor}, such as {choices}")


def _times(factor: int, parts: str) -> str:
    return f" x {factor} {parts}" if factor > 1 else ""


def _check_shared_passes(config: Config) -> None:
    if not config.compute.shared_passes:
        return
    stage, algorithm = config.algorithm or "ppo", config.rl.algorithm
    if config.rl.dataflow is not None:
        raise UserError(
            f"compute.shared_passes has a dataflow of its own in place of {stage}.dataflow={config.rl.dataflow}: leave "
            "one of them out"
        )
    if stage in ("dapo", "remax", "safe_rlhf"):
        raise UserError(f"compute.shared_passes cannot compute stage {stage}: set it to false")
    for name, single in (("epochs", 1), ("minibatches", 1), ("micro_batches", 1), ("micro_batch_tokens", None)):
        if getattr(algorithm, name) != single:
            raise UserError(
                f"compute.shared_passes needs a single update on the whole batch, and not {stage}.algorithm.{name}="
                f"{getattr(algorithm, name)}: set that to {'null' if single is None else single}, or this to false"
            )
    if algorithm.ptx_coef or algorithm.old_logprobs != "recompute":
        raise UserError(
            f"compute.shared_passes has no place for {stage}.algorithm.ptx_coef={algorithm.ptx_coef:g} and "
            f"old_logprobs={algorithm.old_logprobs}: set them to 0 and recompute, or this to false"
        )
    if config.compute.score_tokens is not None:
        raise UserError(
            f"compute.shared_passes reads a batch as a whole, which compute.score_tokens={config.compute.score_tokens} "
            "would divide: leave one of them out"
        )
    if config.lora.on:
        raise UserError("compute.shared_passes is for models that are trained whole, not lora: set it to false")


def _check_sampling(config: Config, actor: ModelConfig) -> None:
    rl, name = config.rl, config.algorithm or "ppo"  # a policy is also looked at when no algorithm trains it
    if rl.algorithm.kl_target is not None and rl.rollout_batch >= 5 * rl.algorithm.kl_horizon:
        raise UserError(
            f"{name}.algorithm.kl_horizon={rl.algorithm.kl_horizon:g} must exceed a fifth of "
            f"{name}.rollout_batch={rl.rollout_batch}: the KL coefficient could turn negative, raise the horizon"
        )
    if rl.min_new_tokens > config.data.max_response:
        raise UserError(
            f"{name}.min_new_tokens={rl.min_new_tokens} exceeds data.max_response={config.data.max_response}: lower it"
        )
    if rl.top_k is not None and rl.top_k > actor.vocab_size:
        raise UserError(f"{name}.top_k={rl.top_k} exceeds the vocabulary of {actor.vocab_size}: lower it, or null")
    buffer = rl.scores.overlong_buffer
    if buffer is not None and buffer > config.data.max_response:
        raise UserError(
            f"{name}.scores.overlong_buffer={buffer:g} exceeds data.max_response={config.data.max_response}: lower it"
        )


def _check_algorithm(config: Config) -> None:
    """What an algorithm demands of the other sections."""
    name, section, algorithm = config.algorithm, config.rl, config.rl.algorithm
    if name is None:
        return
    key = f"{name}.algorithm"
    kept = {"top_k": section.top_k, "top_p": None if section.top_p == 1 else section.top_p}
    filtered = [f"{name}.{which}={value}" for which, value in kept.items() if value is not None]
    if filtered and (algorithm.old_logprobs == "rollout" or algorithm.importance is not None):
        raise UserError(
            f"{filtered[0]} draws from another distribution than the log-probabilities are of, which {key}."
            f"{'importance' if algorithm.importance else 'old_logprobs=rollout'} would correct: leave one of them out"
        )
    if algorithm.ptx_coef > 0 and config.data.source == "datasets" and config.data.sft.path is None:
        raise UserError(f"{key}.ptx_coef={algorithm.ptx_coef:g} imitates texts of data.sft.path: give it, or set 0")
    if algorithm.ptx_coef > 0 and section.temperature != 1:
        raise UserError(
            f"{key}.ptx_coef={algorithm.ptx_coef:g} would imitate texts by the distribution that "
            f"{name}.temperature={section.temperature:g} scales: set the temperature to 1, or ptx_coef to 0"
        )
    if name == "remax" and section.scores.normalise:
        raise UserError("remax.scores.normalise has no effect on a difference of scores but its scale: set it to false")


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _list(items: Sequence[str]) -> str:
    return f"[{', '.join(items)}]"
