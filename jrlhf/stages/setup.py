"""Set-up of a run: devices, architectures, plan, data and directory, each checked before the next.

Opens everything a run needs later (reward functions, tokenizers, adapters), so that typos fail early.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.algorithms.registry import graph_of
from jrlhf.config.check import mesh_sizes, uncorrected, unrepeatable, validate
from jrlhf.config.parse import changed
from jrlhf.config.places import PREFIX, is_address
from jrlhf.config.schema import ComputeConfig, Config, DatasetsData, ModelSection, RewardConfig, SleepConfig
from jrlhf.data.chat import dated
from jrlhf.data.task import Task
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.errors import Preempted, RewardFailure, RunFailure, UserError
from jrlhf.meshes.mesh import make_mesh
from jrlhf.meshes.offload import check_host_memory
from jrlhf.meshes.pipeline import FusedUpdates
from jrlhf.meshes.plan import Plan
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.flash import computes
from jrlhf.models.generation.occupancy import LastRowsPolicy
from jrlhf.models.hf.directories import PROMPTING
from jrlhf.models.options import ForwardOptions
from jrlhf.models.weights import HeadKind
from jrlhf.rewards import builtin
from jrlhf.rewards.functions import FunctionReward
from jrlhf.rewards.types import Kind
from jrlhf.roles.model import Compute
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.planned_placement import place_roles, place_stage
from jrlhf.roles.pretrained import (
    actor_adapter,
    architecture,
    check_origins,
    check_weights,
    fresh_model,
    hub_names,
    locate,
    own_tokenizer,
    reward_adapter,
)
from jrlhf.run.clock import Stopwatch
from jrlhf.run.console import Console
from jrlhf.run.contents import CONFIG, FUSED, HUB, PLAN, TOKENIZER
from jrlhf.run.devices import idle_accelerator, select
from jrlhf.run.directory import (
    RunDirectory,
    check_directory,
    check_run,
    explained,
    first_day,
    open_run,
    refuse_unshared,
    run_path,
    writable,
)
from jrlhf.run.files import digest_of, seal, to_json
from jrlhf.run.preemption import PreemptionGuard
from jrlhf.run.processes import from_main, is_main, several
from jrlhf.run.resume import refuse_other_processes
from jrlhf.run.tracking import check_wandb, tracking
from jrlhf.stages.context import Context
from jrlhf.stages.hooks import load_hooks
from jrlhf.stages.identity import Identity, note_failure, numbers


@dataclass(frozen=True)
class Resources:
    """What a run computes on, decided before it begins.

    config: with the tiles that a new run chooses. models: role -> architecture. plan: of the algorithm, if there is
    one; fused: the updates that it fuses. moves: chooses where last rows decode; None: they stay. lines: told at start.
    """

    config: Config
    mesh: Mesh
    models: dict[str, ModelConfig]
    plan: Plan | None = None
    fused: FusedUpdates | None = None
    moves: LastRowsPolicy | None = None
    lines: tuple[str, ...] = ()

    def placements(self) -> dict[str, RolePlacement]:
        """Returns the placement of each role of the algorithm, as the plan says, and of each stage in its pipeline."""
        devices, stages = list(self.mesh.devices.flat), self.config.stages
        placements = {
            name: place_stage(self.config, name, self.mesh) for name in stages if name != self.config.algorithm
        }
        if self.plan is None:
            return placements
        graph, ahead = graph_of(self.config), self.config.offloading.ahead
        return placements | place_roles(self.plan, graph, devices, fused=self.fused, prefetch=ahead)


class Resolve(Protocol):
    """Decides what a run computes on. tell: called with sentences, now and while the run runs."""

    def __call__(self, config: Config, *, resume: bool, tell: Callable[[str], None]) -> Resources: ...


@contextmanager
def open_context(
    config: Config, resolve: Resolve, *, resume: bool | Literal["auto"], accept_rewards: bool = False
) -> Iterator[Context]:
    """Checks everything that a run needs, cheapest first, and opens its directory and services."""
    phases = Stopwatch()
    select(config.device, config.distributed)  # connects the processes
    if resume not in (True, False, "auto"):
        raise UserError(f"resume={resume!r}: it must be True, False or 'auto'")
    refuse_other_processes(config, dry_run=False, resume=resume, accept_rewards=accept_rewards)
    console = Console(enabled=is_main())
    tell = console.line
    if resume == "auto":
        resume = from_main(partial(_holds_run, config, tell))
    with ExitStack() as stack:
        mirror = stack.enter_context(_mirrored(config, resume=resume, tell=tell))
        if resume or mirror is None:  # at an address the mirror has refused another run
            from_main(partial(_check_directory, config, resume))
        if mirror is None:
            refuse_unshared(config, "it")
        resources = resolve(config, resume=resume, tell=tell)
        config, mesh, models, plan = resources.config, resources.mesh, resources.models, resources.plan
        _tell_first(console, config)
        for line in (_headline(config, mesh), *resources.lines):
            console.line(line)
        placements = resources.placements()
        if config.fleet is not None and config.fleet.engine == "ray":
            from jrlhf.rollouts.processes.ray_worker import joined

            stack.enter_context(joined())
        # Templates write the day on which the run began, also after a resume and in every process.
        now = datetime.now(UTC)
        stack.enter_context(dated(from_main(lambda: first_day(run_path(config), now) if resume else f"{now.date()}")))
        hooks = load_hooks(config)
        task, words = _read_inputs(resources, console, new=not resume)
        if mirror is not None:
            mirror.begin()
        run = stack.enter_context(open_run(config, resume=resume, notes=[_devices_line(mesh, plan)], now=now))
        stack.enter_context(_kept_if_begun(run))
        stack.enter_context(explained(run))
        preemption = stack.enter_context(PreemptionGuard())
        trackers = stack.enter_context(tracking(config, run, console.warn))
        if mirror is not None and resume:
            mirror.start(run)
        elif mirror is not None:
            run.kept = partial(mirror.start, run)
        _write_inputs(run, config, task, plan, resources.fused)
        functions = {f"{kind} {part.name}" for _, kind, part in config.rewards_and_costs if part.function is not None}
        stack.enter_context(_noting_failures(run, config))
        yield Context(
            config=config,
            mesh=mesh,
            compute=compute_of(config.compute),
            task=task,
            vocab_size=models["actor"].vocab_size,
            run=run,
            console=console,
            preemption=preemption,
            identity=Identity(words, frozenset(functions), accept_rewards),
            phases=phases,
            trackers=trackers,
            hooks=hooks,
            placements=placements,
            moves=resources.moves,
        )


def _read_inputs(resources: Resources, console: Console, *, new: bool) -> tuple[Task, dict[str, str]]:
    """Reads the data and checks all other inputs. Returns the task, and words that identify the inputs."""
    config, models = resources.config, resources.models
    with console.status("reading the data"):
        task = load_task(config, models["actor"])
    for line in task.description.splitlines():
        console.line(line)
    words = check_sources(config, task, models["actor"], resources.mesh) | _model_words(models, task.tokenizer)
    if len(config.stages) > 1 and new:
        with console.status("reading the weights that later stages need"):
            from_main(partial(_check_numbers, config))
    return task, words | {"corpus": task.fingerprint}


def _holds_run(config: Config, tell: Callable[[str], None]) -> bool:
    """True if there is a run in a config's directory, here or in a store."""
    check_directory(config)
    if is_address(config.run_dir):
        from jrlhf.storage.mirror import holds_run

        return holds_run(config, tell)
    with writable(config):
        return (run_path(config) / CONFIG).exists()


