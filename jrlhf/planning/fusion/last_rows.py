"""Chooses where the last rows of a rollout decode, by simulating rollouts of given lengths.

Rows enter, leave and move by the engine's own rules (`models.generation.occupancy`); only seconds are predicted. A move
to fewer groups of devices lets calls on the others score tiles of rows that are done (arXiv 2409.13221). It changes no
decode step: the last rows keep the number of slots that a group has.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jrlhf.config.schema import Config
from jrlhf.meshes.graph import Call, Graph
from jrlhf.meshes.plan import Plan, Slice
from jrlhf.models.config.divisors import divisors
from jrlhf.models.flops import cache_bytes
from jrlhf.models.generation.occupancy import EMPTY, LastRows, Occupancy, empty, entered, packed, running
from jrlhf.models.generation.schedule import Schedule
from jrlhf.planning import moves
from jrlhf.planning.time import CostModel
from jrlhf.run.processes import from_main, is_main

RECENT = 4  # number of recent rollouts whose lengths determine the next move
NO_GAIN = "rollout.last_groups=auto has no effect: no move frees the devices of a model that scores early"
_TOKEN = 8  # bytes that a process sends for each token of a finished row, up to the limit: with its log-probability
_COORDINATOR, _MESSAGE = 32e6, 1e-3  # bytes a second through the coordinator (docs/plans.md), and seconds of a message
Lengths = Int[np.ndarray, "N"]  # numbers of tokens of the responses of one rollout


@dataclass(frozen=True)
class Scoring:
    """A call that scores tiles of rows: its devices, and its seconds per tile."""

    devices: Slice
    seconds: float
    name: str = ""


@dataclass(frozen=True)
class Rollouts:
    """Sizes and predicted seconds of rollouts and their scores.

    prompts, samples: of a rollout, N = prompts * samples rows. width, limit: tokens of a prompt and of a response.
    devices: the devices that draw, in groups of `tensor`. tile: rows that are scored together. scoring: in the order of
    the program. step: (slots of a group, positions of its caches) -> seconds. prefill: (prompts of a group) -> seconds.
    move: (groups, positions of the caches) -> seconds of the move to them. send: (rows, devices that decode) -> seconds
    to send finished rows to the processes that have none of these devices.
    """

    schedule: Schedule
    prompts: int
    samples: int
    width: int
    limit: int
    devices: Slice
    tensor: int
    tile: int
    scoring: Sequence[Scoring]
    step: Callable[[int, int], float]
    prefill: Callable[[int], float]
    move: Callable[[int, int], float]
    send: Callable[[int, Slice], float] = lambda rows, decoding: 0.0

    @property
    def groups(self) -> int:
        return self.devices.count // self.tensor

    @cached_property
    def last_slots(self) -> int:
        """The smallest number of slots of a group, in which the last rows decode."""
        return self.occupancy().counts[-1]

    def occupancy(self) -> Occupancy:
        """Returns the engine's rules for these rollouts."""
        sizes = {"groups": self.groups, "tensor": self.tensor, "width": self.width, "limit": self.limit}
        return Occupancy.of_rollout(self.schedule, self.prompts, self.samples, **sizes)


@dataclass(frozen=True)
class Chunk:
    """A chunk of decode steps. running, waiting, positions: rows of each group, whether prompts wait, and cache
    positions before it. end, done: time and finished rows after it.
    """

    running: Int[np.ndarray, "groups"]
    waiting: bool
    positions: int
    end: float
    done: Bool[np.ndarray, "N"]


def decode(rollouts: Rollouts, lengths: Lengths) -> list[Chunk]:
    """Simulates the chunks of a rollout whose rows stay in their groups."""
    rules, drawn, seconds, chunks = rollouts.occupancy(), np.zeros_like(lengths), 0.0, list[Chunk]()
    owner, positions = empty(rules.groups, rules.slots), rules.lengths[0]
    waiting, most = deque(range(rollouts.prompts)), min(rollouts.schedule.chunk, rollouts.limit)
    while True:
        while (counts := rules.entering(owner, len(waiting))).any():
            entering = [[waiting.popleft() for _ in range(count)] for count in counts]
            owner, _ = entered(owner, entering, rules.samples)
            seconds += rollouts.prefill(rules.wave(counts))
        if not running(owner).any():
            return chunks
        if not waiting:
            for slots in rules.halvings(owner):
                owner, _ = packed(owner, slots)
        before, rows = (running(owner), bool(waiting), positions), owner[owner != EMPTY]
        longer = rules.longer(positions, rollouts.width + int(drawn[rows].max()) + most)
        positions = max([positions, *longer])
        steps = min(most, int((lengths - drawn)[rows].max()))
        seconds += steps * rollouts.step(owner.shape[1], positions)
        drawn[rows] += steps
        owner[(owner != EMPTY) & (drawn >= lengths)[owner]] = EMPTY
        done = np.ones(len(lengths), bool)
        done[owner[owner != EMPTY]] = False
        done.reshape(rollouts.prompts, -1)[list(waiting)] = False
        chunks.append(Chunk(*before, seconds, done))


