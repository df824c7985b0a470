"""The simulator of the last rows: against times computed by hand, and against one that goes from token to token."""

import re
from dataclasses import replace

import numpy as np
import pytest

from jrlhf.algorithms.registry import graph_of
from jrlhf.config import Config, load_config
from jrlhf.meshes.hardware import HARDWARE, Cluster
from jrlhf.meshes.plan import LayoutName, Placement, Plan, Slice
from jrlhf.models import Schedule
from jrlhf.models.generation.occupancy import LastRows
from jrlhf.planning.auto import prices_of
from jrlhf.planning.fusion.last_rows import (
    NO_GAIN,
    Choice,
    Moves,
    Rollouts,
    Scoring,
    Work,
    choose,
    decode,
    finish,
    follow,
    read_by_rows,
    rollouts_of,
    sent_bytes,
)
from jrlhf.planning.fusion.tiles import choose_tiles, resumed_tiles, with_tiles
from jrlhf.planning.time import CostModel
from jrlhf.planning.workload import workload_of
from jrlhf.stages.setup import architectures

# Two devices draw two rows each; on the second one a tile of two rows is scored in 3 seconds. A chunk is a step.
TWO = Rollouts(
    Schedule(chunk=1, buckets=1, lengths=1),
    prompts=4,
    samples=1,
    width=4,
    limit=8,
    devices=Slice(0, 2),
    tensor=1,
    tile=2,
    scoring=[Scoring(Slice(1, 1), 3.0)],
    step=lambda slots, positions: 1.0,
    prefill=lambda prompts: 0.5,
    move=lambda groups, positions: 0.25,
)
LENGTHS = np.array([1, 1, 2, 8])


def test_times_by_hand():
    """All rows are prefilled in 0.5 s. After the first step the first tile is done, and two rows are left: they move to
    the first device, and the tile is given to the second at the next look, at 2.75 s. The last row ends at 8.75 s."""
    chunks = decode(TWO, LENGTHS)
    assert [chunk.end for chunk in chunks] == [0.5 + step for step in range(1, 9)]
    assert [list(chunk.running) for chunk in chunks] == [[2, 2], [0, 2], *[[0, 1]] * 6]
    assert finish(TWO, chunks, None) == 8.5 + 2 * 3
    assert finish(TWO, chunks, LastRows(1)) == 8.75 + 3
    slow = replace(TWO, scoring=[Scoring(Slice(1, 1), 10.0)])
    assert finish(slow, chunks, LastRows(1, 2)) == 2.75 + 2 * 10
    assert finish(slow, chunks, LastRows(1, 1)) == 3.75 + 2 * 10
    assert finish(replace(TWO, scoring=[Scoring(Slice(0, 1), 3.0)]), chunks, LastRows(1)) == 8.75 + 2 * 3


def test_work_by_hand():
    """The move of the same rollout leaves the second device at 1.5 s; its tiles follow at the next looks."""
    named = replace(TWO, scoring=[Scoring(Slice(1, 1), 3.0, "ref")])
    ends = [(0.75 + step, left) for step, left in zip(range(2, 9), [1, *[1] * 5, 0], strict=True)]
    assert follow(named, decode(TWO, LENGTHS), LastRows(1)) == [
        Work("", Slice(0, 2), 0.0, 1.5, [(0.0, 4), (1.5, 2)]),
        Work("ref", Slice(1, 1), 2.75, 5.75),
        Work("ref", Slice(1, 1), 8.75, 11.75),
        Work("", Slice(0, 1), 1.5, 8.75, [(1.5, 2), *ends]),
    ]


def test_sending_rows_to_other_processes_delays_decoding_by_hand():
    """The second device is that of another process. After the move that process gets each row that is done, in half a
    second: so the last row ends a second later."""
    sending = replace(TWO, send=lambda rows, decoding: 0.5 * rows * (decoding.count == 1))
    assert finish(sending, decode(TWO, LENGTHS), LastRows(1)) == 9.75 + 3
    assert finish(sending, decode(TWO, LENGTHS), None) == 8.5 + 2 * 3  # scored after the last row
    # A third device scores in another process, which gets all four rows.
    before = replace(TWO, scoring=[Scoring(Slice(2, 1), 2.0)], send=lambda rows, decoding: 0.5 * rows)
    assert finish(before, decode(TWO, LENGTHS), None) == 10.5 + 2
    assert finish(before, decode(TWO, LENGTHS), LastRows(1, 1)) == 10.75 + 2


