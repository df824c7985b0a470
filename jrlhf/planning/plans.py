"""Makes the plan that a config names, and checks that a run can follow it."""

from collections.abc import Callable, Sequence
from itertools import combinations
from math import ceil, gcd, lcm
from pathlib import Path

import numpy as np

from jrlhf.config.check import mesh_sizes
from jrlhf.config.parse import parse_yaml
from jrlhf.config.places import expanded
from jrlhf.config.schema import Config
from jrlhf.errors import UserError, alike, beside, one_line
from jrlhf.meshes.graph import Call
from jrlhf.meshes.plan import LayoutName, Placement, Plan, Slice, nested, plan_of
from jrlhf.models.config.divisors import divisors, indivisible
from jrlhf.models.flops import forward_operations
from jrlhf.planning.rows import stuck_rows, undivided_rows
from jrlhf.planning.workload import LAYOUTS, Workload, token_budgets
from jrlhf.roles.graph import LEARNER
from jrlhf.roles.planned_placement import staged

NAMES = ("colocate", "split", "standalone", "disaggregated", "auto")
FUSED = "actor.update", "critic.update"  # the calls that one table can train
PASSES = {"generate": 3.0, "infer": 1.0, "train": 4.0}  # cost of a call in forward passes; decoding is memory-bound


def plan_of_config(config: Config, workload: Workload, devices: int, search: Callable[[], Plan] | None = None) -> Plan:
    """Returns the plan that `config.plan` names, checked.

        colocate    every call on all devices, as `mesh` divides them
        split       actor and reference on one half, critics and reward models on the other
        standalone  each role on its own devices, in powers of two, in proportion to the cost of its calls
        disaggregated  rollouts on the second half of the devices, everything else on the first
        auto        the plan that `search` returns
        FILE        a file with such a plan as runs write into plan.yaml

    On a part of the devices `mesh` is scaled down: first its replicas, then fsdp, then tensor.
    """
    if config.plan == "auto":
        if search is None:
            raise UserError("plan=auto has no search to ask here: set plan to colocate, split, standalone or a file")
        plan = search()
    elif config.plan in NAMES:
        slices = _slices(config.plan, workload, devices)
        calls = workload.calls
        placed = {call.name: scaled_placement(config, workload, call, slices[call.name], devices) for call in calls}
        plan = Plan(config.plan, placed)
    else:
        plan = read_plan(expanded(config.plan, "plan"))
    validate_plan(plan, config, workload, devices)
    return plan


def colocated(config: Config, workload: Workload, devices: int) -> Plan:
    """Returns the plan of a stage without a plan of its own, checked: every model on all devices, as `mesh` divides
    them, and in the pipeline stages that the stage's section sets."""
    stage, whole, placements = workload.graph.name, Slice(0, devices), dict[str, Placement]()
    for call in [call for call in workload.graph if call.role in workload.models]:
        placed = staged(config, stage, call.kind, scaled_placement(config, workload, call, whole, devices))
        placements[call.name] = placed
        if placed.pipeline > 1:
            _check_placement(f"{stage}.pipeline has {call.name}", workload, call, placed, devices)
            _check_rows(f"{stage}.pipeline has {call.name}", config, workload, call, placed)
    return Plan("colocate", placements)


def read_plan(path: Path) -> Plan:
    if not path.is_file():
        remedy = alike(str(path), NAMES, beside(path, "name one of them"))
        raise UserError(f"plan={path} is neither {', '.join(NAMES)} nor a file that exists: {remedy}")
    try:
        return plan_of(parse_yaml(path.read_text(encoding="utf-8"), f"plan={path}"))
    except (OSError, UnicodeDecodeError) as error:
        reason = one_line(error)
        raise UserError(f"plan={path} cannot be read ({reason}): it must be YAML with `calls`") from error
    except ValueError as error:
        raise UserError(f"plan={path}: {error}") from error


