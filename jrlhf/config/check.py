"""Checks of a config as a whole: sections against each other, the models and the devices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jrlhf.config.keys import as_line
from jrlhf.config.places import is_address
from jrlhf.config.schema import (
    ClientConfig,
    Config,
    DatasetsData,
    DocstringsData,
    MeshConfig,
    ProfileConfig,
    RewardConfig,
    SleepConfig,
    SourceConfig,
    ValidationConfig,
)
from jrlhf.config.stages import FleetSection, is_algorithm
from jrlhf.errors import UserError
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.config.divisors import divisors, indivisible
from jrlhf.ppo.fields import default_of, without_effect


def mesh_sizes(mesh: MeshConfig, device_count: int, *, simulates: bool = True) -> tuple[int, int, int]:
    """Returns the sizes of (data, fsdp, tensor), with -1 resolved. simulates: errors may suggest simulated devices.

    Raises UserError for sizes that do not fit the devices.
    """
    sizes = [mesh.data, mesh.fsdp, mesh.tensor]
    written = f"mesh data={mesh.data}, fsdp={mesh.fsdp}, tensor={mesh.tensor}"
    if sizes.count(-1) > 1:
        raise UserError(f"{written}: only one axis may be -1, give the others a size")
    product = math.prod(size for size in sizes if size != -1)
    wrong = device_count % product if -1 in sizes else device_count - product
    if wrong:
        takes_rest = -1 not in sizes and device_count % (mesh.data * mesh.tensor) == 0
        choices = ", ".join(map(str, divisors(device_count)))
        raise UserError(
            f"{written} does not fit {device_count} device(s): choose sizes whose product is {device_count} "
            f"(its divisors are {choices})"
            + (", or mesh.fsdp=-1 for all that remain" if takes_rest else "")
            + (f", or set device.simulated={product} to simulate that many on the CPU" if simulates else "")
        )
    data, fsdp, tensor = (device_count // product if size == -1 else size for size in sizes)
    return data, fsdp, tensor


def validate(config: Config, device_count: int, models: Mapping[str, ModelConfig]) -> None:
    """Checks conditions across sections, before anything is compiled or written. Raises the first violation.

    models: role -> architecture, for the roles that the stages need.
    """
    for sentence in _violations(config, device_count, models):
        raise UserError(sentence)


def uncorrected(config: Config) -> str | None:
    """Returns a warning if updates treat tokens of older weights as if the present weights had drawn them."""
    if config.asynchronous is None or not config.asynchronous.staleness:
        return None
    name, algorithm = config.algorithm, config.rl.algorithm
    if algorithm.corrections or algorithm.old_logprobs != "recompute":
        return None
    return (
        f"{name}.asynchronous.staleness={config.asynchronous.staleness} without an off-policy correction learns "
        "from tokens of older weights as if the present ones had drawn them: set "
        f"{name}.algorithm.old_logprobs=rollout, or {name}.algorithm.importance=token"
    )


def unrepeatable(config: Config) -> str | None:
    """Returns a warning if the run cannot be reproduced, because the order of arrival decides."""
    if config.asynchronous is None or config.asynchronous.clock == "virtual":
        return None
    return (
        f"{config.algorithm}.asynchronous.clock=wall: which rows form a batch, and which weights draw them, follows "
        "from what arrives first, so neither another run with this seed nor a resumed one has the same bits"
    )


def _violations(config: Config, device_count: int, models: Mapping[str, ModelConfig]) -> Iterator[str]:
    """Yields a sentence for each violation. Later checks may rely on earlier ones."""
    yield from _stages(config)
    yield from _data(config)
    if config.profile is not None:
        yield from _profile(config, config.profile)
    for key, value, reason in (*without_effect(config), *_without_effect(config)):
        yield f"{key}={value} has no effect with {reason}: leave it out{_undone(key)}"
    if config.validation is not None:
        yield from _validation(config, config.validation, models["actor"])
    data, fsdp, tensor = mesh_sizes(config.mesh, device_count)
    for role, model in models.items():
        yield from _model(config, role, model, fsdp, tensor, device_count)
    yield from _pipelines(config, fsdp)
    yield from _batches(config, data * fsdp * tensor, data * fsdp)
    yield from fleet_violations(config, config.fleet)
    yield from _frozen_roles(config)
    if config.algorithm is not None:
        yield from _algorithm(config, config.algorithm)
        if config.compute.shared_passes:
            yield from _shared_passes(config, config.algorithm)
        if config.compute.score_rows is not None:
            yield from _score_rows(config, config.algorithm, config.compute.score_rows)
    if config.rollout.last_groups is not None and config.compute.score_rows is None:
        yield (
            f"rollout.last_groups={config.rollout.last_groups} frees devices that score while the last rows decode, "
            "and nothing does: set compute.score_rows, or leave it out"
        )
    yield from _sampling(config, models["actor"])


def _stages(config: Config) -> Iterator[str]:
    stages, given = config.stages, f"stages={as_line(config.stages)}"
    if not stages:
        yield "stages=[]: name at least one of sft, reward_model, dpo or an algorithm, such as ppo"
    repeated = [stage for stage in stages if stages.count(stage) > 1]
    if repeated:
        yield f"{given}: {repeated[0]} is named more than once, keep one"
    algorithms = [stage for stage in stages if stage == "dpo" or is_algorithm(stage)]
    if len(algorithms) > 1:
        yield f"{given}: a run has one algorithm, keep {' or '.join(algorithms)}"
    if "reward_model" in stages and "dpo" in stages:
        yield (
            f"{given}: dpo learns from the pairs themselves and uses no reward model, leave reward_model out, or name "
            "another algorithm"
        )
    order = ("sft", "dpo") if algorithms == ["dpo"] else ("sft", "reward_model", *(algorithms or ["ppo"]))
    if list(stages) != sorted(stages, key=order.index):
        yield f"{given}: each starts from the result of those before it, write them in the order {', '.join(order)}"
    if config.model.path is None and stages[0] != "sft":
        yield f"{given}: {stages[0]} would start from random weights, name sft before it or give model.path"
    scored = "reward_model" in stages or config.rewards
    if algorithms not in ([], ["dpo"]) and not scored and config.rl.dataflow is None:
        yield (
            f"{given}: {algorithms[0]} has nothing to optimise, name reward_model before it, give rewards, or set "
            f"{algorithms[0]}.dataflow to a function with a loss of its own"
        )
    if "dpo" in stages and config.rewards:
        yield f"rewards have no effect with {given}: leave them out, or name an algorithm, such as ppo"
    if config.algorithm == "safe_rlhf" and not config.costs:
        yield "stage safe_rlhf has nothing to keep below safe_rlhf.algorithm.cost_limit: give costs"
    if config.algorithm not in ("safe_rlhf", None) and config.costs:
        yield "costs have no effect without stage safe_rlhf: leave them out, or make them rewards"
    if skipping := [part.name for part in config.costs if part.skip_none]:
        yield f"skip_none of the cost {skipping[0]}: it would be 0 in the mean that cost_limit bounds, leave it out"
    for section in ("rewards", "costs"):
        parts = getattr(config, section)
        names = [part.name for part in parts]
        for index, part in enumerate(parts):
            if part.skip_none and part.abstain:
                yield f"{section}[{index}] ({part.name}): None means one thing, keep skip_none or abstain"
            if [part.model, part.adapter, part.function].count(None) != 2:
                yield f"{section}[{index}] ({part.name}) must be a model, an adapter or a function: give one"
            if names.count(part.name) > 1 or part.name == "reward_model":
                owner = "" if names.count(part.name) > 1 else " by the stage"
                yield f"{section}[{index}].name={part.name} is taken{owner}: it names metrics, choose another"
            if part.client is not None:
                yield from _client(part, part.client, f"{section}[{index}]")


def _client(part: RewardConfig, client: ClientConfig, key: str) -> Iterator[str]:
    if part.function is None:
        yield f"{key}.client.url={client.url} is for functions, and {key} is a {part.kind}: leave client out"
    if client.timeout > part.deadline and not part.in_process:
        yield (
            f"{key}.client.timeout={client.timeout:g} of a request exceeds {key}.deadline={part.deadline:g} of a whole "
            "batch: raise the deadline, or lower the timeout"
        )
    if client.concurrent < part.workers:
        yield (
            f"{key}.client.concurrent={client.concurrent} leaves some of {key}.workers={part.workers} without a "
            "request: lower workers, since one process has many requests in flight"
        )


def _data(config: Config) -> Iterator[str]:
    path, source = config.model.path, config.data.source
    if isinstance(config.data, DatasetsData):
        if path is None:
            yield "data.source=datasets needs a tokenizer: give model.path, the directory of a model"
        if isinstance(config.data.prompts, tuple):
            yield from _mixture(config.data.prompts)
        return
    if path is not None:
        yield (
            f"model.path={path}: the built-in task trains a tokenizer and a model of its own, set data.source=datasets "
            "and name your data"
        )
    unpaired = [stage for stage in config.stages if stage in ("reward_model", "dpo")]
    if source == "arithmetic" and unpaired:
        yield (
            f"data.source=arithmetic has no preferences for stage {unpaired[0]}: leave it out, and give rewards to "
            "an algorithm such as grpo"
        )


def _mixture(sources: Sequence[SourceConfig]) -> Iterator[str]:
    if not sources:
        yield "data.prompts=[] has no prompts: name at least one dataset, [{path: FILE}]"
    names = [source.called for source in sources]
    for index, source in enumerate(sources):
        if source.path is None:
            yield f"data.prompts[{index}] has no path: name a file or a dataset"
        if names.index(source.called) < index:
            yield f"data.prompts[{index}] has the name {source.called} of an earlier one: give it another name"


def _without_effect(config: Config) -> Iterator[tuple[str, object, str]]:
    """Yields (key, value, reason) of settings that have no effect because of another section."""
    for void, keys, reason in _void_settings(config):
        for key in keys if void else ():
            section: Any = config
            *path, name = key.split(".")
            for part in path:
                section = {**vars(section), **getattr(section, "sections", {})}.get(part) if section else None
            if isinstance(section, tuple):  # a list of sections, of which none has an effect
                yield ".".join(path), as_line([getattr(part, name) for part in section]), reason
            elif section and getattr(section, name) != default_of(type(section), name):
                yield key, getattr(section, name), reason


def _undone(key: str) -> str:
    """Returns how to undo on a command line a dataset that a file names."""
    section = key.removesuffix(".path")
    return f" ({section}=null on a command line)" if key.startswith("data.") and section != key else ""


def _void_settings(config: Config) -> Iterator[tuple[bool, Sequence[str], str]]:
    """Yields (condition, keys, reason): if the condition holds, the settings have no effect."""
    name, dpo, stages = config.algorithm, "dpo" in config.stages, f"stages={as_line(config.stages)}"
    datasets, parts = isinstance(config.data, DatasetsData), (*config.rewards, *config.costs)
    scored = "reward_model" in config.stages or any(part.function is None for part in parts)
    texts = False  # an algorithm imitates texts in addition
    yield config.model.path is None, ("lora.critic",), "fresh weights, which have no model.path for a critic of its own"
    yield config.reference_is_base, ("sleep.reference",), "lora, whose base is the reference"
    yield (
        not is_address(config.run_dir),
        ("storage.scratch", "storage.timeout", "storage.patience", "storage.lease"),
        (f"run_dir={config.run_dir}, which is no address"),
    )
    yield not scored, ("sleep.reward",), "rewards that are all functions"
    yield config.rollout.last_groups is None, ("rollout.last_rows",), "rollout.last_groups=null"
    validated = config.stop is not None and (config.stop.metric or "").lstrip("-").startswith("val-")
    yield validated and config.validation is None, ("stop.metric",), "validation.every=null"
    measured = any(map(config.checkpoints.best_in, config.stages))
    yield not measured, ("checkpoints.best",), f"{stages}, which do not log it"
    validated = measured and config.checkpoints.validated
    yield validated and config.validation is None, ("checkpoints.best",), "validation.every=null"
    parts_are_equal = "dpo.pipeline, whose parts have equally many rows"
    yield dpo and config.dpo.pipeline is not None, ("dpo.algorithm.micro_batch_tokens",), parts_are_equal
    if name is None:
        yield True, ("plan", "reward_model.weight", "validation.every"), stages
        yield True, ("compute.shared_passes", "compute.score_rows"), stages
        yield "sft" not in config.stages, ("compute.fused_loss",), stages
        yield True, ("roles.critic",), stages
        yield not dpo, ("roles.reference",), stages
        yield True, ("lora.critic", *(f"sleep.{switch}" for switch in SleepConfig.SWITCHES)), stages
        yield datasets, [f"rollout.{key}" for key in vars(config.rollout)], f"{stages}, which sample nothing"
    else:
        algorithm, policy = config.rl.algorithm, f"{name}.algorithm"
        texts = algorithm.ptx_coef > 0
        yield True, ("sampling.batch",), f"{name}.rollout_batch"
        yield not algorithm.has_critic, ("roles.critic", "lora.critic", "sleep.critic"), f"{name}, which has none"
        yield not algorithm.needs_reference, ("roles.reference",), f"{policy}.kl_coef=0"
        by_age = algorithm.ratio == "token"
        why = "old_logprobs=interpolate and its rows' weights" if by_age else f"ratio={algorithm.ratio}"
        unfused = "sft" not in config.stages  # which has a loss of its own to fuse
        yield unfused and algorithm.couples_tokens, ("compute.fused_loss",), f"{policy}.{why}"
        yield unfused and config.compute.shared_passes, ("compute.fused_loss",), "compute.shared_passes"
        # ReMax's baselines include scores of truncated responses; a custom dataflow may read them, too.
        masked = algorithm.truncation == "mask" and name != "remax" and config.rl.dataflow is None
        mask = f"{policy}.truncation=mask, which leaves such responses out"
        yield masked, (f"{name}.scores.missing_eos_penalty",), mask
    if datasets and (name or dpo):  # other runs may keep the data of stages to come
        yield "sft" not in config.stages and not texts, ("data.sft.path",), stages
        yield "reward_model" not in config.stages and not dpo, ("data.preferences.path",), stages
        yield name is None, ("data.prompts.path", "data.heldout.path"), stages


def fleet_violations(config: Config, fleet: FleetSection | None) -> Iterator[str]:
    """Yields a sentence for each violation of the section `fleet`, which may be another one than the config's."""
    name = config.algorithm
    if fleet is None or fleet.workers is None:
        return
    if config.asynchronous is None:
        section = "an algorithm" if name is None else name
        yield (
            f"fleet.workers={fleet.workers} draws the rollouts of asynchronous training: give {section} a section "
            "asynchronous, or leave fleet out"
        )
    elif fleet.workers > config.logical_workers:
        yield (
            f"fleet.workers={fleet.workers} exceeds {name}.asynchronous.logical_workers={config.logical_workers}, and "
            "a process draws for at least one of those: lower the former or raise the latter"
        )
    if fleet.devices and len(fleet.devices) != fleet.workers:
        yield (
            f"fleet.devices names the GPUs of {len(fleet.devices)} process(es), and fleet.workers={fleet.workers}: "
            "give each process an entry"
        )
    gpus = [gpu.strip() for entry in fleet.devices for gpu in entry.split(",") if gpu.strip()]
    if repeated := [gpu for gpu in gpus if gpus.count(gpu) > 1]:
        yield f"fleet.devices names the GPU {repeated[0]} twice: give each process GPUs of its own"


