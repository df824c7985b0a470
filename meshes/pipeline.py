"""Pipeline schedules as plain data: which operation of which stage and micro-batch runs when.

A pipeline cuts a model into stages of consecutive layers. Forwards go up the stages, backwards come down. A table lists
the operations of one training step, of one model or of several that share the devices. Nothing here computes with
arrays.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Literal, NamedTuple, TypeAlias, get_args

Kind = Literal["forward", "backward", "weight"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "fused"]


class PipelineStep(NamedTuple):
    """One operation of a device. model: the number of its pipeline in the table."""

    model: int
    stage: int
    micro_batch: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind} of model {self.model}, stage {self.stage}, micro-batch {self.micro_batch}"


class Operation(NamedTuple):
    tick: int
    step: PipelineStep


class Action(NamedTuple):
    """An operation; or, with `sends`, the transfer of its result to the stage that needs it."""

    step: PipelineStep
    sends: bool


Seconds: TypeAlias = Callable[[PipelineStep], float]


@dataclass(frozen=True)
class Pipeline:
    """The stages of one model.

    devices: the device of each stage, in the order of layers. Interleaved stages share devices.
    split: weight gradients are separate operations, and "backward" computes only the gradient of a stage's input.
    trains: whether there are backward operations.
    forward, backward: expected seconds of operations, in any unit that all pipelines of a table share; by default a
        backward operation repeats the forward pass. They determine when results are sent, see `actions`.
    """

    devices: tuple[int, ...]
    micro_batches: int
    split: bool = False
    trains: bool = True
    forward: float = 1.0
    backward: float = 3.0

    def __post_init__(self) -> None:
        if not self.devices or self.micro_batches < 1:
            raise ValueError(f"a pipeline of {len(self.devices)} stages and {self.micro_batches} micro-batches")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return get_args(Kind)[: 1 + self.trains + self.split]

    def seconds(self, kind: Kind) -> float:
        """Returns the expected seconds of an operation. Gradients of weights take as long as a backward operation."""
        return self.forward if kind == "forward" else self.backward

    @property
    def last(self) -> Kind:
        """The operation after which a stage no longer needs the activations of a micro-batch."""
        return self.kinds[-1]


@dataclass(frozen=True)
class Table:
    """A schedule. Operations are in the order of their ticks; each device computes its operations in this order."""

    pipelines: tuple[Pipeline, ...]
    operations: tuple[Operation, ...]

    @property
    def devices(self) -> int:
        return 1 + max(device for pipeline in self.pipelines for device in pipeline.devices)

    @property
    def orders(self) -> list[list[PipelineStep]]:
        """Returns the steps of each device in its order."""
        orders: list[list[PipelineStep]] = [[] for _ in range(self.devices)]
        for _, step in self.operations:
            orders[self.pipelines[step.model].devices[step.stage]].append(step)
        return orders


@dataclass(frozen=True)
class FusedUpdates:
    """The table of a plan's fused updates. pipelines: name of a call -> numbers of its pipelines in the table."""

    table: Table
    pipelines: Mapping[str, range]

    def to_json(self) -> str:
        """Returns the table as a run stores it for its report."""
        table, pipelines = self.table, {name: [*numbers] for name, numbers in self.pipelines.items()}
        devices = [pipeline.devices for pipeline in table.pipelines]
        operations = [(tick, *step) for tick, step in table.operations]
        return json.dumps({"pipelines": pipelines, "devices": devices, "operations": operations}) + "\n"


def arrange(pipelines: Sequence[Pipeline], orders: Sequence[Sequence[PipelineStep]]) -> Table:
    """Returns the table in which every device computes its steps in the given order, each at the first possible tick.

    Raises ValueError if the orders of the devices wait for each other.
    """
    times = _times(pipelines, orders, lambda step: 1)
    operations = sorted(Operation(round(start), step) for step, (start, _) in times.items())
    return Table(tuple(pipelines), tuple(operations))


def gpipe(stages: int, micro_batches: int) -> Table:
    """Returns the table of GPipe (arXiv 1811.06965): all forwards, then all backwards."""
    return _table(Pipeline(tuple(range(stages)), micro_batches), lambda stage: micro_batches)


