"""From a config to a context: devices, architectures, data and the run's directory, each checked before the next."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrlhf.algorithms.registry import graph_of
from jrlhf.config.check import mesh_sizes, validate
from jrlhf.config.schema import ComputeConfig, Config, DatasetsData, ModelSection
from jrlhf.data import datasets
from jrlhf.data.task import Task
from jrlhf.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, same_tokens
from jrlhf.errors import UserError
from jrlhf.meshes import make_mesh
from jrlhf.meshes.mesh import Device
from jrlhf.meshes.plan import Plan
from jrlhf.models import ModelConfig
from jrlhf.models.attention import computes
from jrlhf.planning.auto import auto_plan
from jrlhf.planning.fit import check_memory
from jrlhf.planning.plans import plan_of_config, plan_yaml, read_plan, refuse_cross_process
from jrlhf.planning.workload import workload_of
from jrlhf.roles.compiled import Compute
from jrlhf.roles.offloading import check_sleep
from jrlhf.roles.placement import RolePlacement, place_roles
from jrlhf.roles.pretrained import architecture, fresh_model, locate
from jrlhf.run.console import Console
from jrlhf.run.devices import idle_accelerator, select
from jrlhf.run.directory import PLAN, TOKENIZER, Run, open_run, share_run
from jrlhf.run.preemption import PreemptionGuard
from jrlhf.run.processes import from_main, is_main, several
from jrlhf.run.tracking import tracking
from jrlhf.stages.context import Context
from jrlhf.stages.graphs import stage_graph
from jrlhf.stages.preflight import check_sources
from jrlhf.tasks.arithmetic import task as arithmetic
from jrlhf.tasks.docstrings import task as docstrings


@contextmanager
def open_context(config: Config, *, resume: bool) -> Iterator[Context]:
    """Checks everything that a run needs, cheapest first, and opens its directory and services.

    Raises:
        UserError: bad input; nothing has been written.
    """
    mesh, models = select_mesh(config)
    plan = _plan_that_fits(config, mesh, models, resume)
    console = _open_console(config)
    task = _read_data(config, models["actor"], console)
    check_sources(config, task, models["actor"], mesh)
    with (
        _open_run(config, resume, _devices_line(mesh, plan)) as run,
        PreemptionGuard() as preemption,
        tracking(config, run, console.warn) as wandb,
    ):
        if run.changed:
            console.line(f"going on {run.changed}")
        run.write(TOKENIZER, task.tokenizer.to_json())
        if plan is not None:
            run.write(PLAN, plan_yaml(plan))
        yield Context(
            config=config,
            mesh=mesh,
            compute=compute_of(config.compute),
            task=task,
            vocab_size=models["actor"].vocab_size,
            run=run,
            console=console,
            preemption=preemption,
            wandb=wandb,
            placements={} if plan is None else _placements(config, plan, mesh),
        )


def _placements(config: Config, plan: Plan, mesh: Mesh) -> dict[str, RolePlacement]:
    return place_roles(plan, graph_of(config), list(mesh.devices.flat), prefetch=config.offloading.ahead)


def _plan_that_fits(config: Config, mesh: Mesh, models: dict[str, ModelConfig], resume: bool) -> Plan | None:
    """The plan of the algorithm, if there is one. Refuses stages that do not fit into the devices' memory."""
    plan = None if config.algorithm is None else select_plan(config, models, list(mesh.devices.flat), resume=resume)
    graphs = [stage_graph(config, stage) for stage in config.stages]
    from_main(partial(check_memory, config, graphs, mesh, models, plan))
    return plan


def _open_console(config: Config) -> Console:
    console = Console(enabled=is_main())
    for notice in config.notices:
        console.line(notice)
    if config.device.platform == "auto" and (warning := idle_accelerator()):
        console.warn(warning)
    return console


def _read_data(config: Config, actor: ModelConfig, console: Console) -> Task:
    with console.status("reading the data"):
        task = load_task(config, actor)
    for line in task.description.splitlines():
        console.line(line)
    return task


def _open_run(config: Config, resume: bool, note: str) -> Run:
    """The run's directory: process 0 opens and writes it; the others only read."""
    opened: list[Run] = []
    from_main(lambda: opened.append(open_run(config, resume=resume, notes=[note])))
    return opened[0] if opened else share_run(config)


def _devices_line(mesh: Mesh, plan: Plan | None) -> str:
    """The line of environment.txt on the devices."""
    line = f"# {mesh.size} {mesh.devices.flat[0].device_kind} device(s), mesh {dict(mesh.shape)}"
    line += f", {jax.process_count()} process(es)" if several() else ""
    return line if plan is None else f"{line}, plan {plan.name}"