def test_the_fastest_move_is_chosen_and_none_where_none_gains():
    unlike, equal = decode(TWO, LENGTHS), decode(TWO, np.full(4, 8))
    assert choose(TWO, [unlike]) == Choice(LastRows(1, 2), 11.75, 14.5)
    limited = replace(TWO, schedule=replace(TWO.schedule, last_rows=1))
    assert choose(limited, [unlike]) == Choice(LastRows(1, 1), 11.75, 14.5)
    assert choose(TWO, [equal]) == Choice(None, 14.5, 14.5)
    # A second rollout counts as much as the first one.
    assert choose(TWO, [unlike, equal]) == Choice(LastRows(1, 2), (11.75 + 14.5) / 2, 14.5)
    costly = replace(TWO, move=lambda groups, positions: 3.5)
    assert choose(costly, [unlike]).last is None


def test_a_run_says_if_no_move_frees_devices_that_score():
    for scoring, expected in (
        ([], [NO_GAIN]),
        ([Slice(2, 1)], [NO_GAIN]),
        ([TWO.devices], [NO_GAIN]),
        ([Slice(1, 1)], []),
    ):
        lines: list[str] = []
        rollouts = {"draw": replace(TWO, scoring=[Scoring(devices, 3.0) for devices in scoring])}
        Moves(lambda rollouts=rollouts: rollouts, lines.append)
        assert lines == expected, scoring


def test_a_run_chooses_before_each_rollout_by_the_lengths_of_the_last_ones():
    """The first one stays. What the log is told has the seconds of `choose`, and only where the choice changes."""
    lines: list[str] = []
    moves, equal = Moves(lambda: {"draw": TWO}, lines.append), np.full(4, 8)
    assert moves.before("draw") is None
    for lengths, last in ((LENGTHS, LastRows(1, 2)), (LENGTHS, LastRows(1, 2)), *[(equal, LastRows(1, 2))] * 3):
        moves.after("draw", lengths)
        assert moves.before("draw") == last
    moves.after("draw", equal)  # the fourth in a row: nothing else is remembered
    assert moves.before("draw") is None
    first, second = lines
    assert "move to 1 of 2 groups of devices once at most 2 are left, 11.8 s until" in first and "of 14.5 s" in first
    assert second.startswith("draw: the last rows stay in their groups, 14.5 s until")