def _frozen_roles(config: Config) -> Iterator[str]:
    for name, role in config.roles.frozen.items():
        if config.algorithm is None or config.rl.dataflow is None:
            section = config.algorithm or "an algorithm"
            yield f"roles.{name}={role.path} is for a dataflow of your own: set {section}.dataflow, or leave it out"


def _validation(config: Config, validation: ValidationConfig, actor: ModelConfig) -> Iterator[str]:
    data, limit, least = config.data, validation.max_response, config.sampling.min_new_tokens
    if limit is not None and data.max_prompt + limit > actor.max_positions:
        yield (
            f"data.max_prompt={data.max_prompt} and validation.max_response={limit} need {data.max_prompt + limit} "
            f"positions, and model has max_positions={actor.max_positions}: lower them, or choose a model with more"
        )
    if limit is not None and least > limit:
        yield f"sampling.min_new_tokens={least} exceeds validation.max_response={limit}: lower it"
    if validation.top_k is not None and validation.top_k > actor.vocab_size:
        yield f"validation.top_k={validation.top_k} exceeds the vocabulary of {actor.vocab_size}: lower it, or null"
    if validation.k > 1 and validation.temperature == 0:
        yield f"validation.k={validation.k} answers of temperature 0 are all the same: set one of them"
    datasets = isinstance(data, DatasetsData)
    if not isinstance(data, DocstringsData) and not data.heldout_rows and not (datasets and data.heldout):
        other = ", or give data.heldout.path" if datasets else ", or set it to null"
        yield f"validation.every={validation.every} has no prompts to validate on: raise data.heldout_rows{other}"