@contextmanager
def _mirrored(config: Config, *, resume: bool, tell: Callable[[str], None]) -> Iterator[Any]:
    """Yields the `Mirror` of a run at an address; None if run_dir is a path."""
    from_main(partial(check_directory, config))
    if is_address(config.run_dir):
        from jrlhf.storage.mirror import mirrored

        with mirrored(config, resume=resume, tell=tell) as mirror:
            yield mirror
    else:
        yield None


@contextmanager
def _noting_failures(run: RunDirectory, config: Config) -> Iterator[None]:
    """Records reward functions that stop the run, and adds the command that resumes it to their errors."""
    try:
        yield
    except RewardFailure as failure:
        note_failure(run, failure.identity, str(failure))
        if command := _resuming(config):
            raise RewardFailure(f"{failure}; to resume: {command}", failure.identity) from failure
        raise


def _resuming(config: Config) -> str:
    """Returns the command that resumes a run; "" if none does: at an address, or with what a Python program gave."""
    called = [*config.hooks, *(part.function for _, _, part in config.rewards_and_costs)]
    if isinstance(config.data, DatasetsData):
        called += [part.path for part in config.data.datasets.values()]
    if is_address(config.run_dir) or any(str(name).startswith(PREFIX) for name in called):
        return ""
    return f"python -m jrlhf.train --config {shlex.quote(str(run_path(config)))}/config.yaml --resume"


