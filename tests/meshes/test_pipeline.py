"""Pipeline tables against closed forms, a simulator that knows only time, and mutations."""

import random
from collections import deque
from dataclasses import replace

import pytest

from jrlhf.meshes.pipeline import (
    Action,
    Kind,
    Operation,
    Pipeline,
    PipelineStep,
    Table,
    actions,
    arrange,
    as_run,
    bubble,
    forwards,
    gpipe,
    interleaved,
    makespan,
    one_forward_one_backward,
    peak,
    synchronous_makespan,
    violation,
    zero_bubble,
)

SIZES = [(stages, micro_batches) for stages in (1, 2, 3, 5, 8) for micro_batches in (1, 2, 7, 8, 24)]


def seconds(step: PipelineStep) -> float:
    return {"forward": 1, "backward": 2, "weight": 1}[step.kind]


def equal(step: PipelineStep) -> float:
    return 1


def made() -> list[Table]:
    tables = [make(*sizes) for sizes in SIZES for make in (gpipe, one_forward_one_backward, zero_bubble)]
    return tables + [interleaved(stages, groups * stages, 2) for stages in (1, 2, 4) for groups in (1, 3)]


def before(table: Table, step: PipelineStep) -> set[PipelineStep]:
    """The steps that must end before this one starts, by the path of a micro-batch up and down the stages."""
    stages, split = len(table.pipelines[step.model].devices), table.pipelines[step.model].split
    path: list[tuple[int, str]] = [(stage, "forward") for stage in range(stages)]
    path += [(stage, "backward") for stage in reversed(range(stages))]
    if split and step.kind == "weight":
        path = path[: path.index((step.stage, "backward")) + 1] + [(step.stage, "weight")]
    passed = path[: path.index((step.stage, step.kind))]
    return {step._replace(stage=stage, kind=kind) for stage, kind in passed[-1:]} | {
        step._replace(kind=kind) for stage, kind in passed if stage == step.stage
    }


def simulated(table: Table, orders: list[list[PipelineStep]], cost) -> tuple[int | None, list[int]]:
    """The makespan (None: the devices wait for ever) and the most micro-batches in flight, unit of time by unit."""
    queues, ends = [list(order) for order in orders], {}
    running: list[tuple[PipelineStep, float] | None] = [None] * len(queues)
    most, flight = [0] * len(queues), [0] * len(queues)
    now = 0
    while any(queues) or any(running):
        for device, work in enumerate(running):
            if work and work[1] == now:
                ends[work[0]] = now
                last = "weight" if table.pipelines[work[0].model].split else "backward"
                flight[device] -= work[0].kind == last
                running[device] = None
        for device, queue in enumerate(queues):
            if not running[device] and queue and before(table, queue[0]) <= ends.keys():
                step = queue.pop(0)
                running[device] = step, now + cost(step)
                flight[device] += step.kind == "forward"
                most[device] = max(most[device], flight[device])
        if not any(running):
            return (None if any(queues) else now), most
        now += 1
    return now, most


@pytest.mark.parametrize("stages, micro_batches", SIZES)
def test_closed_forms(stages, micro_batches):
    share = (stages - 1) / (micro_batches + stages - 1)
    for make in (gpipe, one_forward_one_backward):
        assert bubble(make(stages, micro_batches), seconds) == pytest.approx(share, abs=1e-12)
    assert peak(gpipe(stages, micro_batches)) == [micro_batches] * stages
    table = one_forward_one_backward(stages, micro_batches)
    assert peak(table) == [min(stages - stage, micro_batches) for stage in range(stages)]
    assert peak(table, [0.5]) == [0.5 * count for count in peak(table)]

    zero = zero_bubble(stages, micro_batches)
    assert max(peak(zero)) == max(peak(table))  # memory of the first stage of 1F1B
    if micro_batches >= stages:
        assert (
            makespan(zero, equal) == 3 * micro_batches + stages - 1
        )  # F + B - W for each further stage, not F + B + W
    if stages > 1:
        assert bubble(zero, equal) < bubble(table, seconds)
    for chunks in (1, 2, 3):
        if micro_batches % stages == 0:
            share = (stages - 1) / (chunks * micro_batches + stages - 1)
            assert bubble(interleaved(stages, micro_batches, chunks), seconds) == pytest.approx(share, abs=1e-12)