@dataclass(frozen=True)
class Work:
    """What occupies devices from `start` to `end`, in seconds of a rollout: decode steps (no name), or a call's tiles.

    rows: (seconds, unfinished rows from then on), of decode steps.
    """

    name: str
    devices: Slice
    start: float
    end: float
    rows: Sequence[tuple[float, int]] = ()


def follow(rollouts: Rollouts, chunks: Sequence[Chunk], last: LastRows | None) -> list[Work]:
    """Simulates the scores of a rollout; returns the work on its devices. last: the move of the last rows, if any.

    A device does one thing at a time, in the order of dispatch.
    """
    slots, whole = rollouts.last_slots, rollouts.devices
    free = np.zeros(max(one.devices.stop for one in (rollouts, *rollouts.scoring)))
    tiles = np.stack([chunk.done.reshape(-1, rollouts.tile).all(axis=1) for chunk in chunks])
    scored = np.zeros((len(rollouts.scoring), tiles.shape[1]), bool)
    decoding, delay, now, done, work = whole, 0.0, 0.0, 0, list[Work]()
    since, left = 0.0, [(0.0, len(chunks[0].done))]
    for number, chunk in enumerate(chunks):
        if last is not None and decoding == whole and not chunk.waiting and last.move(chunk.running, slots):
            work.append(Work("", decoding, since, now, left))
            decoding = whole.first(last.groups * rollouts.tensor)
            delay += rollouts.move(last.groups, chunk.positions)
            since, left = now, left[-1:]
        if new := int(np.sum(chunk.done)) - done:
            delay, done = delay + rollouts.send(new, decoding), done + new
        now, final = chunk.end + delay, number == len(chunks) - 1
        left.append((now, int(np.sum(~chunk.done))))
        readers = [
            (call, given)
            for call, given in zip(rollouts.scoring, scored, strict=True)
            if (final or not call.devices.overlaps(decoding)) and np.any(tiles[number] & ~given)
        ]
        for call, given in readers:
            count, own = np.sum(tiles[number] & ~given), free[call.devices.start : call.devices.stop]
            start = max(now, own.max())
            own[:] = start + call.seconds * count
            work.append(Work(call.name, call.devices, start, start + call.seconds * count))
            given |= tiles[number]
    return [*work, Work("", decoding, since, now, left)]


def finish(rollouts: Rollouts, chunks: Sequence[Chunk], last: LastRows | None) -> float:
    """Returns the seconds from the start of a simulated rollout until all rows are drawn and scored; see `follow`."""
    return max(work.end for work in follow(rollouts, chunks, last))


@dataclass(frozen=True)
class Choice:
    """The best move of the last rows, None if they stay, and mean seconds until all rows are drawn and scored.

    staying: the same seconds if the rows stay in their groups.
    """

    last: LastRows | None
    seconds: float
    staying: float

    def sentence(self, groups: int) -> str:
        """Describes the choice among `groups` groups of devices."""
        if self.last is None:
            return f"the last rows stay in their groups, {self.seconds:.3g} s until all rows are drawn and scored"
        return (
            f"the last rows move to {self.last.groups} of {groups} groups of devices once at most {self.last.rows} are "
            f"left, {self.seconds:.3g} s until all rows are drawn and scored, instead of {self.staying:.3g} s"
        )


def choose(rollouts: Rollouts, decoded: Sequence[Sequence[Chunk]]) -> Choice:
    """Simulates the scores of decoded rollouts with each move; returns the fastest, among equal ones to fewest groups.

    As many rows move as fit, if the schedule sets no maximum. Fewer would gain nothing: a move changes no decode step,
    so the earliest one frees the devices for the longest time.
    """
    staying = _mean_seconds(rollouts, decoded, None)
    best = Choice(None, staying, staying)
    for groups in divisors(rollouts.groups)[:-1]:
        last = LastRows(groups, rollouts.schedule.last_rows or groups * rollouts.last_slots)
        seconds = _mean_seconds(rollouts, decoded, last)
        best = Choice(last, seconds, staying) if seconds < best.seconds else best
    return best


def settle(rollouts: Rollouts, decoded: Sequence[Sequence[Chunk]]) -> Choice:
    """Returns the move that the schedule sets, or the best one if the run chooses, with its seconds."""
    if rollouts.schedule.last_groups == "auto":
        return choose(rollouts, decoded)
    last, staying = LastRows.of(rollouts.schedule), _mean_seconds(rollouts, decoded, None)
    return Choice(last, staying if last is None else _mean_seconds(rollouts, decoded, last), staying)


def _mean_seconds(rollouts: Rollouts, decoded: Sequence[Sequence[Chunk]], last: LastRows | None) -> float:
    return fmean(finish(rollouts, chunks, last) for chunks in decoded)


