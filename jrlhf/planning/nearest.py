"""What to change where a plan does not fit: the fewest settings, each as mild as it can be, that by the model do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf
from typing import Any

from jrlhf.meshes.plan import Placement, Plan, Slice
from jrlhf.models import LoRAConfig
from jrlhf.models.remat import REMATS
from jrlhf.planning.activations import DEFAULT, Backend
from jrlhf.planning.memory import keepers, plan_memory
from jrlhf.planning.residency import Away, Place
from jrlhf.planning.workload import RoleModel, Workload

STRONGER = tuple(reversed(REMATS))  # from the one that keeps most to the one that keeps least
ADAPTER = LoRAConfig(rank=16, alpha=32.0)
MOST_DEVICES = 4096
TOGETHER = 3  # settings that are changed at a time


@dataclass(frozen=True)
class Case:
    """What can be changed."""

    workload: Workload
    plan: Plan
    away: Away


@dataclass(frozen=True)
class Setting:
    """Changes that together fit. peak: bytes of the device that then needs most.

    changes: "micro_batches", of every call that trains; "remat"; "slots"; "fsdp", with data=1; "sleep", what is in the
        host's memory while nothing trains; "lora", a rank; "devices", all of them for fsdp, with the micro-batches that
        they leave.
    """

    changes: Mapping[str, Any]
    peak: float


def nearest(
    workload: Workload, plan: Plan, capacity: float, backend: Backend = DEFAULT, *, away: Away | None = None
) -> list[Setting]:
    """The nearest settings whose peak is at most `capacity` bytes a device; [] where the plan fits, or nothing does.

    Those with the fewest changes, of each kind of change the mildest; and adapters, where they alone suffice. More
    devices are asked for only where no other setting fits.

    away: what sleeps already, as in `plan_memory`.
    """

    def peak(case: Case) -> float:
        try:
            return plan_memory(case.workload, case.plan, backend, away=case.away).peak
        except ValueError:  # a model cannot be divided so
            return inf

    case = Case(workload, plan, away or {})
    if peak(case) <= capacity:
        return []
    kinds = {name: list(make(case)) for name, make in _KINDS.items()}
    adapters = _mildest(case, ["lora"], [kinds.pop("lora")], peak, capacity)  # another run, not another way to run it
    instead = [] if adapters is None else [adapters]
    for count in range(1, TOGETHER + 1):
        found = []
        for names in combinations(kinds, count):
            fitting = _mildest(case, names, [kinds[name] for name in names], peak, capacity)
            found += [] if fitting is None else [fitting]
        if found:
            return found + instead
    if instead:
        return instead
    for devices in _doubled(plan.devices):
        if workload.rows // workload.minibatches % devices:
            break
        more = _on(plan, devices // plan.devices)
        size = peak(replace(case, plan=more))
        if size <= capacity:
            parts = _parts(case.workload, more)
            changed = {} if parts == _parts(case.workload, plan) else {"micro_batches": parts}
            return [Setting({"devices": devices, **changed}, size)]
    return []


Change = tuple[Any, Callable[[Case], Case]]  # a value, and what it does


def _mildest(
    case: Case,
    names: Sequence[str],
    changes: Sequence[Sequence[Change]],
    peak: Callable[[Case], float],
    capacity: float,
) -> Setting | None:
    """The first of all combinations, in the order of their steps together, that fits."""
    steps = product(*(range(len(each)) for each in changes))
    for step in sorted(steps, key=sum):
        changed = case
        for at, each in zip(step, changes, strict=True):
            changed = each[at][1](changed)
        size = peak(changed)
        if size <= capacity:
            values = {name: each[at][0] for name, at, each in zip(names, step, changes, strict=True)}
            return Setting(values, size)
    return None


def _micro_batches(case: Case) -> Iterator[Change]:
    training = [call.name for call in case.workload.graph if call.kind == "train" and call.name in case.plan.placements]
    placed = [case.plan[name] for name in training]
    if not placed:
        return
    rows = case.workload.rows // case.workload.minibatches
    most = min(rows // each.devices.count for each in placed)
    for parts in _doubled(_parts(case.workload, case.plan)):
        if parts > most or any(rows % (each.devices.count * parts) for each in placed):
            return
        yield parts, lambda case, parts=parts: _placed(case, lambda at: replace(at, micro_batches=parts), training)


def _remat(case: Case) -> Iterator[Change]:
    for remat in STRONGER[STRONGER.index(case.workload.remat) + 1 :]:
        yield remat, lambda case, remat=remat: replace(case, workload=replace(case.workload, remat=remat))


def _slots(case: Case) -> Iterator[Change]:
    workload = case.workload
    generating = [call.name for call in workload.graph if call.kind == "generate" and call.name in case.plan.placements]
    if not generating:
        return
    count = max(case.plan[name].devices.count for name in generating)
    groups = max(case.plan[name].data * case.plan[name].fsdp for name in generating)
    slots = (workload.slots or workload.rows) // 2
    while slots and slots % count == 0 and slots >= workload.samples * groups:
        yield slots, lambda case, slots=slots: replace(case, workload=replace(case.workload, slots=slots))
        slots //= 2


def _fsdp(case: Case) -> Iterator[Change]:
    placed = case.plan.placements.values()
    if any(each.data > 1 for each in placed):
        fsdp = max(each.data * each.fsdp for each in placed)
        yield fsdp, lambda case: _placed(case, lambda at: replace(at, data=1, fsdp=at.data * at.fsdp))


def _sleep(case: Case) -> Iterator[Change]:
    trained = [role for role, models in keepers(case.workload).items() if any(model.trained for model in models)]
    calls = [call for call in case.workload.graph if call.kind in ("generate", "infer")]
    gone: Mapping[str, Place] = {"optimizer": "pinned_host"}
    asleep = {(role, call.name): {**case.away.get((role, call.name), {}), **gone} for role in trained for call in calls}
    yield "optimizer", lambda case: replace(case, away={**case.away, **asleep})


def _lora(case: Case) -> Iterator[Change]:
    actor = case.workload.models.get("actor")
    if actor and actor[0].lora is None and actor[0].config.gated_mlp and actor[0].config.positions == "rotary":
        yield ADAPTER.rank, lambda case: replace(case, workload=_adapted(case.workload))


_KINDS: dict[str, Callable[[Case], Iterator[Change]]] = {
    "micro_batches": _micro_batches,
    "remat": _remat,
    "slots": _slots,
    "fsdp": _fsdp,
    "sleep": _sleep,
    "lora": _lora,
}


def _adapted(workload: Workload) -> Workload:
    """With adapters in place of all models that have the actor's architecture and are trained, or are as it began."""
    config = workload.models["actor"][0].config

    def adapted(model: RoleModel) -> RoleModel:
        if model.config != config or (not model.trained and model.head == "scalar"):
            return model
        return replace(model, lora=ADAPTER if model.trained else None, is_base=not model.trained)

    return replace(workload, models={role: tuple(map(adapted, each)) for role, each in workload.models.items()})


def _placed(case: Case, change: Callable[[Placement], Placement], calls: Sequence[str] | None = None) -> Case:
    placements = {
        name: change(each) if calls is None or name in calls else each for name, each in case.plan.placements.items()
    }
    return replace(case, plan=replace(case.plan, placements=placements))


def _parts(workload: Workload, plan: Plan) -> int:
    """Micro-batches of an update: the most of any."""
    training = (call.name for call in workload.graph if call.kind == "train" and call.name in plan.placements)
    return max((plan[name].micro_batches for name in training), default=1)


def _on(plan: Plan, times: int) -> Plan:
    """The plan on so many times the devices, all of them for fsdp, with parts of as many rows, or one of all."""

    def more(at: Placement) -> Placement:
        devices = Slice(at.devices.start * times, at.devices.count * times)
        return replace(at, devices=devices, fsdp=at.fsdp * times, micro_batches=max(1, at.micro_batches // times))

    return replace(plan, placements={name: more(each) for name, each in plan.placements.items()})


def _doubled(count: int) -> Iterator[int]:
    while count < MOST_DEVICES:
        count *= 2
        yield count