def _profile(config: Config, profile: ProfileConfig) -> Iterator[str]:
    stage = profile.stage or config.stages[-1]
    if stage not in config.stages:
        yield f"profile.stage={stage} is not among stages={as_line(config.stages)}: name one that the run has"
    steps = config.length(stage)
    beyond = [number for number in profile.iterations if number > steps]
    if beyond:
        yield f"profile.iterations has {beyond[0]}, but {stage} ends after {steps}: choose earlier ones"


def _model(config: Config, role: str, model: ModelConfig, fsdp: int, tensor: int, device_count: int) -> Iterator[str]:
    data, name = config.data, "model" if role == "actor" else f"the {role}"
    longest = data.max_prompt + data.max_response
    if longest > model.max_positions and not role.startswith("reward "):
        yield (
            f"data.max_prompt={data.max_prompt} and data.max_response={data.max_response} need {longest} positions, "
            f"and {name} has max_positions={model.max_positions}: lower them, or choose a model with more"
        )
    for key, written, size, axis, parts in indivisible(model, fsdp, tensor):
        choices = ", ".join(str(divisor) for divisor in divisors(size) if divisor <= device_count)
        yield (
            f"{name}.{key}={written} does not divide over mesh.{axis}={parts}: "
            f"choose another model, or mesh.{axis} from {choices}"
        )


