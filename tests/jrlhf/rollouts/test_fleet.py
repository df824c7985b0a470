"""The schedule of a run against that of the simulator, for rows of the same lengths."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np
import pytest

from jrlhf.errors import RunFailure
from jrlhf.meshes import make_mesh, to_host
from jrlhf.models.generation.continuous import Prompt, RowProgress
from jrlhf.planning.predict_async import token_versions
from jrlhf.planning.simulate_async import Scenario, measured, simulate
from jrlhf.rollouts.fleet import Fleet
from jrlhf.rollouts.schedule import Rules
from jrlhf.rollouts.slices import Published
from jrlhf.rollouts.state import FREE, NEVER
from tests.support.fleets import NO_RECOMPUTE

VERSIONS = 14


class Rows:
    """Stands for logical workers: rows of given lengths, which draw nothing."""

    own_devices = False

    def __init__(self, scenario: Scenario, lengths: np.ndarray):
        self.scenario, self.lengths = scenario, lengths
        self.rows: dict[int, int] = {}  # row -> the tokens that it drew

    @property
    def rooms(self) -> list[int]:
        return [(self.scenario.slots - len(self.rows)) // self.scenario.samples]

    @property
    def running(self) -> int:
        return len(self.rows)

    def put(self, weights):
        return weights

    def take(self, weights, again):
        return []

    def identities(self):
        return []

    def metrics(self) -> dict[str, float]:
        return {}

    def decode(self, prompts: Sequence[Sequence[Prompt]]) -> list[RowProgress]:
        samples = self.scenario.samples
        self.rows |= {prompt.number * samples + s: 0 for prompt in prompts[0] for s in range(samples)}
        progress = []
        for row, start in list(self.rows.items()):
            length = int(self.lengths.ravel()[row])
            self.rows[row] = end = min(start + self.scenario.chunk, length)
            response = (np.zeros(end, np.int32), np.zeros(end, np.float32), True)
            progress.append(RowProgress(row, start, end, response if end == length else None))
            if end == length:
                del self.rows[row]
        return progress


def fleet_of(rows: Rows) -> Fleet:
    """A fleet with one worker, which draws with version 0."""
    scenario, limit = rows.scenario, int(rows.lengths.max())
    fleet = Fleet(
        [rows],  # type: ignore[list-item]
        make_mesh(8, 1, 1),
        scenario.rules,
        lambda number: Prompt(number, np.zeros(1, np.int32), 1, np.zeros(1)),
        lambda group: None,
        samples=scenario.samples,
        limit=limit,
        recompute=NO_RECOMPUTE,
    )
    fleet._take(fleet._lanes[0], Published(0, None, {}, None))
    return fleet


def play(scenario: Scenario, lengths: np.ndarray) -> tuple[dict[int, int], dict[int, list[list[int]]]]:
    """Group -> the version that learned from it; group -> the versions of its rows' tokens."""
    trained, versions, fleet = {}, {}, fleet_of(Rows(scenario, lengths))
    for version in range(VERSIONS):
        batch = fleet.collect()
        rows = [row[:length].tolist() for row, length in zip(batch.rows.versions, batch.rows.lengths, strict=True)]
        for at, number in enumerate(batch.numbers):
            trained[int(number)] = version
            versions[int(number)] = rows[at * scenario.samples : (at + 1) * scenario.samples]
        fleet.publish(({}, {}), {})
    return trained, versions


@pytest.mark.parametrize("seed", range(2))
def test_versions_of_tokens_are_those_of_the_simulator(seed):
    rng, ages = np.random.default_rng(seed), set()
    for number in range(10):
        samples = int(rng.integers(1, 4))
        scenario = Scenario(
            Rules(
                int(rng.integers(1, 4)),
                int(rng.integers(0, 4)),
                float(rng.integers(1, 40)),
                ("keep_cache", "prefill_again", "finish")[rng.integers(3)],
                float(rng.integers(0, 2) * rng.integers(0, 50)),
            ),
            slots=samples + int(rng.integers(0, 9)),
            samples=samples,
            lengths=measured(rng.integers(1, 30, 50).tolist()),
            chunk=int(rng.integers(1, 9)),
        )
        trace = simulate(scenario, VERSIONS, number)
        trained, versions = play(scenario, scenario.lengths(np.random.default_rng(number), (1024, samples)))
        learned = np.flatnonzero(trace.trained >= 0)
        assert {int(group): int(trace.trained[group]) for group in learned} == trained, scenario
        rows, drew, tokens = token_versions(trace, trace.trained >= 0)
        simulated = [
            np.repeat(drew[rows == row], tokens[rows == row]).tolist() for row in range(len(learned) * samples)
        ]
        assert simulated == [row for group in learned for row in versions[int(group)]], scenario
        ages |= {trained[group] - version for group in trained for row in versions[group] for version in row}
    assert max(ages) > 1 and min(ages) == 0