def test_a_simulator_of_time_agrees():
    for table in made():
        cost = equal if table.pipelines[0].split else seconds
        span, most = simulated(table, table.orders, cost)
        assert (makespan(table, cost), peak(table)) == (span, most)
        assert violation(table, max(most)) is None
        assert violation(table, max(most) - 0.5) is not None


def test_waiting_for_receivers_takes_time_only_where_it_delays_a_sender():
    """Operations that take the expected time lose none, in any schedule; others may."""
    for table in made():
        expected = table.pipelines[0].seconds
        cost = lambda step, expected=expected: expected(step.kind)  # noqa: E731
        assert synchronous_makespan(table, cost) == makespan(table, as_run(table, cost))
        late = lambda step: 1 + hash(step[1:3]) % 3  # noqa: E731
        assert (
            synchronous_makespan(table, late) == met(table, as_run(table, late)) >= makespan(table, as_run(table, late))
        )


def met(table: Table, cost) -> float:
    """The makespan by queues of the devices, in which both sides of a transfer wait for each other."""
    devices, queues = table.pipelines[0].devices, [deque[Action]() for _ in range(table.devices)]
    now = [0.0] * table.devices

    def places(action: Action) -> set[int]:
        other = action.step.stage + {"forward": 1, "backward": -1, "weight": 0}[action.step.kind] * action.sends
        return {devices[stage] for stage in (action.step.stage, other) if 0 <= stage < len(devices)}

    for action in actions(table):
        for place in places(action):
            queues[place].append(action)
    while heads := [queue[0] for queue in queues if queue]:
        action = next(action for action in heads if all(queues[place][0] == action for place in places(action)))
        end = max(now[place] for place in places(action)) + (0 if action.sends else cost(action.step))
        for place in places(action):
            queues[place].popleft()
            now[place] = end
    return max(now)


def test_results_are_sent_once_and_before_they_are_needed():
    for table in made():
        dispatched = actions(table)
        place = {action: number for number, action in enumerate(dispatched)}
        steps = [step for step, sends in dispatched if not sends]
        devices = table.pipelines[0].devices
        assert [
            [one for one in steps if devices[one.stage] == device] for device in range(table.devices)
        ] == table.orders
        assert len(place) == len(dispatched) == 2 * len(steps)
        for step in steps:
            assert place[Action(step, False)] < place[Action(step, True)]
            assert all(
                place[Action(need, need.stage != step.stage)] < place[Action(step, False)]
                for need in before(table, step)
            )


def test_devices_that_wait_for_each_other_are_refused():
    """Orders with random exchanges of neighbours: refused if and only if the simulated devices wait for ever."""
    generator, outcomes = random.Random(0), []
    for table in made():
        orders = table.orders
        for _ in range(generator.randint(1, 6)):
            order = generator.choice(orders)
            place = generator.randrange(len(order) - 1)
            order[place : place + 2] = order[place + 1], order[place]
        span, _ = simulated(table, orders, equal)
        outcomes.append(span is None)
        if span is None:
            with pytest.raises(ValueError, match=r"wait for each other: device \d+ for the \w+ of model 0"):
                arrange(table.pipelines, orders)
        else:
            assert makespan(arrange(table.pipelines, orders), equal) == span
    assert 10 < sum(outcomes) < len(outcomes) - 10