def _pipelines(config: Config, fsdp: int) -> Iterator[str]:
    """Checks that the pipeline stages of a stage divide the devices, so that weights are stored as without stages."""
    choices = [divisor for divisor in divisors(fsdp) if divisor > 1]
    remedy = f"choose stages from {', '.join(map(str, choices))}" if choices else "choose a larger mesh.fsdp"
    for stage in [stage for stage in config.stages if not is_algorithm(stage)]:
        if fsdp % (count := config.sections[stage].pipeline_stages):
            yield f"{stage}.pipeline.stages={count} does not divide mesh.fsdp={fsdp}: {remedy}, or leave pipeline out"


def _batches(config: Config, devices: int, groups: int) -> Iterator[str]:
    """Checks that rows divide over devices and parts. A group of devices generates all samples of a prompt."""
    for stage in [stage for stage in config.stages if not is_algorithm(stage)]:
        section = config.sections[stage]
        micro_batches = (section.algorithm if stage == "dpo" else section).micro_batches
        own = devices // section.pipeline_stages  # the stages of a pipeline share their rows
        over = f"{own} device(s)" + _times(micro_batches, "micro-batches")
        yield from _rows(f"{stage}.batch", section.batch, own * micro_batches, f"divide over {over}")
    divisor, parts, samples, micro_batches = devices, f"divide over {devices} device(s)", config.samples, 1
    key, sampled = "sampling.batch", " (so many answers are sampled at a time)"
    if config.algorithm is not None:
        key, sampled, algorithm = f"{config.algorithm}.rollout_batch", "", config.rl.algorithm
        divisor *= algorithm.minibatches
        micro_batches = algorithm.micro_batches
        parts += _times(algorithm.minibatches, "minibatches") + _times(micro_batches, "micro-batches")
    whole = samples * groups if samples > 1 else 1
    if samples > 1:
        parts += f" and into {samples} samples of each prompt on {groups} group(s) of devices"
    divisors_by_parts = {count: math.lcm(divisor * count, whole) for count in range(micro_batches, 0, -1)}
    fewer = next((count for count, by in divisors_by_parts.items() if config.sampled_rows % by == 0), None)
    other = "" if fewer is None else f", or {config.algorithm}.algorithm.micro_batches={fewer}"
    for sentence in _rows(key, config.sampled_rows, divisors_by_parts[micro_batches], parts, sampled):
        yield f"{sentence}{other}"
    slots = config.rollout.slots
    if slots is not None and slots % devices:
        yield (
            f"rollout.slots={slots} does not divide over {devices} device(s): choose a multiple of {devices}, or null "
            "for all rows at a time"
        )
    if slots is not None and samples > 1 and slots < samples * groups:
        yield (
            f"rollout.slots={slots} has no room for {samples} samples of a prompt on each of {groups} group(s) of "
            f"devices: choose a multiple of {devices}, {-(-samples * groups // devices) * devices} or more"
        )