def test_a_saved_state_has_the_same_bits_however_long_the_run_is():
    """Times of a long run do not fit into an int32; in a saved state they count from its own time."""
    scenario, states = Scenario(Rules(2, 2, 9.0), slots=4, samples=1, lengths=measured([3, 40]), chunk=4), []
    for start in (0, NEVER - 44, 2**40):  # a group is complete at the time NEVER, and far beyond it
        fleet = fleet_of(Rows(scenario, np.array([3, 40] * 40)))
        fleet._times = replace(fleet._times, rollouts=start, trainer=start)
        for _ in range(3):
            fleet.collect()
            fleet.publish(({}, {}), {})
        states.append(to_host(fleet._state([])))
    for state in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, states[0], state)
    waiting = states[0].started.time[states[0].started.number != FREE]
    assert (waiting < 0).any() and (waiting == NEVER).any()  # some are complete, and some are not


def test_equal_weights_of_two_versions_between_which_an_update_was_applied_end_the_run():
    """Not where no update was applied, its learning rate was 0, or its gradients were."""
    scenario = Scenario(Rules(2, 1, 6.0), 4, 1, measured([3]))
    same, other = cast(Any, {"w": np.uint32(1)}), cast(Any, {"w": np.uint32(2)})
    for identity, first, end, norm, wrong in (
        (other, 1, 3, 1.0, False),
        (same, 1, 1, 1.0, False),
        (same, 0, 1, 1.0, False),
        (same, 3, 4, 1.0, False),
        (same, 1, 3, 0.0, False),
        (same, 1, 3, np.nan, False),  # no update was sound
        (same, 1, 3, 1.0, True),
        (same, 0, 2, 1.0, True),
        (same, 2, 4, 1.0, True),
    ):
        fleet = fleet_of(Rows(scenario, np.full(80, 3)))
        fleet._newest = Published(0, None, same, None, np.int32(first))
        fleet._rates = np.array([0, 0.1, 0.1, 0])
        fleet.collect()
        fleet.publish(({}, {}), identity, np.int32(end), np.float32(norm))
        if wrong:
            with pytest.raises(RunFailure, match="of version 1 are those of version 0, although 2 updates"):
                fleet.collect()
        else:
            fleet.collect()


def test_a_decode_step_takes_the_seconds_of_the_chunks_divided_by_their_steps(monkeypatch):
    scenario = Scenario(Rules(2, 1, 6.0), slots=4, samples=1, lengths=measured([3, 8]), chunk=4)
    rows, clock, steps = Rows(scenario, np.array([3, 8] * 40)), [0.0], []
    decode = rows.decode

    def decoded(prompts: Sequence[Sequence[Prompt]]) -> list[RowProgress]:
        progress = decode(prompts)
        steps.append(max(row.end - row.start for row in progress))
        clock[0] += 0.25 * steps[-1] + 1.0  # a second per chunk beside its steps
        return progress

    monkeypatch.setattr(rows, "decode", decoded)
    monkeypatch.setattr("jrlhf.rollouts.fleet.time.monotonic", lambda: clock[0])
    fleet = fleet_of(rows)
    for _ in range(3):
        fleet.collect()
        fleet.publish(({}, {}), {})
        assert fleet.metrics()["perf/decode_step_seconds"] == pytest.approx(0.25 + len(steps) / sum(steps))
        steps.clear()


def test_waiting_is_time_without_an_update_to_compute_and_time_between_two_chunks(monkeypatch):
    """Rollouts decode 6 steps while an update of 4, 6 or 9 seconds computes, in chunks of 2 steps and 2 seconds.

    The trainer waits from the end of its update until its next batch, which needs one more chunk. This chunk needs the
    weights of the update, so the rollouts wait for them.
    """
    clock = [0.0]

    class Leaf:
        def __init__(self, update: float):
            self.end = clock[0] + update

        def is_deleted(self) -> bool:
            return False

        def is_ready(self) -> bool:
            return clock[0] >= self.end

        def block_until_ready(self) -> None:
            clock[0] = max(clock[0], self.end)

    monkeypatch.setattr("jrlhf.rollouts.fleet.time.monotonic", lambda: clock[0])
    for update, waits in ((4.0, (4.0, 0.0)), (6.0, (2.0, 0.0)), (9.0, (2.0, 3.0))):
        scenario = Scenario(Rules(2, 1, 6.0), slots=2, samples=1, lengths=measured([8]), chunk=2)
        rows = Rows(scenario, np.full(80, 8))
        decode, clock[0] = rows.decode, 0.0

        def decoded(prompts: Sequence[Sequence[Prompt]], decode=decode) -> list[RowProgress]:
            clock[0] += 2.0
            return decode(prompts)

        monkeypatch.setattr(rows, "decode", decoded)
        fleet = fleet_of(rows)
        fleet.collect()
        for _ in range(3):
            fleet.metrics()
            weights: Any = Leaf(update), {}
            fleet.publish(weights, {})
            fleet.collect()
            metrics = fleet.metrics()
            assert (metrics["perf/trainer_wait_seconds"], metrics["perf/rollouts_wait_seconds"]) == waits