def by_token(rollouts: Rollouts, lengths: np.ndarray, last: LastRows | None) -> float:
    """The same without waiting prompts: every step looks at the clock, and every device has a list of its work."""
    groups, chunk = rollouts.devices.count // rollouts.tensor, rollouts.schedule.chunk
    of = np.repeat(np.arange(groups), len(lengths) // groups)
    counts = [len(lengths) // groups >> halved for halved in range(rollouts.schedule.buckets)]
    sizes = rollouts.schedule.cache_lengths(rollouts.width, rollouts.limit)
    clock, size, moved = rollouts.prefill(rollouts.prompts // groups), sizes[0], False
    work: dict[tuple[int, int], tuple[float, set[int], float]] = {}  # (call, tile) -> when, on which devices, how long
    drawing = {*range(rollouts.devices.start, rollouts.devices.stop)}
    for first in range(0, lengths.max(), chunk):
        left = lengths > first
        if last is not None and not moved:
            merged = [int(sum(left[of // (groups // last.groups) == group])) for group in range(last.groups)]
            if max(merged) <= counts[-1] and left.sum() <= (last.rows or len(lengths)):
                moved, clock = True, clock + rollouts.move(last.groups, size)
                drawing = {rollouts.devices.start + number for number in range(last.groups * rollouts.tensor)}
        # After a move a group has the rows of several, and as many slots as before.
        fullest = max(int(sum(left[of == group])) for group in range(groups))
        slots = min(count for count in counts if count >= fullest)
        size = max(size, min(one for one in sizes if one >= min(rollouts.width + first + chunk, sizes[-1])))
        for token in range(first, min(first + chunk, lengths.max())):
            clock += rollouts.step(slots, size)
            done = lengths <= token + 1
        for number, call in enumerate(rollouts.scoring):
            own = {*range(call.devices.start, call.devices.stop)}
            for tile in range(len(lengths) // rollouts.tile):
                rows = slice(tile * rollouts.tile, (tile + 1) * rollouts.tile)
                if done[rows].all() and (done.all() or not own & drawing) and (number, tile) not in work:
                    work[number, tile] = clock, own, call.seconds
    busy: dict[int, float] = {}
    for at, own, seconds in work.values():
        busy |= dict.fromkeys(own, max(at, *(busy.get(device, 0.0) for device in own)) + seconds)
    return max(clock, *busy.values())


def test_random_rollouts_take_the_time_that_counting_tokens_gives():
    draw, moved = np.random.default_rng(0), 0
    for _ in range(20):
        slices = [Slice(*map(int, pair)) for pair in zip(draw.integers(0, 6, 3), draw.integers(1, 5, 3), strict=True)]
        rollouts = Rollouts(
            Schedule(chunk=int(draw.integers(1, 5)), buckets=int(draw.integers(1, 4)), lengths=3),
            prompts=32,
            samples=1,
            width=4,
            limit=40,
            devices=Slice(2, 8),
            tensor=int(draw.choice([1, 2])),
            tile=int(draw.choice([2, 4, 8])),
            scoring=[Scoring(devices, float(draw.integers(1, 9))) for devices in slices],
            step=lambda slots, positions: 0.5 + slots / 16 + positions / 64,
            prefill=lambda prompts: prompts / 4,
            move=lambda groups, positions: positions / 128 / groups,
        )
        lengths = np.minimum(np.ceil(draw.lognormal(1.5, 1, 32)).astype(int), 40)
        chunks = decode(rollouts, lengths)
        stays = finish(rollouts, chunks, None)
        # No smaller number of rows is faster than as many as fit, which `choose` takes.
        fewer = [LastRows(groups, rows) for groups in (1, 2, 4) for rows in range(1, groups * rollouts.last_slots)]
        fewer = fewer if rollouts.groups == 8 else [last for last in fewer if last.groups < 4]
        assert choose(rollouts, [chunks]).seconds <= min(finish(rollouts, chunks, last) for last in fewer) + 1e-9
        for last in (None, LastRows(1), LastRows(2, 3), LastRows(2, 9)):
            expected = by_token(rollouts, lengths, last)
            assert finish(rollouts, chunks, last) == pytest.approx(expected)
            moved += expected != pytest.approx(stays)
    assert moved > 20


def planned(drawing: Slice, *settings: str) -> tuple[Config, CostModel, Plan]:
    """256 responses of an 8B model on H100s, which are scored on half of the devices."""
    config = load_config("configs/llama3-8b-ppo.yaml", ["rollout.chunk=32", *settings])
    workload, cluster = workload_of(config, graph_of(config), architectures(config)), Cluster(HARDWARE["h100"], 8)
    kinds: dict[str, tuple[LayoutName, Slice]] = {
        "generate": ("generate", drawing),
        "infer": ("score", Slice(4, 4)),
        "train": ("train", Slice(0, 8)),
    }
    places = {call.name: kinds[call.kind] for call in workload.calls}
    plan = Plan("by hand", {name: Placement(own, kind, fsdp=own.count) for name, (kind, own) in places.items()})
    return config, prices_of(config, workload, cluster), plan


@pytest.mark.parametrize("last", [None, LastRows(4, 32)])
def test_the_tiles_that_are_chosen_are_the_fastest_by_counting_tokens(last):
    """Where four other devices draw, and where all draw until the last rows move. Equal lengths gain nothing."""
    moves = [] if last is None else [f"rollout.last_groups={last.groups}", f"rollout.last_rows={last.rows}"]
    config, prices, plan = planned(Slice(0, 8 if moves else 4), "compute.score_rows=auto", *moves)
    spread = [np.ceil(np.random.default_rng(seed).lognormal(5, 1, 256)).astype(int) for seed in (0, 1)]

    def seconds(tile: int | None, lengths: list[np.ndarray]) -> float:
        (rollouts,) = rollouts_of(with_tiles(config, tile), prices, plan).values()
        return sum(by_token(rollouts, own, last if tile else None) for own in lengths) / len(lengths)

    for lengths, gains in (([np.minimum(own, 1024) for own in spread], True), ([np.full(256, 400)], False)):
        chosen, line = choose_tiles(config, prices.workload, plan, lengths, lambda: prices)
        # Not two rows, because four devices score. Of equally fast ones the first: whole batches, then large tiles.
        fastest = min((None, 128, 64, 32, 16, 8, 4), key=lambda tile: seconds(tile, lengths))
        assert chosen == fastest and (fastest is not None) == gains
        printed = [float(number) for number in re.findall(r"in ([\d.]+) s", line)]
        assert printed[0] == pytest.approx(seconds(fastest, lengths), rel=1e-2)
        assert seconds(None, lengths) in [pytest.approx(number, rel=1e-2) for number in printed]
    assert with_tiles(config, chosen).rollout.last_groups is None
    assert ("after the last row, and rollout.last_groups has no effect; " in line) == (last is not None)


@pytest.mark.parametrize("last", ["", "rollout.last_groups=auto"])
def test_a_resume_says_which_tiles_it_has_and_whether_rows_move(last):
    config = load_config("configs/llama3-8b-ppo.yaml", ["compute.score_rows=auto", *filter(None, [last])])
    tiled, line = resumed_tiles(config, 16)
    assert (tiled.compute.score_rows, tiled.rollout) == (16, config.rollout)
    assert line.startswith("compute.score_rows=auto: 16 rows are ") and "no effect" not in line
    whole, line = resumed_tiles(config, None)
    assert whole.compute.score_rows is whole.rollout.last_groups is None
    void = ", and rollout.last_groups has no effect" if last else ""
    assert line.endswith(f"whole batches are scored after the last row{void}, as since the start of the run")


def test_no_tiles_need_no_prices_where_all_devices_decode():
    config, prices, plan = planned(Slice(0, 8), "compute.score_rows=auto")

    def unknown() -> CostModel:
        raise AssertionError

    chosen, line = choose_tiles(config, prices.workload, plan, [], unknown)
    assert chosen is None and "no model scores on devices that are free while rows decode" in line


@pytest.mark.parametrize(
    ("settings", "scored"),
    [
        (["rewards=[{name: a, adapter: x}]", "costs=[{name: b, model: y}]"], ["reward.score", "cost.score"]),
        (["rewards=[{name: a, function: 'f:f'}]", "costs=[{name: b, adapter: x}]"], ["cost.score"]),
        (["rewards=[{name: a, model: y}]", "costs=[{name: b, function: 'f:f'}]"], ["reward.score"]),
        (["rewards=[{name: a, function: 'f:f'}]", "costs=[{name: b, function: 'f:f'}]"], []),
        (
            ["stages=[sft, reward_model, safe_rlhf]", "rewards=[]", "costs=[{name: b, function: 'f:f'}]"],
            ["reward.score"],
        ),
    ],
)
def test_models_score_rows_and_functions_are_no_calls_of_a_plan(settings, scored):
    config = load_config("quickstart-safe", ["stages=[sft, safe_rlhf]", *settings])
    graph = graph_of(config)
    early = [call.name for call in read_by_rows(config, graph, graph["actor.generate"])]
    assert [name for name in early if name.endswith(".score")] == scored
    assert {"actor.logprobs", "reference.logprobs", "critic.values", "cost_critic.values"} <= {*early}


def test_rollouts_of_a_plan_take_what_its_prices_say():
    """Eight groups; tiles of 16 rows."""
    config, prices, plan = planned(Slice(0, 8), "compute.score_rows=16")
    workload, cluster, half = prices.workload, prices.cluster, Slice(4, 4)
    (rollouts,) = rollouts_of(config, prices, plan).values()
    drawing = workload.graph["actor.generate"]
    steps = 1024 * rollouts.step(32, workload.prompt + 1024 // 2)
    assert prices.seconds(drawing, plan[drawing.name]) == pytest.approx(rollouts.prefill(32) + steps)
    few = replace(prices, workload=replace(workload, rows=16))
    reading = "reward.score", "actor.logprobs", "reference.logprobs", "critic.values"
    expected = [few.seconds(workload.graph[name], plan[name]) for name in reading]
    assert [call.seconds for call in rollouts.scoring] == expected
    assert {call.devices for call in rollouts.scoring} == {half} and rollouts.occupancy().counts == (32, 16, 8)
    # On each of two devices arrive the caches of three others: 8 rows of 1024 positions with 8 heads, in bfloat16.
    arrived = 3 * 8 * 1024 * 32 * 2 * 8 * 128 * 2
    hardware = cluster.hardware
    # Of four processes with two devices each, three have no device that decodes after a move to two groups.
    several = rollouts_of(config, replace(prices, processes=4), plan)["actor.generate"]
    seconds = several.send(16, Slice(0, 2)) - several.send(0, Slice(0, 2))
    assert seconds == pytest.approx(sent_bytes(16, 1024) / 32e6)
    assert several.send(16, Slice(0, 8)) == rollouts.send(16, Slice(0, 2)) == 0
    assert rollouts.move(2, 1024) == pytest.approx(arrived / (hardware.collective * hardware.link) + hardware.latency)