def _rows(key: str, rows: int, divisor: int, parts: str, remark: str = "") -> Iterator[str]:
    if rows % divisor:
        below = rows // divisor * divisor
        choices = " or ".join(str(size) for size in (below, below + divisor) if size)
        yield f"{key}={rows}{remark} does not {parts}: choose a multiple of {divisor}, such as {choices}"


def _times(factor: int, parts: str) -> str:
    return f" x {factor} {parts}" if factor > 1 else ""


def _shared_passes(config: Config, stage: str) -> Iterator[str]:
    algorithm = config.rl.algorithm
    if config.rl.dataflow is not None:
        yield (
            f"compute.shared_passes has a dataflow of its own in place of {stage}.dataflow={config.rl.dataflow}: leave "
            "one of them out"
        )
    if stage in ("dapo", "remax", "safe_rlhf"):
        yield f"compute.shared_passes cannot compute stage {stage}: set it to false"
    for name, single in (("epochs", 1), ("minibatches", 1), ("micro_batches", 1), ("micro_batch_tokens", None)):
        if getattr(algorithm, name) != single:
            yield (
                f"compute.shared_passes needs a single update on the whole batch, and not {stage}.algorithm.{name}="
                f"{getattr(algorithm, name)}: set that to {'null' if single is None else single}, or this to false"
            )
    if algorithm.ptx_coef or algorithm.old_logprobs != "recompute":
        yield (
            f"compute.shared_passes has no place for {stage}.algorithm.ptx_coef={algorithm.ptx_coef:g} and "
            f"old_logprobs={algorithm.old_logprobs}: set them to 0 and recompute, or this to false"
        )
    if config.compute.score_tokens is not None:
        yield (
            f"compute.shared_passes reads a batch as a whole, which compute.score_tokens={config.compute.score_tokens} "
            "would divide: leave one of them out"
        )
    if config.lora is not None:
        yield "compute.shared_passes is for models that are trained whole, not lora: set it to false"