class Moves:
    """The moves of a run's rollouts, chosen before each from the lengths of the last ones. Mutable.

    The first rollout, also after a resume, has no move; tokens do not depend on it. Process 0 chooses.
    """

    def __init__(self, rollouts: Callable[[], Mapping[str, Rollouts]], tell: Callable[[str], None]):
        """rollouts: by call that draws. tell: called with a sentence for each new choice."""
        self._rollouts, self._tell = dict[str, Rollouts](), tell
        self._recent, self._last = dict[str, deque[list[Chunk]]](), dict[str, LastRows | None]()
        from_main(lambda: self._begin(rollouts()))

    def _begin(self, rollouts: Mapping[str, Rollouts]) -> None:
        for name, one in rollouts.items():
            _ = one.step(1, one.width), one.prefill(1)  # a part that was not measured ends the run now
            self._rollouts[name], self._recent[name], self._last[name] = one, deque(maxlen=RECENT), None
        if not any(map(may_gain, rollouts.values())):
            self._tell(NO_GAIN)

    def before(self, call: str, *, seconds: float = 3600.0) -> LastRows | None:
        """Returns the move of the next rollout of a call. Other processes wait for process 0 at most `seconds`."""
        last = from_main(lambda: self._choose(call), seconds=seconds)
        return None if last is None else LastRows(**last)

    def _choose(self, call: str) -> dict[str, Any] | None:
        if recent := self._recent[call]:
            choice = choose(self._rollouts[call], recent)
            if choice.last != self._last[call]:
                self._last[call] = choice.last
                self._tell(f"{call}: {choice.sentence(self._rollouts[call].groups)}")
        last = self._last[call]
        return None if last is None else vars(last)

    def after(self, call: str, lengths: Lengths) -> None:
        """Records a rollout by the lengths of its responses."""
        if is_main():
            self._recent[call].append(decode(self._rollouts[call], lengths))


def may_gain(rollouts: Rollouts) -> bool:
    """True if a move to the first group of devices frees those of a call that scores."""
    first = rollouts.devices.first(rollouts.tensor)
    waiting = [call.devices for call in rollouts.scoring if call.devices.overlaps(rollouts.devices)]
    return not all(devices.overlaps(first) for devices in waiting)


def sent_bytes(rows: int, limit: int) -> int:
    """Returns the bytes of finished rows that a process without a device that decodes gets through the coordinator."""
    return rows * _TOKEN * limit


def read_by_rows(config: Config, graph: Graph, drawing: Call) -> list[Call]:
    """Returns the models' calls that score rows of `drawing` independently, and so may score them early."""
    models = {role for _, role, part in config.rewards_and_costs if part.function is None}
    learned = {"reward"} if "reward_model" in config.stages else set[str]()
    functions = {"reward", "cost"} - models - learned
    infers = [call for call in graph if call.kind == "infer" and call.role not in functions]
    return [call for call in infers if {*drawing.outputs} & {*call.inputs}]


def rollouts_of(config: Config, prices: CostModel, plan: Plan) -> dict[str, Rollouts]:
    """Returns the `Rollouts` of each call that draws, with the seconds of the cost model.

    Without compute.score_rows all rows are one tile. Reward functions are left out, because a move does not let them
    score earlier.
    """
    drawing = [call for call in prices.workload.calls if call.kind == "generate" and plan[call.name].pipeline == 1]
    return {call.name: _rollouts(config, prices, plan, call) for call in drawing}


def _rollouts(config: Config, prices: CostModel, plan: Plan, call: Call) -> Rollouts:
    workload, place = prices.workload, plan[call.name]
    divided, tile = prices.divided(call, place), config.compute.score_rows or workload.rows
    assert isinstance(tile, int)
    of_tile = replace(prices, workload=replace(workload, rows=tile))

    def move(groups: int, positions: int) -> float:
        fewer = place.devices.first(groups * place.tensor)
        target = replace(place, devices=fewer, data=groups, fsdp=1, pipeline=1, micro_batches=1)
        position = cache_bytes(divided.model.config, workload.itemsize)
        arriving = (rollouts.groups - groups) * rollouts.last_slots * positions * position
        return moves.transfer_seconds(arriving, place, target, prices.cluster)

    def send(rows: int, decoding: Slice) -> float:
        present = {device // prices.per_process for device in range(decoding.start, decoding.stop)}
        if len(present) == prices.processes or not config.compute.score_rows:  # then nothing reads rows early
            return 0.0
        return _MESSAGE + sent_bytes(rows, workload.response) / _COORDINATOR

    rollouts = Rollouts(
        config.rollout,
        workload.rows // workload.samples,
        workload.samples,
        width=workload.prompt,
        limit=workload.response,
        devices=place.devices,
        tensor=place.tensor,
        tile=tile,
        scoring=[
            Scoring(plan[reader.name].devices, of_tile.seconds(reader, plan[reader.name]), reader.name)
            for reader in read_by_rows(config, workload.graph, call)
        ],
        step=lambda slots, positions: sum(divided.step(slots, positions).values()),
        prefill=lambda prompts: sum(divided.prefill(prompts).values()),
        move=move,
        send=send,
    )
    return rollouts
