"""`--dry-run`: describes memory, calls and plan of a run. The sizes of states are exact; nothing is compiled or run."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import indent

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrlhf.algorithms.registry import graph_of, stage_graph
from jrlhf.config.parse import config_yaml
from jrlhf.config.schema import Config, DatasetsData
from jrlhf.config.stages import optimizers_of
from jrlhf.data.read import hub_library, is_hub_name
from jrlhf.data.task import Task
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Prompts, Response
from jrlhf.errors import UserError, printable
from jrlhf.meshes.cost import tree_reshard_cost
from jrlhf.meshes.graph import Call, Graph
from jrlhf.meshes.layout import GENERATE, SCORE, TRAIN, Layout
from jrlhf.meshes.plan import Plan
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.models.params import param_shardings
from jrlhf.planning.fit import backend_of, capacity, memory_of
from jrlhf.planning.fusion.choices import prices_of_rollouts, tiles_of_a_new_run
from jrlhf.planning.fusion.last_rows import RECENT
from jrlhf.planning.fusion.tiles import describe as describe_moves
from jrlhf.planning.fusion.tiles import scored_early
from jrlhf.planning.fusion.updates import fused_updates
from jrlhf.planning.memory import PlanMemory, away_parts, checkpoint_bytes
from jrlhf.planning.plans import colocated
from jrlhf.planning.predict_async import lengths_of_a_new_run
from jrlhf.planning.resolve import select_resources
from jrlhf.planning.show import in_columns
from jrlhf.planning.workload import Workload, workload_of
from jrlhf.rewards.functions import FunctionReward
from jrlhf.rewards.types import Sample, to_samples
from jrlhf.roles.planned_placement import LAYOUTS, place_roles
from jrlhf.roles.pretrained import abstract_weights, is_here
from jrlhf.run.devices import select
from jrlhf.run.files import in_units
from jrlhf.run.processes import from_main
from jrlhf.run.resume import refuse_other_processes
from jrlhf.stages.hooks import load_hooks
from jrlhf.stages.setup import (
    check_sources,
    load_task,
    warnings_of,
)
from jrlhf.storage.mirror import check_place

TRIED = 4  # maximum number of prompts whose made-up answers the reward functions score
SHOWN = 2000  # maximum number of characters of a text


def describe(config: Config, *, all_settings: bool = False) -> str:
    """Returns a text: memory of each role on a device, the plan, the data, and settings that are not the defaults.

    It calls each reward function once, and tests whether the run's directory can be written. It never accesses the hub,
    so weights and data on the hub are described only as far as their names tell.
    """
    select(config.device, config.distributed)  # connects the processes
    refuse_other_processes(config, dry_run=True, resume=False, accept_rewards=False)
    from_main(partial(check_place, config, partial(print, flush=True)))
    load_hooks(config)
    run = _DryRun(config, *select_resources(config))
    data = run.sources()
    settings = config_yaml(config, defaults=all_settings).rstrip()
    head = "all settings:" if all_settings else "settings that are not the defaults (--all prints all):"
    tables = run.memory(), run.calls(), run.plan_rows(), run.step_rows()
    warnings = [f"warning: {warning}" for warning in warnings_of(config)]
    parts = [list(config.notices), warnings, *tables, data, [head, indent(settings, "  ")]]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


@dataclass(frozen=True)
class _DryRun:
    """Describes the parts of a run, each as lines."""

    config: Config
    mesh: Mesh
    models: dict[str, ModelConfig]
    plan: Plan | None

    def sources(self) -> list[str]:
        """The data's description; or the models and datasets that are not on this machine."""
        config, reasons = self.config, list[str]()
        paths = {"model.path": config.model.path}
        paths |= {f"roles.{role}": path for role, path in config.roles.paths.items()}
        paths |= {f"{key}.model": part.model for key, _, part in config.rewards_and_costs}
        if isinstance(config.data, DatasetsData):
            used = {f"data.{key}.path": part.path for key, part in config.data.datasets.items()}
            for path in (path for path in used.values() if path is not None and not is_here(path)):
                reasons += _unread(path)
            paths |= used
        missing = {key: path for key, path in paths.items() if path is not None and not is_here(path)}
        if missing:
            lines = [f"{key}={path} is not here: not looked at" for key, path in missing.items()]
            return [*lines, *reasons, "so neither the data nor the rewards were checked"]
        task = load_task(config, self.models["actor"])
        check_sources(config, task, self.models["actor"], self.mesh)
        lines = [*task.description.splitlines(), *_epochs(config, task), *_first_text(task)]
        if task.prompts is not None:
            samples = _made_answers(config, task.prompts, task.tokenizer)
            lines += from_main(lambda: [*_tried(config, samples)])
        if config.model.path is not None:
            lines.append("weights are not read here: a run reads them before it trains, and refuses those with NaN")
        return lines

    def memory(self) -> list[str]:
        """The memory of each role's state in the last stage."""
        graph = stage_graph(self.config, self.config.stages[-1])
        memory = memory_of(self.config, graph, self.mesh, self.models, self.plan)
        roles = memory.roles
        rows = [(role, in_units(sum(parts.values())), _parts(parts)) for role, parts in roles.items()]
        head = "memory of a device where a role lives, of what it keeps there:"
        return [head, *in_columns(rows), *self._places(graph, memory)]

    def _places(self, graph: Graph, memory: PlanMemory) -> list[str]:
        """The sizes of a stage's state in host memory and on disk, and what saving it adds on a device."""
        config, keep, roles = self.config, self.config.checkpoints.keep, memory.roles
        workload = workload_of(config, graph, self.models)
        lines = list[str]()
        asleep = defaultdict[str, float](float)
        for (role, call), parts in away_parts(config, workload).items():
            asleep[call] += sum(roles[role].get(part, 0.0) for part in parts)
        if host := max(asleep.values(), default=0.0):
            lines.append(f"host memory for what sleeps, at most {in_units(host)} for each device")
        best = self.config.checkpoints.best_in(graph.name) is not None
        room = f"{keep + 1 + best} of them: checkpoints.keep={keep}, {'the best, ' * best}and the one that is written"
        size, saving = map(in_units, (checkpoint_bytes(workload), memory.saving))
        return [
            *lines,
            f"a checkpoint of {graph.name}: {size}; run_dir needs room for {room}; saving takes at most {saving} of a "
            "device in addition to what roles keep",
        ]

    def calls(self) -> list[str]:
        """A table of the calls: all memory of a device during each, and the memory that the call alone needs."""
        rows, config = [("call", "in all", "roles", "the call's own")], self.config
        for stage in config.stages:
            graph = stage_graph(config, stage)
            for phase in memory_of(config, graph, self.mesh, self.models, self.plan).phases:
                if phase.active:
                    own = _parts(dict(sorted(phase.active.items(), key=lambda part: -part[1])))
                    rows.append((phase.call, in_units(phase.total), in_units(phase.resident), own))
        limit, backend = capacity(config, self.mesh.devices.flat), backend_of(config, self.mesh.devices.flat[0])
        room = "" if limit is None else f", which has {in_units(limit)}"
        simulated = "CPUs (device.memory=80: for GPUs of 80 GiB)"
        compiled = {"cpu": simulated, "gpu": "GPUs", "tpu": "TPUs"}[backend.platform]
        sections = [optimizers_of(stage, config.sections[stage]) for stage in config.stages]
        own = [f"{key}.optimizer={one.optimizer}" for section in sections for key, one in section.items()]
        own = [text for text in own if not text.endswith("=adamw")]
        aside = f", without temporary arrays of {', '.join(own)}" * bool(own)
        head = f"memory of one device while a call runs{room}; predicted, as XLA compiles for {compiled}{aside}:"
        return [head, *in_columns(rows)]

    def plan_rows(self) -> list[str]:
        """The plan of an iteration of the algorithm, if there is one; its rewards; and the cost of resharding."""
        config, plan = self.config, self.plan
        if plan is None:
            return []
        graph = graph_of(config)
        workload = workload_of(config, graph, self.models)
        rows: list[tuple[str, ...]] = [_row(call, workload, plan) for call in graph]
        for _, role, part in config.rewards_and_costs:
            source = getattr(part, str(part.kind))
            rows.append((f"{role}.{part.name}", "", f"{part.kind} {source}, weight {part.weight:g}"))
        head = f"plan of an iteration of {config.algorithm}, {plan.name}, on {self.mesh.size} device(s):"
        lines = [head, *in_columns(rows)]
        prices = prices_of_rollouts(config, workload, list(self.mesh.devices.flat))
        if config.compute.score_rows == "auto":
            config, line = tiles_of_a_new_run(config, workload, plan, prices)
            lines.append(f"  {line}")
        if (tile := config.compute.score_rows) is not None:
            early = ", ".join([*scored_early(config, graph, plan), "functions"])
            lines.append(f"  scored {tile} rows at a time while others decode, with the bits of a later time: {early}")
        if config.rollout.last_groups == "auto":
            lines.append(
                f"  the last rows move as the lengths of the last {RECENT} rollouts suggest, of the first not;"
            )
            lines.append("  if lengths were lognormal with sigma 1, and half of data.max_response in the mean:")
            tiled, lengths = config, lengths_of_a_new_run(workload)
            lines += [f"  {line}" for line in from_main(lambda: describe_moves(tiled, prices(), plan, lengths))]
        if config.lora is not None:
            return [*lines, f"  no switch: training and generation use one base, stored as {GENERATE.name} stores it"]
        actor, dtype = self.models["actor"], jnp.dtype(config.compute.dtype)
        fused = fused_updates(workload, plan, self.mesh.size // jax.process_count())
        places = place_roles(plan, graph, list(self.mesh.devices.flat), fused=fused)["actor"]
        generation = param_shardings(actor, places["generate"].mesh, GENERATE)
        cost = tree_reshard_cost(abstract_weights(actor, places.home.mesh), generation, dtype=dtype)
        last = (
            f"  the switch to {GENERATE.name}: {in_units(max(cost.received.values()))} received by a device, "
            f"{in_units(max(cost.redundant.values()))} held that it does not use"
        )
        return [*lines, last]

    def step_rows(self) -> list[str]:
        """The plan of a step of DPO, and of each stage in pipeline stages."""
        config, lines = self.config, list[str]()
        sizes = " x ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        for stage in config.stages:
            pipelined = getattr(config.sections[stage], "pipeline", None) is not None
            if stage == "dpo" or pipelined:
                graph = stage_graph(config, stage)
                workload = workload_of(config, graph, self.models)
                plan = colocated(config, workload, self.mesh.size) if pipelined else None
                calls = [call for call in graph if call.kind != "compute" or call.role not in workload.models]
                rows = [_row(call, workload, plan) for call in calls]
                lines += [f"plan of a step of {stage} on {sizes}:", *in_columns(rows)]
        return lines


def _unread(source: str) -> list[str]:
    """Returns why a run on this machine cannot download a dataset, if it cannot. Refuses what is no name on the hub."""
    try:
        hub_library(source)
    except UserError as error:
        if not is_hub_name(source):
            raise
        return [str(error)]
    return []


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {in_units(count)}" for part, count in parts.items())


def _epochs(config: Config, task: Task) -> Iterator[str]:
    """How long a stage takes for all prompts, or all rows of SFT, once."""
    if task.sft is not None and "sft" in config.stages:
        yield f"an epoch of sft is {task.sft.count / config.sft.batch:.4g} steps"
    if task.prompts is not None and config.algorithm is not None:
        most = "at most " if config.algorithm == "dapo" else ""  # which may draw several batches in an iteration
        whole = len(task.prompts.ids) * config.samples / config.rl.rollout_batch
        weights = sum(source.weight for source in task.prompts.sources)
        for source in task.prompts.sources:
            own = source.count * config.samples / config.rl.rollout_batch * weights / source.weight
            yield f"an epoch of {source.name} is {most}{own:.4g} iterations"
        if not task.prompts.sources:
            yield f"an epoch is {most}{whole:.4g} iterations"


def _first_text(task: Task) -> list[str]:
    """The first prompt or, in a run without prompts, the first text to learn, with all special tokens."""
    if task.prompts is not None:
        what, ids = "prompt", task.prompts.ids[0]
    elif task.sft is not None:
        what, ids = "text to learn", task.sft.batch(np.zeros(1, np.int64), 0).ids[0]
    else:
        return []
    text = printable(task.tokenizer.decode(ids, special=True))
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
    return [f"the first {what}, as the model reads it:", indent(shown, "  ")]


def _made_answers(config: Config, prompts: Prompts, tokenizer: Tokenizer) -> list[Sample]:
    """Answers to a few prompts, to each as many as in a group but at least two: its reference, if any, and others."""
    limit, samples = config.data.max_response - 1, list[Sample]()
    distinct = [*{text: row for row, text in enumerate(prompts.texts)}.values()]
    for row in dict.fromkeys(distinct[len(distinct) * part // TRIED] for part in range(TRIED)):
        example = prompts.examples[row]
        answers = [f"This is answer {number}." for number in range(1, max(2, config.samples) + 1)]
        if example.completion is not None:
            reference = example.completion
            answers[0] = reference if isinstance(reference, str) else str(reference[-1].get("content"))
        tokens = [(*tokenizer.encode(answer)[:limit], tokenizer.eos_id) for answer in answers]
        responses = [Response(ids, answer, True) for ids, answer in zip(tokens, answers, strict=True)]
        samples += to_samples([example] * len(answers), [prompts.texts[row]] * len(answers), responses)
    return samples


def _tried(config: Config, samples: Sequence[Sample]) -> Iterator[str]:
    """Calls each reward function once, as a run would, and yields lines on the scores. Raises RewardFailure."""
    if any(part.function is not None for _, _, part in config.rewards_and_costs):
        shown = ", ".join(printable(repr(sample.response.text[:60])) for sample in samples[:2])
        answers = f"{len(samples)} made-up answers ({shown} ...) to {len({sample.prompt_text for sample in samples})}"
        yield f"scores of {answers} prompt(s), which show that functions work, and no more:"
    for _, kind, part in config.rewards_and_costs:
        if part.function is not None:
            with FunctionReward(part, config.seed, kind=kind, steps=config.rl.iterations) as function:
                scored = function.score(samples)
            scores = ", ".join(f"{score:.4g}" if np.isfinite(score) else "none" for score in scored.scores)
            failed = ", ".join(f"{count} {failure}" for failure, count in scored.failures.items())
            failed = f" (on_failure for failed ones: {failed}; the last: {scored.last_failure})" if failed else ""
            yield f"  {kind} {part.name}: {scores}{failed}"


def _row(call: Call, workload: Workload, plan: Plan | None = None) -> tuple[str, ...]:
    """A call, its devices (only with a plan), its layout, and its inputs and outputs."""
    flow = f"{', '.join(call.inputs)} -> {', '.join(call.outputs)}".lstrip()
    if plan is not None and call.name in plan.placements:
        placed = plan[call.name]
        sizes = zip(("data", "fsdp", "tensor"), placed.sizes, strict=True)
        parts = f" in {placed.micro_batches} parts" if placed.micro_batches > 1 else ""
        by = f" by {placed.schedule}" if call.kind == "train" else ""
        parts += f", {placed.pipeline} stages{by}" if placed.pipeline > 1 else ""
        location = f"devices {placed.devices}: {' x '.join(f'{axis}={size}' for axis, size in sizes)}"
        return call.name, location, _layout(LAYOUTS[placed.layout]) + parts, flow
    if call.kind == "compute":
        layout = "arithmetic"
    elif not workload.has_model(call):
        layout = "functions, beside the rest"
    else:
        layout = _layout(GENERATE if workload.on_base(call.role) else {"infer": SCORE, "train": TRAIN}[call.kind])
    return call.name, *(() if plan is None else ("",)), layout, flow


def _layout(layout: Layout) -> str:
    return f"layout {layout.name:<9} rows over {', '.join(layout.batch)}"
