"""`Fleet`: draws groups of responses by the rules of an asynchronous run (`schedule.py`).

A logical worker is a batch of decode slots. The workers of a lane decode their chunks together; lanes do not wait for
each other. With the virtual clock all workers form one lane, and counts of decode steps determine which chunks come
before which update, so a run has the same bits on any hardware and after a kill. With the wall clock each process is
a lane, and the order of arrival decides.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from jrlhf.errors import RunFailure
from jrlhf.meshes.transfers import to_devices, to_host
from jrlhf.models.generation.continuous import Decoding, Prompt, RowProgress, ToHosts, Weights
from jrlhf.rollouts.identity import Identity, differences
from jrlhf.rollouts.recompute import Compared, Recompute, Row, Tracked
from jrlhf.rollouts.schedule import Clock, Rules, first_batch, may_start, may_swap
from jrlhf.rollouts.slices import Lane, Published, Workers
from jrlhf.rollouts.state import (
    Collected,
    Drawn,
    DrawnRows,
    FleetState,
    Group,
    Times,
    collected,
    drawn_rows,
    pack,
    rows_of,
    unpack,
)
from jrlhf.run.clock import TrainerWait
from jrlhf.run.processes import several

_WRONG_VERSIONS = "the versions of the tokens are wrong"
_Swap = tuple[Published, Mapping[int, Prompt] | None]  # new weights; prompts of the rows whose caches to recompute


class Fleet:
    """The rollouts of an asynchronous run. Mutable; `state` and `start` save and restore it.

    After `collect` it continues to draw for as long as the update takes. If the workers are other processes, a thread
    does this; otherwise the next call does, when the trainer's programs are already enqueued.

    lanes: one with the virtual clock. mesh: the mesh of `state`.
    prompt: number of a group -> its prompt. The first call for a number comes from `start` or `collect`, and may read
    data; further calls may come from the thread that draws ahead.
    on_complete: called with each group as soon as it is complete; possibly from that thread, too.
    samples: rows of a group. limit: maximum tokens of a row.
    rates: the learning rate of each update; None: equal weights of two versions are no fault.
    on_chunk: called with (number of a lane, seconds) after each chunk of other processes, from other threads.
    read: copies arrays of one mesh to the host, in every process.
    """

    def __init__(
        self,
        lanes: Sequence[Workers],
        mesh: Mesh,
        rules: Rules,
        prompt: Callable[[int], Prompt],
        on_complete: Callable[[Collected], None],
        *,
        samples: int,
        limit: int,
        recompute: Recompute,
        rates: Float[np.ndarray, "updates"] | None = None,
        clock: Clock = "virtual",
        on_chunk: Callable[[int, float], None] = lambda lane, seconds: None,
        read: ToHosts = to_host,
    ):
        bounds = pairwise(np.cumsum([0, *(len(workers.rooms) for workers in lanes)]).tolist())
        self._lanes = [Lane(workers, range(*own)) for workers, own in zip(lanes, bounds, strict=True)]
        self.mesh, self._rules, self._wall, self._read = mesh, rules, clock == "wall", read
        self._on_complete, self._samples, self._limit, self._on_chunk = on_complete, samples, limit, on_chunk
        self._groups = dict[int, Group]()  # by number, in the order in which they started
        self._count = 0  # number of all groups that have started so far
        self._prompt, self._loaded = prompt, 0  # groups with a lower number than `_loaded` have a prompt
        self._times = Times(0, 0, 0, 0, 0)
        self._has_batch = False  # whether a batch was collected since the last update
        self.started = False
        self._newest: Published | None = None
        # Not compared yet: version, identity of the weights at the workers, expected identity.
        self._identities: list[tuple[int, Identity, Identity]] = []
        self._rates = np.zeros(0) if rates is None else rates
        # Versions that are not compared yet with the one before, each with the gradients' norm of the update between.
        self._changes = list[tuple[Published, Published, Any]]()
        self._recompute, self._compared = recompute, Compared()
        self._verified = set[int]()  # versions of which tokens were compared
        self._resumed, self._unchecked = 0, 0  # the version that drew at the start; see `_check_versions`
        self._drew = set[tuple[int, int]]()  # (worker, version) that drew tokens, until one of these is seen
        self._ready = 0  # time at which the batch in training was complete
        self._waits: dict[str, float] = {}
        self._trainer_wait = TrainerWait()
        self._threads = ThreadPoolExecutor(1 + len(lanes), "fleet") if lanes[0].own_devices else None
        self._finish_drawing: Callable[[], None] = lambda: None  # the drawing that overlaps with the update

    # ---- the state for checkpoints

    def fresh(self, weights: Weights, expected: Identity, updates: Any = None) -> FleetState:
        """Returns the state before anything is drawn, with the first weights."""
        self._newest = Published(0, None, expected, self._saved(weights), updates)
        self._lanes[0].updates = [self._newest]
        self._lanes[0].tracked = self._recompute.fresh()
        return self._state([state for lane in self._lanes for state in lane.workers.fresh()])

    def state(self) -> FleetState:
        """Returns the state as arrays on devices, which the next chunk donates. Raises RunFailure as `collect` does.

        With the wall clock all lanes first finish their chunks and take the newest weights.
        """
        while any(lane.chunk is not None for lane in self._lanes):
            self._record_first()
        decoding = []
        for lane in self._lanes:
            self._swap(lane)
            decoding.append(lane.workers.states())
            rows = drawn_rows(decoding[-1], self._read) if self._recompute.compares and len(lane.updates) > 1 else {}
            self._retire(lane, rows)
        self._check()
        self._compare_retired()
        return self._state([state for own in decoding for state in own])

    def _state(self, decoding: list[Decoding]) -> FleetState:
        places = int(self._rules.batch * (self._rules.staleness + 1))  # `may_start` admits no more groups
        now, blank = self._times.rollouts, Drawn.blank(self._samples, limit=self._limit)
        started = pack(self._count, self._groups, places, blank, now)
        times = jax.tree.map(np.int32, replace(self._times, rollouts=0, trainer=self._times.trainer - now))
        rounding = self._recompute.calibration if self._recompute.compares else FleetState.rounding
        started, times, rounding = to_devices((started, times, rounding), NamedSharding(self.mesh, P()))
        slots = decoding[0] if len(decoding) == 1 else tuple(decoding)
        present = self._lanes[0].updates[-1]
        lagging = None if present.saved is None else (present.saved, present.expected)
        # With the wall clock the lanes depend on the number of processes, so a resume does not track rows.
        tracked = None if self._wall else self._lanes[0].tracked
        return FleetState(slots, started, times, lagging, tracked, rounding)

    def start(self, state: FleetState, weights: Weights, expected: Identity, updates: Any = None) -> None:
        """Continues from a state, with the trainer's present weights, their identity, and the updates so far."""
        started, times, rounding = self._read((state.started, state.times, state.rounding))
        if self._recompute.compares:
            self._recompute.calibrate(*rounding)
        self._times = jax.tree.map(int, times)
        self._groups, self._count = unpack(started, self._prompt), int(started.count)
        self._resumed = self._times.version
        published, decoding = self._times.published, state.decoding
        decoding = decoding if isinstance(decoding, tuple) else (decoding,)
        put = self._lanes[0].workers.put
        self._newest = drawing = Published(published, put(weights), expected, self._saved(weights), updates)
        if self._times.version < published:
            lagging, expected = state.weights
            lagging = lagging[0] or weights[0], lagging[1]
            drawing = Published(self._times.version, put(lagging), expected, self._saved(lagging))

        def begin(lane: Lane) -> None:
            lane.workers.start([decoding[number] for number in lane.numbers])
            lane.updates = []
            self._take(lane, drawing)
            lane.idle_since = time.monotonic()

        tracks = self._recompute.compares and not self._wall  # otherwise the state has no tracked rows
        for lane in self._lanes:
            lane.tracked = state.tracked if tracks else self._recompute.fresh()
        for began in [self._submit(begin, lane) for lane in self._lanes]:
            began.result()
        self.started = True
        for _, number in self._complete:
            self._report(number)

    def close(self) -> None:
        """Ends the workers."""
        for lane in self._lanes:
            lane.workers.close()
        if self._threads is not None:
            self._threads.shutdown()

    # ---- the calls of an iteration

    def collect(self) -> Collected:
        """Draws until the next batch is complete, removes and returns it. An iteration may collect several batches.

        Raises RunFailure if the workers' weights, or the log-probabilities of their tokens, fail a check.
        """
        self._finish_drawing()
        if not self._has_batch:
            self._compared, self._waits, self._unchecked = Compared(), {}, 0
        self._times = replace(self._times, spare=self._times.spare + self._has_batch)
        self._has_batch = True
        self._load_prompts()
        with self._trainer_wait.counted():
            groups = self._next_groups()
            batch = collected(groups, self._times.version)
            self._check_labels(groups)
            drawn = self._drawn_by_version(groups)
            self._check_present_weights()
            self._compare_retired()
        self._finish_drawing = self._draw_ahead()
        for lane, update, rows in drawn:  # while workers in other processes draw on
            self._compared += self._compare(lane, update, rows)[0]
        if self._recompute.compares:
            self._check_versions(batch)
        return batch

    def draw_ahead(self, update: Any) -> None:
        """Draws as long as the update takes by the virtual clock. Otherwise `publish` does so.

        update: the arrays that the update computes.
        """
        self._trainer_wait.update = jax.tree.leaves(update)
        with self._trainer_wait.counted():
            self._finish_drawing()

    def publish(self, weights: Weights, expected: Identity, updates: Any = None, grad_norm: Any = 0.0) -> None:
        """Draws as long as the update takes; then workers take the new weights as soon as the rules allow it.

        expected: the identity of these weights, computed by the trainer. The next `state` or `collect` raises
        RunFailure, and returns no batch, if the workers' weights differ from it, or if it is the identity of the
        version before although updates changed the weights. updates: see `Published`. grad_norm: mean norm of the
        gradients of the updates between.
        """
        if not several():  # otherwise `draw_ahead` began to wait
            self._trainer_wait.update = jax.tree.leaves(weights)
        if self._wall and self._threads is None:  # JAX did not wait for the update
            self._draw_until(self._trainer_wait.update_is_done)
        handle = self._lanes[0].workers.put(weights)
        self._trainer_wait.update_is_done()  # `put` to other processes waited for it
        with self._trainer_wait.counted():
            self._finish_drawing()
        times, end, version, self._has_batch = self._times, self._end, self._times.published + 1, False
        before, self._newest = self._newest, Published(version, handle, expected, self._saved(weights), updates)
        if before is not None and updates is not None:
            before, after = (one._replace(handle=None, saved=None) for one in (before, self._newest))  # no weights
            self._changes.append((before, after, grad_norm))
        if self._wall:
            self._times = replace(times, published=version, version=version, trainer=times.rollouts)
            if self._threads is not None:
                self._dispatch()
            return
        waits = {"trainer": max(0, self._ready - times.trainer), "rollouts": max(0, end - times.rollouts)}
        self._waits = {f"async/{side}_wait": float(steps) for side, steps in waits.items()}
        self._times = replace(times, published=version, rollouts=max(times.rollouts, end), trainer=end)
        for lane in self._lanes:
            self._swap(lane)

    def metrics(self) -> dict[str, float]:
        """Returns waiting times of both sides, in decode steps or seconds, seconds of a decode step, counts of rows and
        groups, costs of weight transfers, and the mean distance of the tokens' log-probabilities from recomputed ones.
        """
        metrics = self._waits | {"perf/trainer_wait_seconds": self._trainer_wait.seconds}
        metrics["perf/rollouts_wait_seconds"] = float(np.mean([lane.idle_seconds for lane in self._lanes]))
        self._trainer_wait.seconds = 0.0
        if decoded := sum(lane.decoded for lane in self._lanes):
            metrics["perf/decode_step_seconds"] = sum(lane.decoding_seconds for lane in self._lanes) / decoded
        for lane in self._lanes:
            lane.decoded, lane.decoding_seconds, lane.idle_seconds = 0, 0.0, 0.0
        metrics["async/running_rows"] = float(sum(lane.workers.running for lane in self._lanes))
        metrics["async/waiting_groups"] = float(len(self._complete))
        for own in [lane.workers.metrics() for lane in self._lanes]:
            metrics |= {name: metrics.get(name, 0.0) + value for name, value in own.items()}
        if not self._recompute.compares:
            return metrics
        metrics["async/recomputed_tokens"] = float(self._compared.tokens)
        metrics["async/unchecked_versions"] = float(self._unchecked)
        if self._recompute.alarms is not None:
            metrics["async/logprob_alarms"] = float(sum(self._recompute.alarms.values()))
        if self._compared.tokens:
            metrics["async/logprob_distance"] = self._compared.distance / self._compared.tokens
        return metrics

    def _load_prompts(self) -> None:
        """Loads the prompts of all groups that may start before the next call of `collect`."""
        self._loaded = int(self._rules.batch * (self._times.published + self._rules.staleness + 1 + self._times.spare))
        for number in range(self._count, self._loaded):
            self._prompt(number)

    def _next_groups(self) -> dict[int, Group]:
        """Draws until a batch is complete; removes and returns its groups."""
        while (batch := first_batch(self._complete, self._rules, self._times.trainer)) is None:
            self._advance()
        self._ready, numbers = batch
        return {number: self._groups.pop(number) for number in numbers}

    def _drawn_by_version(self, groups: Mapping[int, Group]) -> list[tuple[Lane, Published, list[Row]]]:
        """Returns the versions that may have drawn in these groups, each with the rows of its lane, for `_compare`."""
        compared = groups if self._recompute.compares else {}
        rows = [(lane, rows_of(compared, lane.numbers, {})) for lane in self._lanes]
        return [(lane, update, of_lane) for lane, of_lane in rows for update in lane.updates]

    def _check_present_weights(self) -> None:
        """Checks the weights that idle lanes draw with, and all others that are not checked yet."""
        for lane in [lane for lane in self._lanes if lane.chunk is None]:
            expected = lane.updates[-1].expected
            self._identities += [(lane.version, own, expected) for own in lane.workers.identities()]
        self._check()

    # ---- new weights and their identity

    def _update(self, lane: Lane) -> _Swap | None:
        """Returns the arguments of `_take` if the lane may take newer weights, else None. The lane must then do so."""
        if self._newest is None or not self._may_swap(lane):
            return None
        self._times, again = replace(self._times, version=self._newest.version), None
        if self._rules.on_new_weights == "prefill_again" and lane.workers.running:
            own = {number: group for number, group in self._groups.items() if group.worker in lane.numbers}
            again = {number: group.prompt for number, group in own.items() if not group.complete}
        return self._newest, again

    def _swap(self, lane: Lane) -> None:
        """Lets the lane take the newest weights, if they are newer than its own and it may take them."""
        if update := self._update(lane):
            self._retire(lane, self._take(lane, *update))
            if self._rules.on_new_weights == "finish" and self._threads is None:
                self._compare_retired()  # all rows are done, and the memory of these weights is needed

    def _take(self, lane: Lane, update: Published, again: Mapping[int, Prompt] | None = None) -> DrawnRows | None:
        """Makes the lane draw with these weights. Records identities for `_check`; returns rows for `_retire`."""
        drawn = {} if self._rules.on_new_weights == "finish" else None  # with "finish" no row is running now
        if self._wall and lane.updates:
            drawn = lane.workers.drawn()
        for old, new in lane.workers.take(update.handle, again):
            if old is not None and lane.updates:  # the old weights must not have changed while they drew
                self._identities.append((lane.version, old, lane.updates[-1].expected))
            self._identities.append((update.version, new, update.expected))
        lane.updates.append(update)
        return drawn

    def _saved(self, weights: Weights) -> Weights | None:
        """Returns the weights that a state saves: with "finish" weights older than the trainer's may draw."""
        base, adapter = weights
        return (({} if adapter else base), adapter) if self._rules.on_new_weights == "finish" else None  # not a base

    def _check(self) -> None:
        """Compares the identities of the weights that drew with the expected ones."""
        while self._identities:  # threads of lanes may append meanwhile
            version, *identities = self._identities.pop(0)
            drawing, expected = map(self._read, identities)
            if wrong := differences(drawing, expected):
                raise RunFailure(
                    f"the rollouts' weights of version {version} are not the trainer's: {len(wrong)} of "
                    f"{len(expected)} differ, {wrong[0]} first; nothing was learned from what they drew"
                )
        while self._changes:
            before, after, grad_norm = self._changes.pop(0)
            first, end = self._read((before.updates, after.updates))
            learned = (self._rates[int(first) : int(end)] > 0).any() and self._read(grad_norm) > 0
            if learned and not differences(*map(self._read, (before.expected, after.expected))):
                raise RunFailure(
                    f"the weights of version {after.version} are those of version {before.version}, although "
                    f"{int(end) - int(first)} updates with gradients were applied between them: the trainer published "
                    "old weights, or its learning rate is too small to change any weight"
                )

    # ---- log-probabilities

    def _compare(self, lane: Lane, update: Published, rows: Sequence[Row]) -> tuple[Compared, Tracked | None]:
        if not any(update.version in row.versions for row in rows):
            return Compared(), lane.tracked
        assert lane.tracked is not None
        weights = self._lanes[0].workers.weights(update.handle)
        compared, tracked = self._recompute.compare(update.version, weights, rows, lane.tracked)
        if compared.tokens:
            self._verified.add(update.version)
        return compared, tracked

    def _check_labels(self, batch: Mapping[int, Group]) -> None:
        """Ends the run if tokens of a batch have a version that is not there yet, or if a version drew, but no token
        has it."""
        groups, future = [*batch.values(), *self._groups.values()], self._times.published + 1
        for worker, version in sorted(self._drew):
            own = [group.rows.versions for group in groups if group.worker == worker]
            if not any((versions == version).any() for versions in own):
                raise RunFailure(
                    f"logical worker {worker} drew with version {version} of the weights: {_WRONG_VERSIONS}"
                )
        self._drew.clear()
        if any((group.rows.versions >= future).any() for group in batch.values()):
            raise RunFailure(f"there is no version {future} of the weights yet: {_WRONG_VERSIONS}")

    def _check_versions(self, batch: Collected) -> None:
        """Refuses a batch that has a row of a version of which nothing was compared: its versions must be wrong.

        A row that started with a version could be compared with it. Only rows that go on with caches of older weights
        (`keep_cache`) cannot: if a version drew nothing else, it is counted.
        """
        versions, lengths = batch.rows.versions, batch.rows.lengths
        drew = {int(version) for row, length in zip(versions, lengths, strict=True) for version in row[:length]}
        unchecked = {version for version in drew if version >= self._resumed} - self._verified
        self._unchecked += len(unchecked)
        if wrong := sorted(unchecked & {int(version) for version in versions[:, 0]}):
            self._recompute.refuse(f"nothing of version {wrong[0]} of the weights was compared: {_WRONG_VERSIONS}")

    def _retire(self, lane: Lane, running: DrawnRows | None) -> None:
        """Records the rows of versions that no longer draw. running: None if unknown; then the next `state` does it."""
        if running is None or len(lane.updates) < 2:
            return
        rows = rows_of(self._groups if self._recompute.compares else {}, lane.numbers, running)
        lane.retired += [(update, rows) for update in lane.updates[:-1]]
        lane.updates = lane.updates[-1:]

    def _compare_retired(self) -> None:
        """Compares the recorded rows of retired versions, and drops those versions."""
        for lane in self._lanes:
            while lane.retired:
                compared, lane.tracked = self._compare(lane, *lane.retired.pop(0))
                self._compared += compared

    # ---- between two chunks

    @property
    def _complete(self) -> list[tuple[int, int]]:
        """(time, number) of the groups that are complete."""
        return [(group.time, number) for number, group in self._groups.items() if group.complete]

    @property
    def _end(self) -> int:
        """The virtual time at which the update on the collected batch ends."""
        return max(self._times.trainer, self._ready) + int(self._rules.update)

    def _draw_ahead(self) -> Callable[[], None]:
        """Starts to draw during the update, for as long as that takes; returns a function that finishes it."""
        if not self._wall:
            end = self._end
            start = partial(self._draw_until, lambda: self._times.rollouts >= end)
            return cache(start) if self._threads is None else self._threads.submit(start).result
        if self._threads is None:  # `publish` draws until the weights are ready
            return lambda: None
        ended = Future[None]()
        drawing = self._threads.submit(self._draw_until, ended.done, ended)

        def stop() -> None:
            if not ended.done():
                ended.set_result(None)
            drawing.result()

        return stop

    def _draw_until(self, ended: Callable[[], bool], end: Future | None = None) -> None:
        while not ended() and (self._may_start() or any(map(self._goes_on, self._lanes))):
            self._advance(end)

    def _goes_on(self, lane: Lane) -> bool:
        return lane.chunk is not None or self._may_swap(lane) or lane.workers.running > 0

    def _may_start(self) -> bool:
        spare = self._times.spare * self._rules.batch
        return self._count < self._loaded and may_start(self._rules, self._count - spare, self._times.version)

    def _may_swap(self, lane: Lane) -> bool:
        newer = self._newest is not None and lane.version < self._newest.version
        return newer and may_swap(self._rules, lane.workers.running)

    def _advance(self, end: Future | None = None) -> None:
        """Lets the lanes decode, and records the results of those that finish first. Returns early if `end` is done."""
        self._dispatch()
        self._record_first(end)

    def _dispatch(self) -> None:
        """Lets each idle lane take new weights, fills its free slots as far as the rules allow, and starts a chunk."""
        idle = [lane for lane in self._lanes if lane.chunk is None]
        for lane in idle if self._threads is None else ():
            self._swap(lane)
        updates = [self._update(lane) for lane in idle]
        for lane, update, entering in zip(idle, updates, self._entering(idle), strict=True):
            if update or lane.workers.running or any(entering):
                lane.chunk = self._submit(self._decode, lane, update, entering)

    def _entering(self, lanes: Sequence[Lane]) -> list[list[list[Prompt]]]:
        """Returns the prompts that may start, by lane and worker. Each goes to the worker with most free slots."""
        rooms = {(at, own): room for at, lane in enumerate(lanes) for own, room in enumerate(lane.workers.rooms)}
        entering: list[list[list[Prompt]]] = [[[] for _ in lane.workers.rooms] for lane in lanes]
        while rooms and max(rooms.values()) > 0 and self._may_start():
            at, own = max(rooms, key=lambda worker: rooms[worker])
            prompt, rows = self._prompt(self._count), Drawn.blank(self._samples, limit=self._limit)
            self._groups[self._count] = Group(prompt, lanes[at].numbers[own], rows)
            self._count += 1
            entering[at][own].append(prompt)
            rooms[at, own] -= 1
        return entering

    def _decode(
        self, lane: Lane, update: _Swap | None, entering: list[list[Prompt]]
    ) -> tuple[DrawnRows | None, list[RowProgress], float, float]:
        """Takes new weights, if any, and decodes a chunk; also returns the seconds before the chunk and of the chunk.

        Runs in a thread of the lane, if there are threads.
        """
        jax.block_until_ready(lane.updates[-1].handle)  # the update may still compute weights of slices
        self._trainer_wait.update_is_done()
        idle = time.monotonic() - lane.idle_since
        drawn = self._take(lane, *update) if update else None
        began = time.monotonic()
        progress = lane.workers.decode(entering)
        lane.idle_since = time.monotonic()
        if self._threads is not None:
            self._on_chunk(self._lanes.index(lane), lane.idle_since - began)
        return drawn, progress, idle, lane.idle_since - began

    def _submit(self, call: Callable[..., Any], *arguments: Any) -> Future:
        if self._threads is not None:
            return self._threads.submit(call, *arguments)
        done = Future[Any]()
        done.set_result(call(*arguments))
        return done

    def _record_first(self, end: Future | None = None) -> None:
        """Waits for the first lane, or for `end`, and records the results of all lanes that are done."""
        wait([own for own in (end, *(lane.chunk for lane in self._lanes)) if own], return_when=FIRST_COMPLETED)
        for lane in self._lanes:
            if lane.chunk is not None and lane.chunk.done():
                (running, progress, idle, seconds), lane.chunk = lane.chunk.result(), None
                lane.idle_seconds += idle
                self._retire(lane, running)
                self._record(lane, progress, seconds)

    def _record(self, lane: Lane, progress: Sequence[RowProgress], seconds: float) -> None:
        """Records what a lane drew in a chunk, and advances the virtual time (with the wall clock only an order)."""
        steps = max((row.end - row.start for row in progress), default=0)
        lane.decoded, lane.decoding_seconds = lane.decoded + steps, lane.decoding_seconds + seconds
        now = self._times.rollouts + steps
        self._times = replace(self._times, rollouts=now)
        for row in progress:
            number, sample = divmod(row.row, self._samples)
            group = self._groups[number]
            drawn = group.rows
            drawn.versions[sample, row.start : row.end] = lane.version
            if row.end > row.start:
                self._drew.add((group.worker, lane.version))
            if row.response is not None:
                own = sample, slice(row.end)
                drawn.tokens[own], drawn.logprobs[own], drawn.finished[sample] = row.response
                drawn.lengths[sample] = row.end
                if group.complete:
                    group.time = now + int(self._rules.reward)
                    self._report(number)

    def _report(self, number: int) -> None:
        """Passes a group that is complete to `on_complete`."""
        self._on_complete(collected({number: self._groups[number]}, self._times.version))