def _score_rows(config: Config, stage: str, rows: int | Literal["auto"]) -> Iterator[str]:
    key, limit = f"compute.score_rows={rows}", config.data.max_response
    if config.asynchronous is not None:
        yield f"{key} scores rollouts that are learned from at once, and not {stage}.asynchronous: leave one out"
    batch, samples = config.rl.rollout_batch, config.samples
    if isinstance(rows, int) and (rows % samples or batch % rows):
        whole = f" of whole prompts, which have {samples} samples" if samples > 1 else ""
        choices = ", ".join(str(divisor) for divisor in divisors(batch) if divisor % samples == 0)
        yield f"{key} does not cut {stage}.rollout_batch={batch} into equal parts{whole}: choose from {choices}"
    if config.rollout.is_one_program(config.rl.rollout_batch, limit):
        yield (
            f"{key} scores rows between two chunks of decode steps, and rollout.chunk={config.rollout.chunk} decodes "
            f"all data.max_response={limit} tokens in one: set rollout.chunk below {limit}"
        )
    asleep = [part for part in SleepConfig.SWITCHES if part != "optimizer" and vars(config.offloading)[part] == "host"]
    if asleep:
        yield (
            f"{key} would bring the weights of sleep.{asleep[0]}=host to the devices for every part: leave one of them "
            "out"
        )