def one_forward_one_backward(stages: int, micro_batches: int) -> Table:
    """Returns the table of 1F1B (PipeDream-Flush, arXiv 2006.09503): at most S - s micro-batches in flight."""
    return _table(Pipeline(tuple(range(stages)), micro_batches), lambda stage: stages - stage - 1)


def interleaved(stages: int, micro_batches: int, chunks: int) -> Table:
    """Returns Megatron's interleaved 1F1B (arXiv 2104.04473): device d has stages d, d + S, d + 2 S, ...

    stages: number S of devices. chunks: stages per device. Micro-batches form groups of S, which divides their number.
    """
    if micro_batches % stages:
        raise ValueError(f"interleaved schedule: {micro_batches} micro-batches are no multiple of {stages} devices")
    pipeline = Pipeline(tuple(range(stages)) * chunks, micro_batches)
    return _table(pipeline, lambda device: 2 * (stages - device - 1) + (chunks - 1) * stages)


def zero_bubble(stages: int, micro_batches: int) -> Table:
    """Returns ZB-H1 (arXiv 2401.10241): weight gradients fill the bubble, and memory stays that of 1F1B's first stage.

    Stage s computes the weight gradient of a micro-batch s backwards later.
    """
    pipeline = Pipeline(tuple(range(stages)), micro_batches, split=True, backward=2.0)
    return _table(pipeline, lambda stage: stages - stage - 1)


def forwards(stages: int, micro_batches: int) -> Table:
    """Returns the table of a call that scores: each stage computes one micro-batch after the other."""
    orders = [[PipelineStep(0, stage, number, "forward") for number in range(micro_batches)] for stage in range(stages)]
    return arrange([Pipeline(tuple(range(stages)), micro_batches, trains=False)], orders)


# (devices, micro-batches) -> table. Interleaved: two stages of each device.
SCHEDULES: dict[ScheduleName, Callable[[int, int], Table]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": partial(interleaved, chunks=2),
    "zb-h1": zero_bubble,
    "fused": one_forward_one_backward,  # for one model alone; the table of both models is searched for
}


def table_of(schedule: ScheduleName, stages: int, micro_batches: int, *, trains: bool) -> Table:
    """Returns the table of a call on these stages. trains: False for a call that scores, which has only forwards."""
    return (SCHEDULES[schedule] if trains else forwards)(stages, micro_batches)


def _table(pipeline: Pipeline, warmup: Callable[[int], int]) -> Table:
    """Returns the table of one model: forwards to fill the pipeline, then alternately a forward and a backward, then
    backwards. With split backwards device d computes a weight gradient d backwards later.

    warmup: device -> number of its forwards before the first pair.
    """
    count, parts = 1 + max(pipeline.devices), pipeline.micro_batches
    chunks = len(pipeline.devices) // count
    # Micro-batches form groups of as many as there are devices. A group passes all chunks before the next one begins.
    turns = [
        (chunk, number)
        for first in range(0, parts, count)
        for chunk in range(chunks)
        for number in range(first, min(first + count, parts))
    ]
    orders = []
    for device in range(count):
        forwards = [PipelineStep(0, chunk * count + device, number, "forward") for chunk, number in turns]
        backwards = [
            PipelineStep(0, (chunks - 1 - chunk) * count + device, number, "backward") for chunk, number in turns
        ]
        weights = [step._replace(kind="weight") for step in backwards] if pipeline.split else []
        filling = min(warmup(device), len(forwards))
        rounds = zip_longest(forwards[filling:], backwards, [None] * device + weights)
        orders.append(forwards[:filling] + [step for steps in rounds for step in steps if step is not None])
    return arrange([pipeline], orders)