def compute_of(section: ComputeConfig) -> Compute:
    """How the run's models compute."""
    return Compute(
        dtype=jnp.dtype(section.dtype),
        remat=section.remat,
        logprob=section.logprob,
        fused_loss=section.fused_loss,
        attention=section.attention,
        score_tokens=section.score_tokens,
    )


def load_task(config: Config, actor: ModelConfig) -> Task:
    """Reads the task that the config names."""
    if config.data.source == "docstrings":
        return docstrings.load_task(config)
    if config.data.source == "arithmetic":
        return arithmetic.load_task(config)
    return datasets.load_task(config, actor_tokenizer(config, actor))


def actor_tokenizer(config: Config, actor: ModelConfig) -> Tokenizer:
    """The tokenizer in the actor's directory. Refuses another one of a role that reads the actor's tokens."""
    assert config.model.path is not None and isinstance(config.data, DatasetsData)
    directory = locate(config.model.path, "model.path")
    tokenizer = check_vocabulary(load_tokenizer(directory, eos=config.data.eos), actor.vocab_size)
    for role in ("critic", "reference"):
        path = getattr(config.roles, role)
        if path is not None:
            other = load_tokenizer(locate(path, f"roles.{role}"))
            if not same_tokens(other, tokenizer):
                raise UserError(
                    f"roles.{role}={path} has another tokenizer than model.path={config.model.path}: the {role} reads "
                    "the actor's tokens, choose one of the same family"
                )
    return replace(tokenizer, special_tokens={**tokenizer.special_tokens, **config.data.template})


def select_mesh(config: Config) -> tuple[Mesh, dict[str, ModelConfig]]:
    """The mesh that the config asks for, and the architecture of every role; checks that they suit each other."""
    devices = select(config.device, config.distributed)
    models = architectures(config)
    validate(config, len(devices), models)
    _check_kernels(config, models, devices[0].platform)
    data, fsdp, tensor = mesh_sizes(config.mesh, len(devices))
    mesh = make_mesh(data, fsdp, tensor, devices=devices)
    check_sleep(config.offloading, mesh)
    return mesh, models


def select_plan(
    config: Config, models: dict[str, ModelConfig], devices: Sequence[Device], *, resume: bool = False
) -> Plan:
    """The plan of the RL stage. Process 0 decides it for all, for its files and measurements are its own.

    resume: plan=auto is the plan that the run's first search found.
    """
    graph = graph_of(config)

    def search() -> Plan:
        path = Path(config.run_dir).expanduser() / config.name / PLAN
        last = read_plan(path) if resume and path.exists() else None
        return last if last is not None and last.name == "auto" else auto_plan(config, graph, models, devices)

    plan = from_main(lambda: plan_of_config(config, workload_of(config, graph, models), len(devices), search))
    refuse_cross_process(plan, [device.process_index for device in devices])
    return plan


def architectures(config: Config) -> dict[str, ModelConfig]:
    """Role -> architecture, for the roles that the stages need. Reads config.json files at most."""
    if config.model.path is None:
        actor = fresh_model(config.model)
    else:
        _check_sizes_untouched(config.model)
        actor = architecture(config.model.path, "model.path")
    models = {"actor": actor}
    if "reward_model" in config.stages:
        models["reward"] = actor
    if "dpo" in config.stages or config.algorithm is not None:
        critic = config.algorithm is not None and config.rl.algorithm.has_critic
        reference = config.algorithm is None or config.rl.algorithm.needs_reference
        for role in (*(("critic",) if critic else ()), *(("reference",) if reference else ())):
            path = getattr(config.roles, role)
            models[role] = actor if path is None else architecture(path, f"roles.{role}")
            if models[role].vocab_size != actor.vocab_size:
                raise UserError(
                    f"roles.{role}={path} has a vocabulary of {models[role].vocab_size} and the actor one of "
                    f"{actor.vocab_size}: the {role} reads the actor's tokens, choose one of the same family"
                )
    if config.algorithm is not None:
        if config.algorithm == "safe_rlhf":
            models["cost_critic"] = actor
        for kind, parts in (("reward", config.rewards), ("cost", config.costs)):
            for index, part in enumerate(parts):
                if part.model is not None:
                    models[f"{kind} {part.name}"] = architecture(part.model, f"{kind}s[{index}].model")
    return models


def _check_sizes_untouched(model: ModelSection) -> None:
    fresh = ModelSection(path=model.path)
    for name in ModelSection.__dataclass_fields__:
        if getattr(model, name) != getattr(fresh, name):
            raise UserError(
                f"model.{name}={getattr(model, name)} and model.path={model.path} are both given: a model directory "
                "has its own sizes, leave one of the two out"
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