@contextmanager
def _kept_if_begun(run: RunDirectory) -> Iterator[None]:
    """Leaves nothing of a new run that fails before it has begun, so that the same command can start it again.

    It stays if the error is one after which a run is to be resumed.
    """
    try:
        yield
    except BaseException as error:
        if run.new and isinstance(error, Preempted | RunFailure | RewardFailure):
            run.begin()
        elif run.new and run.writes:
            run.discard()
        raise


def _check_directory(config: Config, resume: bool) -> None:
    """Raises UserError if the run cannot resume in its directory, or cannot begin in it."""
    if resume:
        check_origins(hub_names(config), run_path(config))
    check_run(config, resume)


def _write_inputs(run: RunDirectory, config: Config, task: Task, plan: Plan | None, fused: FusedUpdates | None) -> None:
    """Writes what generation, exports and a resume read: tokenizer, form of prompts, hub names, plan, fused updates."""
    run.write(TOKENIZER, task.tokenizer.to_json())
    run.write(PROMPTING, to_json({"chat": task.chat, "prompt_end": task.prompt_end}))
    if not (run.path / HUB).exists():
        run.write(HUB, "".join(f"{name}\n" for name in hub_names(config)))
    if plan is not None:
        run.write(PLAN, seal(plan.to_yaml()))
    if fused is not None:
        run.write(FUSED, fused.to_json())


def _model_words(models: Mapping[str, ModelConfig], tokenizer: Tokenizer) -> dict[str, str]:
    """Returns words that identify the models' sizes and the tokenizer's special ids, which its JSON does not have."""
    actor, words = models["actor"], {}
    for role, model in models.items():
        if role == "actor" or model != actor:
            words |= numbers(role, model)
    ids = {name: str(getattr(tokenizer, name)) for name in ("eos_ids", "pad_id", "bos_id", "prefix_ids")}
    ids["special_tokens"] = str(sorted(tokenizer.special_tokens.items()))
    return words | {f"tokenizer.{name}": text for name, text in ids.items()}


def _tell_first(console: Console, config: Config) -> None:
    """Tells the notices of a config, and warnings."""
    for notice in config.notices:
        console.line(notice)
    for warning in warnings_of(config):
        console.warn(warning)


def warnings_of(config: Config) -> list[str]:
    """Returns what a run, and its dry run, warn of before they begin."""
    idle = idle_accelerator() if config.device.platform == "auto" else None
    return [warning for warning in (idle, uncorrected(config), unrepeatable(config)) if warning]


def _headline(config: Config, mesh: Mesh) -> str:
    """Returns the first line of a run: its stages and their lengths, the devices, and the directory."""
    units = {stage: "iterations" if stage == config.algorithm else "steps" for stage in config.stages}
    stages = ", ".join(f"{stage} {config.length(stage)} {unit}" for stage, unit in units.items())
    devices = f"{mesh.size} {mesh.devices.flat[0].device_kind} device{'s' * (mesh.size > 1)}"
    return f"{config.name}: {stages}; {devices}; files in {config.run_dir}/{config.name}"


def _devices_line(mesh: Mesh, plan: Plan | None) -> str:
    """The line of environment.txt that describes the devices."""
    line = f"# {mesh.size} {mesh.devices.flat[0].device_kind} device(s), mesh {dict(mesh.shape)}"
    line += f", {jax.process_count()} process(es)" if several() else ""
    return line if plan is None else f"{line}, plan {plan.name}"


def compute_of(section: ComputeConfig) -> Compute:
    options = ForwardOptions(
        implementation=section.logprob,
        remat=section.remat,
        dtype=jnp.dtype(section.dtype),
        attention=section.attention,
    )
    return Compute(options, fused_loss=section.fused_loss, score_tokens=section.score_tokens)


def load_task(config: Config, actor: ModelConfig) -> Task:
    """Returns the task of a config. Only its kind of data is imported."""
    task = _load_task(config, actor)
    if not config.sampling.stop:
        return task
    from jrlhf.data.stops import with_stop

    tokenizer = with_stop(task.tokenizer, config.sampling.stop, keep=config.sampling.keep_stop)
    return replace(task, tokenizer=tokenizer)