def violation(table: Table, memory: float | None = None, activations: Sequence[float] | None = None) -> str | None:
    """Returns one sentence on the first rule that the table breaks, None if it is valid.

    The rules: every operation of every model occurs once; a device has one operation per tick; forwards go up the
    stages, backwards down, a backward follows its forward, a weight gradient its backward, all at later ticks, so that
    no device waits forever; activations in flight are within `memory` on each device (see `peak`).
    """
    expected = {step for number, pipeline in enumerate(table.pipelines) for step in _steps(number, pipeline)}
    ticks: dict[PipelineStep, int] = {}
    for tick, step in table.operations:
        if step not in expected:
            return f"tick {tick}: there is no {step}"
        if step in ticks:
            return f"tick {tick}: {step}, was computed at tick {ticks[step]} already"
        ticks[step] = tick
    if missing := expected - ticks.keys():
        return f"no operation computes the {min(missing)}"
    taken: dict[tuple[int, int], PipelineStep] = {}
    for tick, step in table.operations:
        device = table.pipelines[step.model].devices[step.stage]
        if (other := taken.setdefault((tick, device), step)) != step:
            return f"tick {tick}: device {device} computes two operations, {other}, and {step}"
        for need in needs_of(table.pipelines, step):
            if ticks[need] >= tick:
                return f"tick {tick}: {step}, needs the {need}, which comes at tick {ticks[need]}"
    if [operation.tick for operation in table.operations] != sorted(ticks.values()):
        return "the operations are not in the order of their ticks"
    if memory is not None:
        for device, most in enumerate(peak(table, activations)):
            if most > memory * (1 + 1e-9):
                return f"device {device} keeps activations of {most:g} in flight, more than {memory:g}"
    return None


def makespan(table: Table, seconds: Seconds) -> float:
    """Returns the seconds of the table if every operation starts as soon as its device and its inputs are ready."""
    return max(end for _, end in _times(table.pipelines, table.orders, seconds).values())


def as_run(table: Table, seconds: Seconds) -> Seconds:
    """Returns the seconds of operations if the last stage of a model that trains computes its forward pass within its
    backward operation, as `models.pipeline` does."""

    def of(step: PipelineStep) -> float:
        pipeline = table.pipelines[step.model]
        if not pipeline.trains or step.kind == "weight" or step.stage + 1 < len(pipeline.devices):
            return seconds(step)
        return 0.0 if step.kind == "forward" else seconds(step._replace(kind="forward")) + seconds(step)

    return of


def synchronous_makespan(table: Table, seconds: Seconds) -> float:
    """Returns the seconds of the table if sender and receiver of a result wait for each other, as stages of different
    processes do, in the order of `actions`. The last stages compute `as_run`."""
    free, seconds = [0.0] * table.devices, as_run(table, seconds)
    for step, sends in actions(table):
        sender, receiver = _ends(table, step)
        if sends:
            free[sender] = free[receiver] = max(free[sender], free[receiver])
        else:
            free[sender] += seconds(step)
    return max(free)


@lru_cache(maxsize=64)
def actions(table: Table) -> tuple[Action, ...]:
    """Returns the operations of a table and the transfers of their results, in the order in which all processes
    dispatch them.

    Sender and receiver of a transfer may wait for each other. So it comes when both are expected to be between two
    operations, at the latest when the receiver needs the result. If the receiver is late and needs the result next, the
    sender waits for it, or first computes its next operation: of three rules the one with the shortest time is chosen.
    """
    return min((_dispatched(table, share) for share in (0.0, 0.5, 1.0)), key=lambda way: way[0])[1]


def _dispatched(table: Table, share: float) -> tuple[float, tuple[Action, ...]]:
    """Returns the expected seconds and the order of `actions`. share: the longest wait of a sender, as a share of its
    next operation."""
    seconds = as_run(table, lambda step: table.pipelines[step.model].seconds(step.kind))
    left = [deque(order) for order in table.orders]
    running = dict[int, tuple[float, PipelineStep]]()  # device -> end and step of its operation
    unsent, available, result, now = list[PipelineStep](), set[tuple[int, PipelineStep]](), list[Action](), 0.0

    def needs(device: int) -> set[PipelineStep]:
        """Returns the steps whose results the next operation of a device reads."""
        return set(needs_of(table.pipelines, left[device][0])) if left[device] else set()

    def waits(device: int) -> bool:
        """Returns whether a device waits for a receiver before its next operation."""
        late = [
            receiver
            for step in unsent
            for sender, receiver in [_ends(table, step)]
            if sender == device and receiver in running and step in needs(receiver)
        ]
        return any(running[receiver][0] - now < share * seconds(left[device][0]) for receiver in late)

    while True:
        for step in unsent[:]:
            sender, receiver = _ends(table, step)
            if sender not in running and receiver not in running:
                unsent.remove(step)
                available.add((receiver, step))
                result.append(Action(step, True))
        for device, order in enumerate(left):
            if order and device not in running and all((device, need) in available for need in needs(device)):
                if not waits(device):
                    running[device] = now + seconds(order[0]), order[0]
                    result.append(Action(order.popleft(), False))
        if not running:
            break
        now = min(end for end, _ in running.values())
        for device in [device for device, (end, _) in running.items() if end <= now * (1 + 1e-9)]:  # rounded sums
            _, step = running.pop(device)
            available.add((device, step))
            unsent.append(step)
    if any(left):
        raise ValueError("the devices wait for each other")
    return now, tuple(result)