def mutated(generator: random.Random, table: Table) -> Table:
    """One random change of an operation."""
    operations = list(table.operations)
    place = generator.randrange(len(operations))
    tick, step = operations[place]
    other = generator.choice(operations)
    change = generator.choice(("drop", "repeat", "move", "exchange", "rename", "shuffle"))
    if change == "drop":
        del operations[place]
    elif change == "repeat":
        operations.append(Operation(operations[-1].tick + 1, step))
    elif change == "move":
        operations[place] = Operation(tick + generator.choice((-2, -1, 1, 2)), step)
    elif change == "exchange":
        operations[place] = Operation(other.tick, step)
        operations[operations.index(other)] = Operation(tick, other.step)
    elif change == "rename":
        field = generator.choice(("stage", "micro_batch", "model"))
        operations[place] = Operation(tick, step._replace(**{field: getattr(step, field) + generator.choice((-1, 1))}))
    else:
        generator.shuffle(operations)
        return replace(table, operations=tuple(operations))
    return replace(table, operations=tuple(sorted(operations)))


def valid(table: Table) -> bool:
    """Whether every step of the table is computed once, alone on its device, after the steps before it, in order."""
    pipeline = table.pipelines[0]
    kinds: list[Kind] = ["forward", "backward", "weight"] if pipeline.split else ["forward", "backward"]
    whole = [
        PipelineStep(0, stage, micro_batch, kind)
        for stage in range(len(pipeline.devices))
        for micro_batch in range(pipeline.micro_batches)
        for kind in kinds
    ]
    if sorted(step for _, step in table.operations) != sorted(whole):
        return False
    ticks = {step: tick for tick, step in table.operations}
    places = {(tick, pipeline.devices[step.stage]) for tick, step in table.operations}
    late = any(ticks[need] >= tick for tick, step in table.operations for need in before(table, step))
    order = [tick for tick, _ in table.operations]
    return len(places) == len(whole) and not late and order == sorted(order)


def test_the_validator_refuses_mutations_that_break_a_rule_and_no_others():
    generator, outcomes = random.Random(1), []
    for table in made():
        assert violation(table) is None
        for _ in range(6):
            mutant = mutated(generator, table)
            sentence = violation(mutant)
            assert (sentence is None) == valid(mutant), (mutant, sentence)
            outcomes.append(sentence is None)
    assert 0.02 < sum(outcomes) / len(outcomes) < 0.5


def test_each_rule_has_its_sentence():
    table = one_forward_one_backward(2, 1)
    forward, above, back, last = table.operations
    for operations, sentence in (
        ((forward, above, back), "no operation computes the backward of model 0, stage 0, micro-batch 0"),
        (
            (*table.operations, last),
            "tick 3: backward of model 0, stage 0, micro-batch 0, was computed at",
        ),
        (
            (forward._replace(step=PipelineStep(1, 0, 0, "forward")),),
            "tick 0: there is no forward of model 1, stage 0, micro-",
        ),
        (
            (forward, above._replace(tick=2), back, last),
            "tick 2: device 1 computes two operations, forward",
        ),
        ((forward._replace(tick=1), above, back, last), "needs the forward of model 0, stage 0, micro-batch 0, which"),
        ((above, forward, back, last), "the operations are not in the order of their ticks"),
    ):
        assert sentence in str(violation(replace(table, operations=operations)))
    assert violation(table, 0.5) == "device 0 keeps activations of 1 in flight, more than 0.5"
    with pytest.raises(ValueError, match="6 micro-batches are no multiple of 4 devices"):
        interleaved(4, 6, 2)
    with pytest.raises(ValueError, match="0 micro-batches"):
        Pipeline((0, 1), 0)


@pytest.mark.parametrize("stages, micro_batches", SIZES)
def test_scores_have_only_forwards_one_after_the_other(stages, micro_batches):
    """Each device computes its M micro-batches at ticks s, s + 1, ..., so no schedule is shorter than M + S - 1."""
    table = forwards(stages, micro_batches)
    assert violation(table) is None
    assert {(tick, step.stage, step.micro_batch) for tick, step in table.operations} == {
        (stage + number, stage, number) for stage in range(stages) for number in range(micro_batches)
    }
    assert makespan(table, equal) == synchronous_makespan(table, equal) == micro_batches + stages - 1
    assert peak(table) == [1] * stages
    backward = Operation(99, PipelineStep(0, 0, 0, "backward"))
    assert (
        violation(replace(table, operations=(*table.operations, backward))) == f"tick 99: there is no {backward.step}"
    )
