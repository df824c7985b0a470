"""The plan that a config asks for: one of the usual ones, a file's, or what a search finds."""

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from pathlib import Path

import numpy as np
import yaml

from jrlhf.config.check import mesh_sizes
from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.meshes import Call, Graph
from jrlhf.meshes.plan import Placement, Plan, Slice, plan_of
from jrlhf.models import ModelConfig
from jrlhf.models.flops import forward_operations
from jrlhf.planning.from_config import LAYOUTS, updates_of
from jrlhf.planning.runnable import check_runs, has_model, models_of, on_base
from jrlhf.planning.workload import Workload

USUAL = ("colocate", "split", "standalone", "auto")
PASSES = {"generate": 3.0, "infer": 1.0, "train": 4.0}  # forward passes that a call is worth; decoding waits for memory

Search = Callable[[], Plan]


def plan_of_config(
    config: Config, graph: Graph, models: Mapping[str, ModelConfig], devices: int, search: Search | None = None
) -> Plan:
    """The plan that `config.plan` names, for the calls of the config's algorithm.

        colocate    every call on all devices, as `mesh` divides them
        split       actor and reference on one half, critics and reward models on the other
        standalone  each role on devices of its own, in powers of two, in proportion to what its calls compute
        auto        what `search` finds
        FILE        a file with such a plan as runs write into plan.yaml

    On a part of the devices, `mesh` is scaled down: first its replicas, then fsdp, then tensor.

    Raises:
        UserError: the plan cannot be made, or does not suit the models or the batch.
    """
    calls = [call for call in graph if has_model(call, config)]
    whole = Slice(0, devices)
    if config.plan == "colocate":
        slices = {call.role: whole for call in calls}
    elif config.plan == "split":
        slices = _halves(calls, devices)
    elif config.plan == "standalone":
        slices = _own_slices(config, calls, models, devices)
    else:
        if config.plan != "auto":
            plan = read_plan(Path(config.plan))
        elif search is not None:
            plan = search()
        else:
            raise UserError("plan=auto has no search to ask here: set plan to colocate, split, standalone or a file")
        check_runs(plan, config, graph, models, devices)
        return plan
    placed = {call.name: _placement(config, graph.name, call, slices[call.role], devices) for call in calls}
    plan = Plan(config.plan, placed)
    check_runs(plan, config, graph, models, devices)
    return plan


def colocated(config: Config, workload: Workload, devices: int) -> Plan:
    """Every call of a workload's models on all devices, as `mesh` divides them: how a stage without a plan runs."""
    calls, whole = [call for call in workload.graph if workload.models.get(call.role)], Slice(0, devices)
    placed = {call.name: _placement(config, workload.graph.name, call, whole, devices) for call in calls}
    return Plan("colocate", placed)


def read_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        UserError: it cannot be read, or holds no plan.
    """
    if not path.is_file():
        raise UserError(f"plan={path} is neither {', '.join(USUAL)} nor a file that exists: name one of them")
    try:
        return plan_of(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"plan={path} cannot be read ({reason}): it must be YAML with `calls`") from error
    except ValueError as error:
        raise UserError(f"plan={path}: {error}") from error


def plan_yaml(plan: Plan) -> str:
    """The plan as YAML that `read_plan` reads back to an equal one."""
    return yaml.safe_dump(plan.as_dict(), sort_keys=False)


def _placement(config: Config, stage: str, call: Call, devices: Slice, count: int) -> Placement:
    layout = "generate" if call.role in on_base(config) else LAYOUTS[call.kind]
    _, updates = updates_of(config, stage)
    micro_batches = updates.micro_batches if call.kind == "train" else 1
    data, fsdp, tensor = _sizes(config, devices.count, count)
    return Placement(devices, layout, data, fsdp, tensor, micro_batches=micro_batches)


def _sizes(config: Config, part: int, count: int) -> tuple[int, int, int]:
    """`mesh` on a part of the devices."""
    _, fsdp, tensor = mesh_sizes(config.mesh, count)
    tensor = gcd(tensor, part)
    fsdp = gcd(fsdp, part // tensor)
    return part // (fsdp * tensor), fsdp, tensor


def _halves(calls: Sequence[Call], devices: int) -> dict[str, Slice]:
    if devices % 2:
        raise UserError(f"plan=split halves {devices} device(s): use an even number of them, or set plan=colocate")
    first, second = Slice(0, devices // 2), Slice(devices // 2, devices // 2)
    slices = {call.role: first if call.role in ("actor", "learner", "reference") else second for call in calls}
    if second not in slices.values():
        raise UserError(
            "plan=split has nothing to run on the second half, for there is neither a critic nor a reward model apart "
            "from the actor: set plan=colocate"
        )
    return slices


def _own_slices(
    config: Config, calls: Sequence[Call], models: Mapping[str, ModelConfig], devices: int
) -> dict[str, Slice]:
    """Powers of two: whoever has most to compute for each of its devices gets as many again, while there are so many.

    The largest slices come first, so that each starts at a multiple of its size. A learner is where its actor is.
    """
    owners = {call.role: "actor" if call.role == "learner" else call.role for call in calls}
    work = dict.fromkeys(owners.values(), 0.0)
    lengths = np.array([config.data.max_prompt + config.data.max_response])
    for call in calls:
        passes = PASSES[call.kind] * (config.rl.algorithm.epochs if call.kind == "train" else 1)
        for model in models_of(call.role, config, models):
            work[owners[call.role]] += passes * float(forward_operations(model, lengths, "lm", None))
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