def _load_task(config: Config, actor: ModelConfig) -> Task:
    if config.data.source == "docstrings":
        from jrlhf.tasks.docstrings import task as docstrings

        return docstrings.load_task(config)
    if config.data.source == "arithmetic":
        from jrlhf.tasks.arithmetic import task as arithmetic

        return arithmetic.load_task(config)
    from jrlhf.data import datasets

    assert config.model.path is not None and isinstance(config.data, DatasetsData)
    return datasets.load_task(config, own_tokenizer(config.model.path, "model.path", config.data, actor.vocab_size))


def select_mesh(config: Config) -> tuple[Mesh, dict[str, ModelConfig]]:
    """Returns the config's mesh and the architecture of every role; checks that they fit together."""
    devices = select(config.device, config.distributed)
    models = architectures(config)
    validate(config, len(devices), models)
    _check_kernels(config, models, devices[0].platform)
    data, fsdp, tensor = mesh_sizes(config.mesh, len(devices))
    mesh = make_mesh(data, fsdp, tensor, devices=devices)
    check_sleep(config.offloading, mesh)
    return mesh, models


def architectures(config: Config) -> dict[str, ModelConfig]:
    """Returns role -> architecture, for the roles that the stages need. Reads no files but config.json."""
    if config.model.path is None:
        actor = fresh_model(config.model)
    else:
        _check_sizes_untouched(config.model)
        actor = architecture(config.model.path, "model.path")
    algorithm = None if config.algorithm is None else config.rl.algorithm
    models = {"actor": actor}
    if "reward_model" in config.stages:
        models["reward"] = actor
    needed = {
        "critic": algorithm is not None and algorithm.has_critic,
        "reference": "dpo" in config.stages if algorithm is None else algorithm.needs_reference,
    }
    for role in (role for role, is_needed in needed.items() if is_needed):
        path = getattr(config.roles, role)
        models[role] = actor if path is None else architecture(path, f"roles.{role}")
    if algorithm is None:
        return models
    if config.algorithm == "safe_rlhf":
        models["cost_critic"] = actor
    models |= {name: architecture(role.path, f"roles.{name}.path") for name, role in config.roles.frozen.items()}
    for key, kind, part in config.rewards_and_costs:
        if part.model is not None:
            models[f"{kind} {part.name}"] = architecture(part.model, f"{key}.model")
    return models


def check_sleep(config: SleepConfig, mesh: Mesh) -> None:
    """Checks that the devices have host memory to offload to."""
    offloaded = [key for key in SleepConfig.SWITCHES if getattr(config, key) == "host"]
    try:
        if offloaded:
            check_host_memory(mesh)
    except ValueError as error:
        raise UserError(f"sleep.{offloaded[0]}=host: {error}: set it to device") from error


def _check_sizes_untouched(model: ModelSection) -> None:
    for name, size in changed(replace(model, path=None)):
        raise UserError(
            f"model.{name}={size} and model.path={model.path} are both given: a model directory has its own sizes, "
            "leave one of the two out"
        )


def _check_kernels(config: Config, models: dict[str, ModelConfig], platform: str) -> None:
    """Refuses implementations that the platform, the dtype or a model does not allow."""
    compute, embed = config.compute, models["actor"].embed
    platforms = {"pallas_tpu": "tpu", "pallas_gpu": "gpu", "cudnn": "gpu", "splash": "tpu"}
    for key in ("logprob", "attention"):
        kernel = getattr(compute, key)
        needed = platforms.get(str(kernel), platform)
        if platform != needed:
            raise UserError(f"compute.{key}={kernel} runs on a {needed} only, and this is a {platform}: set it to null")
    if compute.logprob == "pallas_gpu" and (compute.dtype != "bfloat16" or embed % 64):
        raise UserError(
            f"compute.logprob=pallas_gpu needs compute.dtype=bfloat16 and model.embed a multiple of 64 (they are "
            f"{compute.dtype} and {embed}): set it to null"
        )
    if compute.attention == "cudnn" and compute.dtype != "bfloat16":
        raise UserError(f"compute.attention=cudnn needs compute.dtype=bfloat16, not {compute.dtype}: set it to null")
    for role, model in models.items():
        if compute.attention and not computes(compute.attention, model.head_dim, model.attention_softcap):
            raise UserError(
                f"compute.attention={compute.attention} cannot compute the {role}'s attention with "
                f"head_dim={model.head_dim} and softcap={model.attention_softcap}: set it to null"
            )