def scaled_placement(config: Config, workload: Workload, call: Call, devices: Slice, count: int) -> Placement:
    """Returns the usual placement of a call on a part of `count` devices: `mesh` of the config, scaled down."""
    layout: LayoutName = "generate" if workload.on_base(call.role) else LAYOUTS[call.kind][0]
    _, updates = config.update_section(workload.graph.name)
    micro_batches = updates.micro_batches if call.kind == "train" else 1
    _, fsdp, tensor = mesh_sizes(config.mesh, count)
    tensor = gcd(tensor, devices.count)
    fsdp = gcd(fsdp, devices.count // tensor)
    return Placement(devices, layout, devices.count // (fsdp * tensor), fsdp, tensor, micro_batches=micro_batches)


def _slices(plan: str, workload: Workload, devices: int) -> dict[str, Slice]:
    """Returns the devices of each call, by the rule of this name (`plan_of_config`)."""
    if plan == "colocate":
        return {call.name: Slice(0, devices) for call in workload.calls}
    if plan == "standalone":
        slices = _own_slices(workload, devices)
        return {call.name: slices[call.role] for call in workload.calls}
    if devices % 2:
        raise UserError(f"plan={plan} halves {devices} device(s): use an even number of them, or set plan=colocate")
    first, second = Slice(0, devices // 2), Slice(devices // 2, devices // 2)
    if plan == "disaggregated":
        return {call.name: second if call.kind == "generate" else first for call in workload.calls}
    policy = "actor", LEARNER, "reference"
    slices = {call.name: first if call.role in policy else second for call in workload.calls}
    if second not in slices.values():
        raise UserError(
            "plan=split has nothing to run on the second half, for there is neither a critic nor a reward model apart "
            "from the actor: set plan=colocate"
        )
    return slices


def _own_slices(workload: Workload, devices: int) -> dict[str, Slice]:
    """Returns a slice of a power of two devices for each role.

    Repeatedly, the role with the highest cost per device doubles its devices, while there are enough. The largest
    slices come first, so that each starts at a multiple of its size. A fused update runs where its actor does.
    """
    owners = {call.role: "actor" if call.role == LEARNER else call.role for call in workload.calls}
    work = dict.fromkeys(owners.values(), 0.0)
    lengths = np.array([workload.length])
    for call in workload.calls:
        passes = PASSES[call.kind] * (workload.epochs if call.kind == "train" else 1)
        for model in workload.models[call.role]:
            work[owners[call.role]] += passes * float(forward_operations(model.config, lengths, model.head))
    if len(work) > devices:
        raise UserError(
            f"plan=standalone needs a device for each of {', '.join(work)}, and there are {devices}: use more, or set "
            "plan=colocate"
        )
    counts = dict.fromkeys(work, 1)
    while fitting := [role for role in work if sum(counts.values()) + counts[role] <= devices]:
        counts[max(fitting, key=lambda role: work[role] / counts[role])] *= 2
    slices, start = {}, 0
    for role in sorted(counts, key=lambda role: -counts[role]):
        slices[role] = Slice(start, counts[role])
        start += counts[role]
    return {role: slices[owner] for role, owner in owners.items()}


# ---- checks


def validate_plan(plan: Plan, config: Config, workload: Workload, devices: int) -> None:
    """Refuses a plan that the config's algorithm cannot run, with the first reason and its remedy."""
    named, calls = f"plan={config.plan}", {call.name: call for call in workload.calls}
    missing, unknown = calls.keys() - plan.placements.keys(), plan.placements.keys() - calls.keys()
    if missing:
        first = next(name for name in calls if name in missing)
        raise UserError(f"{named} has no place for {first}: add it to its calls")
    if unknown:
        raise UserError(
            f"{named} has a place for {min(unknown)}, which {workload.graph.name} does not call with a model: leave it "
            f"out; its calls are {', '.join(calls)}"
        )
    for name, call in calls.items():
        _check_placement(f"{named} has {name}", workload, call, plan[name], devices)
        _check_rows(f"{named} has {name}", config, workload, call, plan[name])
    if config.asynchronous is not None:
        _check_asynchronous(named, config, workload, plan)
    _check_base(named, config, workload, plan, devices)
    if plan.fused:
        _check_fused(named, config, workload, plan)
    refuse_partial_overlap(plan)


def _check_fused(named: str, config: Config, workload: Workload, plan: Plan) -> None:
    """Refuses updates that cannot run in one table."""
    actor, critic = FUSED
    if plan.fused != FUSED:
        raise UserError(
            f"{named} has schedule=fused for {' and '.join(plan.fused)}, and it trains {actor} and {critic} together: "
            "give it to both of them and to no other call, or leave it out"
        )
    one, two = plan[actor], plan[critic]
    if one.devices != two.devices:
        raise UserError(
            f"{named} fuses {actor} on devices {one.devices} and {critic} on {two.devices}: put both on the same ones"
        )
    groups = lcm(one.pipeline, two.pipeline)
    for name, placed in ((actor, one), (critic, two)):
        if placed.data % (groups // placed.pipeline):
            raise UserError(
                f"{named} fuses pipelines of {one.pipeline} and {two.pipeline} stages, for which {name} needs "
                f"{groups // placed.pipeline} pipelines, and has data={placed.data}: make it a multiple of that"
            )
    calls = list(workload.graph)
    start, end = sorted(calls.index(workload.graph[name]) for name in FUSED)
    first, second = calls[start], calls[end]
    for number, call in enumerate(calls[start + 1 :], start + 1):
        again = call.kind == "train" and call.role in ("actor", "critic") and call.name not in FUSED
        needs = number <= end and (call.role == first.role or set(call.inputs) & set(first.outputs))
        if again or needs:
            why = "trains one of them again" if again else "needs the first of them before both have begun"
            raise UserError(
                f"{named} fuses {first.name} and {second.name}, and {call.name} {why}: give each a schedule of its own"
            )
    asleep = [key for key in ("optimizer", "actor", "critic") if getattr(config.offloading, key) == "host"]
    if asleep:
        raise UserError(
            f"{named} fuses {actor} and {critic}, which need both models' states at a time, and sleep.{asleep[0]}=host "
            "keeps only one of them on the devices: leave it out"
        )


def _check_base(named: str, config: Config, workload: Workload, plan: Plan, devices: int) -> None:
    """Refuses to compute with the base that adapters share on several meshes, except for rollouts."""
    on_base = [call for call in workload.calls if workload.on_base(call.role)]
    if not on_base:
        return
    *_, tensor = mesh_sizes(config.mesh, devices)
    places = {(plan[call.name].devices, plan[call.name].stored) for call in on_base if call.kind != "generate"}
    for call in on_base:
        own = plan[call.name]
        if len(places) > 1 or own.tensor != tensor:
            raise UserError(
                f"{named} has {call.name} on devices {own.devices}, and what lora adapts is one base on all {devices}, "
                f"with tensor={tensor}: put all its calls but rollouts on one slice, with one data and one "
                "fsdp x pipeline, or set plan=colocate"
            )


def _check_asynchronous(named: str, config: Config, workload: Workload, plan: Plan) -> None:
    """Refuses settings that rollouts on their own devices do not support."""
    algorithm = config.algorithm
    key = f"{algorithm}.asynchronous"
    drawing = [call.name for call in workload.calls if call.kind == "generate"]
    if drawing != ["actor.generate"]:
        raise UserError(
            f"{key} draws each prompt's responses once and ahead, and {algorithm} calls {', '.join(drawing)}: leave "
            "asynchronous out"
        )
    if LEARNER in workload.graph.roles:
        raise UserError(
            f"{key} learns from older rollouts, and compute.shared_passes from its own: leave one of them out"
        )
    check_slots(config, plan[drawing[0]])
    if config.fleet is not None:
        return
    for call in workload.calls:
        if call.name not in drawing and plan[call.name].devices.overlaps(plan[drawing[0]].devices):
            halved = "plan=disaggregated, which halves the devices, or " if plan.devices % 2 == 0 else ""
            raise UserError(
                f"{named} has {drawing[0]} and {call.name} on the same devices, and {key} draws on devices of its own: "
                f"set {halved}fleet.workers=1, which draws in another process, or leave asynchronous out"
            )


def check_slots(config: Config, drawing: Placement) -> None:
    """Refuses slots that the logical workers of an asynchronous run cannot share."""
    if not shares_slots(config, drawing):
        count, groups = drawing.devices.count, drawing.groups
        slots, workers = config.rollout.slots or config.rl.rollout_batch, config.logical_workers
        least = workers * lcm(count, config.samples * groups)  # whole prompts on every device
        raise UserError(
            f"rollout.slots={slots} must give each of {workers} logical worker(s) a multiple of its {count} device(s), "
            f"and {config.samples} slots for each of {groups} group(s) of devices: choose rollout.slots="
            f"{ceil(slots / least) * least}"
        )


def shares_slots(config: Config, drawing: Placement) -> bool:
    """Returns whether each logical worker gets equal slots on every device, and enough for a prompt's responses."""
    count, workers = drawing.devices.count, config.logical_workers
    slots = config.rollout.slots or config.rl.rollout_batch
    return slots % (workers * count) == 0 and slots // (workers * drawing.groups) >= config.samples


def refuse_partial_overlap(plan: Plan) -> None:
    """Refuses partly overlapping slices, between which neither weights nor values can move without the host."""
    placed = list(plan.placements.items())
    for index, (name, placement) in enumerate(placed):
        for other, others in placed[:index]:
            one, two = others.devices, placement.devices
            if not nested([one, two]):
                union = Slice(min(one.start, two.start), max(one.stop, two.stop) - min(one.start, two.start))
                raise UserError(
                    f"devices {one} of {other} and {two} of {name} overlap in part: let them be the same, apart, or "
                    f"one within the other, such as {union} and {two}"
                )


def _check_placement(named: str, workload: Workload, call: Call, placement: Placement, devices: int) -> None:
    if placement.devices.stop > devices:
        raise UserError(
            f"{named} on devices {placement.devices}, and there are {devices}, numbered from 0: choose others, or use "
            "more"
        )
    if placement.pipeline > 1:
        _check_stages(named, workload, call, placement)
    layouts, whose = workload.layouts(call), f"a call to {call.kind}"
    if workload.on_base(call.role):
        whose = "a shared base"
    elif call.kind == "infer" and placement.pipeline == 1:
        layouts = (*layouts, "generate")  # runs, but is never faster
    if placement.layout not in layouts:
        raise UserError(f"{named} in layout={placement.layout}, and {whose} needs {' or '.join(layouts)}: choose that")
    for model in workload.models[call.role]:
        for key, written, size, axis, parts in indivisible(model.config, *placement.stored[1:]):
            choices = ", ".join(str(divisor) for divisor in divisors(size) if divisor <= placement.devices.count)
            raise UserError(
                f"{named} with {axis}={parts}, which does not divide its model's {key}={written}: choose {axis} from "
                f"{choices}"
            )


def _check_stages(named: str, workload: Workload, call: Call, placement: Placement) -> None:
    """Refuses pipelines that no run executes."""
    stages, parts = placement.pipeline, placement.micro_batches
    named = f"{named} in pipeline={stages} stages"
    if call.kind == "generate" or call.role == LEARNER:
        raise UserError(
            f"{named}, and only calls that score, or update one model, run in stages: use fsdp or tensor instead"
        )
    by = f"schedule={placement.schedule}" if call.kind == "train" else "scoring"
    if call.kind == "infer" and placement.schedule != "1f1b":
        raise UserError(f"{named} of schedule={placement.schedule}, which only updates have: leave the schedule out")
    if call.kind == "infer" and workload.score_rows is not None:
        raise UserError(
            f"{named}, and compute.score_rows={workload.score_rows} scores rows in tiles without stages: leave one out"
        )
    layers = min(model.config.layers for model in workload.models[call.role])
    chunks = 2 if placement.schedule == "interleaved" else 1
    if layers < stages * chunks:
        fewer = f"at most {layers // chunks}" if layers >= 2 * chunks else "another schedule, or no"
        raise UserError(
            f"{named} of {by}, which need {stages * chunks} layers, and its model has {layers}: choose {fewer} stages"
        )
    if parts < stages or (placement.schedule == "interleaved" and parts % stages):
        needed = "a multiple of" if placement.schedule == "interleaved" else "at least"
        raise UserError(f"{named} with micro_batches={parts}: {by} needs {needed} {stages} of them")


def _check_rows(named: str, config: Config, workload: Workload, call: Call, placement: Placement) -> None:
    parts = placement.micro_batches
    if call.kind == "generate" and parts > 1:
        raise UserError(
            f"{named} in micro_batches={parts}: leave that out, and set rollout.slots, the rows that decode at a time"
        )
    if (reason := stuck_rows(workload, call, placement)) is not None:
        raise UserError(f"{named}, which {reason}")
    for rule in undivided_rows(workload, call, placement):
        raise UserError(f"{named}, where {rule}")
    keys = {"infer": "compute.score_tokens", "train": f"{workload.graph.name}.algorithm.micro_batch_tokens"}
    tokens = token_budgets(config, workload.graph.name).get(call.kind)
    if parts > 1 and tokens is not None:
        raise UserError(
            f"{named} in micro_batches={parts}, and {keys[call.kind]}={tokens} divides them, too: leave one out"
        )
    if parts > 1 and call.role == LEARNER:
        raise UserError(f"{named} in micro_batches={parts}, and shared passes are one: leave that out")


def refuse_cross_process(plan: Plan, process_of: Sequence[int]) -> None:
    """Refuses a plan whose slices cut a tensor group, if there are several processes.

    process_of: the number of each device's process, in the plan's order of the devices.
    """
    processes, all_devices = len(set(process_of)), len(process_of)
    if processes == 1:
        return
    for call, placement in plan.placements.items():
        devices, tensor, own = placement.devices, placement.tensor, all_devices // processes
        for start in range(devices.start, devices.stop, tensor):  # a larger group needs several processes anyway
            if tensor <= own and process_of[start] != process_of[start + tensor - 1]:
                raise UserError(
                    f"plan {plan.name} runs {call} on devices {devices} with tensor={tensor}, and devices "
                    f"{Slice(start, tensor)} of a tensor group belong to two processes: choose a tensor that divides "
                    f"{own}, and devices from a multiple of it on"
                )


def transfer_line(plan: Plan, process_of: Sequence[int]) -> str | None:
    """Returns a line on how arrays move between a plan's slices, stages included; None: there is only one slice.

    process_of: as in `refuse_cross_process`.
    """
    slices = {placement.devices for placement in plan.placements.values()}
    for placement in plan.placements.values():
        count = placement.devices.count // placement.pipeline
        slices |= {Slice(start, count) for start in range(placement.devices.start, placement.devices.stop, count)}
    if len(slices) == 1:
        return None
    owners = [set(process_of[one.start : one.stop]) for one in slices]
    ways = {len(one | other) > 1 for one, other in combinations(owners, 2)}
    texts = {False: "copies from device to device within a process", True: "collective copies between processes"}
    return f"plan {plan.name}: arrays move between slices by {' and '.join(texts[way] for way in sorted(ways))}"