def _ends(table: Table, step: PipelineStep) -> tuple[int, int]:
    """Returns the device of a step, and that of the stage that its result is sent to; the same if there is none."""
    devices = table.pipelines[step.model].devices
    receiver = step.stage + {"forward": 1, "backward": -1, "weight": 0}[step.kind]
    return devices[step.stage], devices[receiver if 0 <= receiver < len(devices) else step.stage]


def bubble(table: Table, seconds: Seconds) -> float:
    """Returns the share of the devices' time that they spend waiting."""
    work = sum(seconds(step) for _, step in table.operations)
    return 1 - work / (table.devices * makespan(table, seconds))


def peak(table: Table, activations: Sequence[float] | None = None) -> list[float]:
    """Returns the peak of activations in flight on each device, from a forward until its last operation.

    activations: of a micro-batch on a stage of each model, in any unit; default 1.
    """
    most, now = ([0.0] * table.devices for _ in range(2))
    for device, order in enumerate(table.orders):
        for step in order:
            size = 1.0 if activations is None else activations[step.model]
            if step.kind == "forward":
                now[device] += size
                most[device] = max(most[device], now[device])
            if step.kind == table.pipelines[step.model].last:
                now[device] -= size
    return most


def _steps(number: int, pipeline: Pipeline) -> Iterator[PipelineStep]:
    for stage in range(len(pipeline.devices)):
        for micro_batch in range(pipeline.micro_batches):
            for kind in pipeline.kinds:
                yield PipelineStep(number, stage, micro_batch, kind)


def needs_of(pipelines: Sequence[Pipeline], step: PipelineStep) -> Iterator[PipelineStep]:
    """Yields the steps whose results `step` reads."""
    if step.kind == "forward":
        if step.stage:
            yield step._replace(stage=step.stage - 1)
        return
    yield step._replace(kind=get_args(Kind)[get_args(Kind).index(step.kind) - 1])
    if step.kind == "backward" and step.stage + 1 < len(pipelines[step.model].devices):
        yield step._replace(stage=step.stage + 1)


def _times(
    pipelines: Sequence[Pipeline], orders: Sequence[Sequence[PipelineStep]], seconds: Seconds
) -> dict[PipelineStep, tuple[float, float]]:
    """Returns when each step starts and ends, if each device computes its steps in the given order."""
    times: dict[PipelineStep, tuple[float, float]] = {}
    heads, free = [0] * len(orders), [0.0] * len(orders)
    waiting = list(range(len(orders)))
    blocked: dict[PipelineStep, list[int]] = {}  # step -> devices that wait for it
    while waiting:
        device = waiting.pop()
        for step in orders[device][heads[device] :]:
            needs = list(needs_of(pipelines, step))
            if (late := next((need for need in needs if need not in times), None)) is not None:
                blocked.setdefault(late, []).append(device)
                break
            start = max([free[device], *(times[need][1] for need in needs)])
            free[device] = start + seconds(step)
            times[step] = start, free[device]
            heads[device] += 1
            waiting += blocked.pop(step, [])
    if blocked:
        need, devices = min(blocked.items())
        step = orders[devices[0]][heads[devices[0]]]
        raise ValueError(f"the devices wait for each other: device {devices[0]} for the {need}, before the {step}")
    return times