def check_sources(config: Config, task: Task, actor: ModelConfig, mesh: Mesh) -> dict[str, str]:
    """Reads every model's headers and all adapters, and imports every reward function once. Loads no weights.

    Returns words (see `Identity`) for adapters, the tokenizers of reward models, and reward functions.
    """
    words: dict[str, str] = {}
    from_main(partial(check_wandb, config))
    if config.model.path is not None:
        check_weights(config.model.path, "model.path")
    if config.lora is not None:
        words |= numbers("lora", actor_adapter(config.lora, actor, mesh)[0])
    if config.algorithm is not None and config.roles.critic is not None:
        _check_reader("critic", config.roles.critic, task.tokenizer, head="scalar")
    if config.roles.reference is not None and (config.algorithm is not None or "dpo" in config.stages):
        _check_reader("reference", config.roles.reference, task.tokenizer)
    for name, role in config.roles.frozen.items():
        _check_reader(name, role.path, task.tokenizer)
    for key, kind, part in config.rewards_and_costs if config.algorithm is not None else ():
        if part.model is not None:
            words[f"{kind} {part.name} tokenizer"] = _check_reward_model(part.model, f"{key}.model")
        elif part.adapter is not None:
            adapter, _ = reward_adapter(config, part.adapter, f"{key}.adapter", actor, mesh)
            words |= numbers(f"{kind} {part.name}", adapter)
        elif part.function is not None:
            words |= from_main(partial(_check_function, part, config.seed, kind, task))
    return words


def _check_numbers(config: Config) -> None:
    """Refuses weights with NaN that only a later stage loads, before the first one trains."""
    paths = {f"{key}.model": part.model for key, _, part in config.rewards_and_costs}
    paths |= {f"roles.{role}": path for role, path in config.roles.paths.items()}
    for key, path in paths.items():
        if path is not None:
            is_policy = key.startswith("roles.") and key != "roles.critic"
            check_weights(path, key, head="lm" if is_policy else "scalar", numbers=True)


def _check_reader(role: str, path: str, tokenizer: Tokenizer, *, head: HeadKind = "lm") -> None:
    """Checks a model that reads the actor's tokens. Its table may have more rows, or fewer unused ones."""
    from jrlhf.data.tokenizer_files import load_tokenizer, other_token

    directory = locate(path, f"roles.{role}")
    if tokenizer.directory is not None or (directory / "tokenizer.json").exists():  # for a built-in task it may be none
        if (other := other_token(load_tokenizer(directory), tokenizer)) is not None:
            token, its, actors = other
            raise UserError(
                f"roles.{role}={path} has another tokenizer than the actor: its token {token} is {its!r}, and the "
                f"actor's is {actors!r}, which the {role} reads: choose one of the same family"
            )
    rows = check_weights(path, f"roles.{role}", head=head).model.vocab_size
    if rows < tokenizer.vocab_size:
        raise UserError(
            f"roles.{role}={path} has a vocabulary of {rows}, and the actor's tokenizer has {tokenizer.vocab_size} "
            f"tokens, which the {role} reads: choose a model of the actor's family"
        )


def _check_function(reward: RewardConfig, seed: int, kind: Kind, task: Task) -> dict[str, str]:
    name = str(reward.function).removeprefix(f"{builtin.__name__}:")
    if name in builtin.NAMES:
        builtin.check_options(name, reward.options, f"{kind} {reward.name!r}")
    with FunctionReward(reward, seed, kind=kind) as function:
        if task.prompts is not None:
            function.facts.check_columns(task.prompts.examples[0].columns)
        return function.facts.identity


def _check_reward_model(path: str, key: str) -> str:
    """Checks a reward model that reads text; returns a digest of its tokenizer."""
    from jrlhf.rewards.text_model import is_ours, reward_tokenizer

    checkpoint = check_weights(path, key, head="scalar")
    if checkpoint.head != "scalar":
        raise UserError(
            f"{key}={path} is a language model, which has no head to score with: name a sequence classifier with one "
            "label, such as the reward_model/ of a run"
        )
    tokenizer, pad_id = reward_tokenizer(path, key, checkpoint.model), checkpoint.score_pad_id
    ids = tokenizer.eos_ids, tokenizer.prefix_ids, sorted(tokenizer.special_tokens.items()), is_ours(path, key)
    ids += (pad_id,) if pad_id in tokenizer.eos_ids else ()  # an answer is not read at its end
    return digest_of([tokenizer.to_json(), *tokenizer.templates, str(ids)])