def _sampling(config: Config, actor: ModelConfig) -> Iterator[str]:
    sampling, limit = config.sampling, config.data.max_response
    if sampling.min_new_tokens > limit:
        yield f"sampling.min_new_tokens={sampling.min_new_tokens} exceeds data.max_response={limit}: lower it"
    if sampling.top_k is not None and sampling.top_k > actor.vocab_size:
        yield f"sampling.top_k={sampling.top_k} exceeds the vocabulary of {actor.vocab_size}: lower it, or null"


def _algorithm(config: Config, name: str) -> Iterator[str]:
    section, key, sampling = config.rl, f"{name}.algorithm", config.sampling
    algorithm, buffer = section.algorithm, section.scores.overlong_buffer
    if algorithm.kl_target is not None and section.rollout_batch >= 5 * algorithm.kl_horizon:
        yield (
            f"{key}.kl_horizon={algorithm.kl_horizon:g} must exceed a fifth of {name}.rollout_batch="
            f"{section.rollout_batch}: the KL coefficient could turn negative, raise the horizon"
        )
    asynchronous = section.asynchronous
    if asynchronous is not None and asynchronous.clock == "wall" and asynchronous.on_new_weights == "finish":
        yield (
            f"{name}.asynchronous.clock=wall takes new weights between two chunks, and on_new_weights=finish waits "
            "for rows: set keep_cache or prefill_again"
        )
    if asynchronous is not None and not asynchronous.uncorrected and asynchronous.staleness > 1:
        if sentence := uncorrected(config):
            yield f"{sentence}; or {name}.asynchronous.uncorrected=true, to do so although runs were seen to fail"
    if asynchronous is not None and asynchronous.uncorrected and uncorrected(config) is None:
        yield (
            f"{name}.asynchronous.uncorrected=true has no effect with a correction, or with {name}.asynchronous."
            f"staleness={asynchronous.staleness}: leave it out"
        )
    if asynchronous is not None and section.solved_score is not None:
        yield (
            f"{name}.solved_score={section.solved_score:g} leaves out prompts by scores that {name}.asynchronous does "
            "not have yet when it draws ahead: leave one out"
        )
    if buffer is not None and buffer > config.data.max_response:
        yield f"{name}.scores.overlong_buffer={buffer:g} exceeds data.max_response={config.data.max_response}: lower it"
    if section.scores.combine == "normalise_then_sum":
        combined = f"{name}.scores.combine=normalise_then_sum"
        if config.samples == 1:
            yield f"{combined} compares the responses to a prompt, and {name} has one: leave it out"
        elif getattr(algorithm, "divide_by_std", False):
            yield f"{combined} divides by deviations, and {key}.divide_by_std=true divides again: set that to false"
    filters = {"top_k": sampling.top_k, "top_p": None if sampling.top_p == 1 else sampling.top_p}
    filters["min_p"] = sampling.min_p
    used = [f"sampling.{which}={value}" for which, value in filters.items() if value is not None]
    compared = (*algorithm.corrections, f"old_logprobs={algorithm.old_logprobs}")[0]
    if used and compared != "old_logprobs=recompute":
        yield (
            f"{used[0]} draws from another distribution than the log-probabilities are of, which {key}.{compared} "
            "would correct: leave one of them out"
        )
    if algorithm.ptx_coef > 0 and isinstance(config.data, DatasetsData) and config.data.sft is None:
        yield f"{key}.ptx_coef={algorithm.ptx_coef:g} imitates texts of data.sft.path: give it, or set 0"
    if algorithm.ptx_coef > 0 and sampling.temperature != 1:
        yield (
            f"{key}.ptx_coef={algorithm.ptx_coef:g} would imitate texts by the distribution that sampling.temperature="
            f"{sampling.temperature:g} scales: set the temperature to 1, or ptx_coef to 0"
        )
    if name == "remax" and section.scores.normalise:
        yield "remax.scores.normalise has no effect on a difference of scores but its scale: set it to false"
