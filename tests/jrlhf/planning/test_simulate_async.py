"""The rules of an asynchronous run, and its simulator, against plays token by token and closed forms."""

import math
import statistics
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import rules
from benchmarks.rules import DROPPED, cost
from benchmarks.staleness import PUBLISHED
from jrlhf.planning.predict_async import costs, summarise, token_versions
from jrlhf.planning.simulate_async import Scenario, lognormal, measured, simulate
from jrlhf.ppo import Experience, PolicyConfig
from jrlhf.ppo.off_policy import without_older
from jrlhf.rollouts.schedule import Rules, first_batch, fresh

BOUNDS = (0, 2, 8)
# 16 groups of 8 rows, as many slots as rows, and an update that takes as long as decoding a batch in full slots.
RUN = Scenario(Rules(16, 0, 1000.0), slots=128, samples=8, lengths=lognormal(1000, 1.0))
OTHER = rules.Scenario(RUN.rules, RUN.slots, RUN.samples, RUN.lengths)  # for rules that are not a run's


@dataclass
class Group:
    """tokens: of each row, the versions that drew its tokens. done: time at which its score is known."""

    lengths: list[int]
    tokens: list[list[int]] = field(default_factory=list)
    done: int | None = None
    trained: int | None = None
    dropped: bool = False


def play(scenario: rules.Scenario, versions: int, seed: int) -> tuple[list[Group], list[int]]:
    """Plays a run one time step after the other; returns its groups and the times at which updates began.

    Written from the description of the rules. All times must be whole numbers.
    """
    rule, finish = scenario.rule, scenario.rules.on_new_weights == "finish"
    batch, bound, update = scenario.rules.batch, scenario.rules.staleness, int(scenario.rules.update)
    groups: list[Group] = []
    running: list[tuple[Group, int]] = []
    begins: list[int] = []
    drawn: dict[int, int] = {}  # version at the start of a group, by its number
    version, left = 0, 0  # left: steps of the chunk that runs
    supply = iter(scenario.lengths(np.random.default_rng(seed), (1024, scenario.samples)).tolist())
    waiting: list[tuple[Group, int]] = []  # rows without a slot
    now = 0

    def train() -> None:
        if begins and now < begins[-1] + update:
            return
        if rule == "discard_stale":
            for number, group in enumerate(groups):
                if group.done is not None and group.trained is None and len(begins) - drawn[number] > bound:
                    group.dropped = True
        ready = [
            (group.done, number)
            for number, group in enumerate(groups)
            if group.done is not None and group.done <= now and group.trained is None and not group.dropped
        ]
        if rule == "in_order":
            ready = [item for item in ready if item[1] // batch == len(begins)]
        if len(ready) >= batch:
            # The trainer is free and enough groups are complete for the first time: all of these may be chosen from.
            chosen = sorted(number for _, number in ready) if rule == "token_bound" else [n for _, n in sorted(ready)]
            for number in chosen[:batch]:
                groups[number].trained = len(begins)
            begins.append(now)

    while len(begins) < versions:
        if left or rule != "token_bound":  # groups that are complete at this moment belong to those of a run's update
            train()
        if left == 0:
            for group, _ in running:
                if all(len(tokens) == length for tokens, length in zip(group.tokens, group.lengths, strict=False)):
                    if len(group.tokens) == scenario.samples and group.done is None:
                        group.done = now + int(scenario.rules.reward)
            running = [(group, row) for group, row in running if len(group.tokens[row]) < group.lengths[row]]
            if rule == "drop_oldest":
                queue = [group for group in groups if group.done is not None and group.trained is None]
                queue = sorted((group for group in queue if not group.dropped), key=lambda group: group.done or 0)
                for group in queue[: max(len(queue) - scenario.queue * batch, 0)]:
                    group.dropped = True
            train()
            finished = len([begin for begin in begins if begin + update <= now])
            if not (finish and running):
                version = finished // scenario.publish * scenario.publish
            while True:
                free = scenario.slots - len(running)
                if not waiting:
                    if free < (scenario.samples if scenario.together else 1):
                        break
                    capacity = batch * (version + bound + 1)
                    if rule in ("token_bound", "capacity", "in_order") and len(groups) >= capacity:
                        break
                    groups.append(Group(next(supply)))
                    drawn[len(groups) - 1] = version
                    waiting = [(groups[-1], row) for row in range(scenario.samples)]
                entering, waiting = waiting[:free], waiting[free:]
                for group, row in entering:
                    group.tokens.append([])
                    running.append((group, row))
                if waiting:
                    break
            left = scenario.chunk if running else 0
        if running:
            for group, row in running:
                if len(group.tokens[row]) < group.lengths[row]:
                    group.tokens[row].append(version)
            left -= 1
            if all(len(group.tokens[row]) == group.lengths[row] for group, row in running):
                left = 0
        now += 1
    return groups, begins


def random_scenario(rng: np.random.Generator) -> rules.Scenario:
    def one_of(*values):
        return values[rng.integers(len(values))]

    rule = one_of("token_bound", "token_bound", "capacity", "in_order", "drop_oldest", "discard_stale")
    samples, publish = int(rng.integers(1, 5)), one_of(1, 1, 2)
    return rules.Scenario(
        Rules(
            int(rng.integers(1, 4)),
            publish - 1 + one_of(0, 1, 2, 2.5, 5),
            float(rng.integers(1, 40)),
            one_of("keep_cache", "prefill_again", "finish") if "d_" not in rule else "keep_cache",
            0.0 if rule in ("drop_oldest", "discard_stale") else float(rng.integers(0, 2) * rng.integers(0, 50)),
        ),
        slots=samples + int(rng.integers(0, 12)),
        samples=samples,
        lengths=measured(rng.integers(1, 30, 50).tolist()),
        chunk=one_of(1, 1, 3, 8),
        together=one_of(True, False),
        publish=publish,
        rule=rule,
        queue=one_of(1, 2),
    )


@pytest.mark.parametrize("seed", range(2))
def test_it_plays_what_steps_and_tokens_do(seed):
    """Same batches, times, drops and version of every token, for random settings."""
    rng = np.random.default_rng(seed)
    for number in range(10):
        scenario, versions = random_scenario(rng), 14
        groups, begins = play(scenario, versions, number)
        trace = rules.simulate(scenario, versions, number)
        np.testing.assert_array_equal(trace.begins, begins, err_msg=str(scenario))
        count = max(number for number, group in enumerate(groups) if group.trained is not None) + 1
        learned = [group for group in groups if group.trained is not None]
        assert [group.trained for group in learned] == trace.trained[trace.trained >= 0].tolist(), scenario
        assert [group.lengths for group in groups[:count]] == trace.lengths[:count].tolist()
        assert [group.dropped for group in groups[:count]] == (trace.trained[:count] == DROPPED).tolist(), scenario
        assert [group.tokens[0][0] for group in learned] == trace.drawn[trace.trained >= 0].tolist()
        rows, drew, tokens = token_versions(trace, trace.trained >= 0)
        assert tokens.min() > 0
        simulated = [np.repeat(drew[rows == row], tokens[rows == row]).tolist() for row in range(rows.max() + 1)]
        assert simulated == [tokens for group in learned for tokens in group.tokens], scenario


def test_it_plays_the_rules_of_a_run():
    """The simulator of a run against that of all rules, which is tested above."""
    rng = np.random.default_rng(0)
    for number in range(10):
        other = replace(random_scenario(rng), rule="token_bound", together=True, publish=1)
        own = Scenario(**{field.name: getattr(other, field.name) for field in fields(Scenario)})
        trace = simulate(own, 14, number)
        for name, values in asdict(rules.simulate(other, 14, number)).items():
            if name != "scenario":
                np.testing.assert_array_equal(getattr(trace, name), values, err_msg=f"{name} of {own}")


def test_shares_are_those_of_single_tokens():
    """Ages and weights of a prediction against loops over the tokens of the play."""
    scenario = replace(OTHER, rules=Rules(3, 1, 60.0), slots=16, samples=2, lengths=lognormal(40, 1.0))
    versions = 60
    groups, _ = play(scenario, versions, seed=1)
    middle = [group for group in groups if group.trained is not None and 12 <= group.tokens[0][0] < 48]
    rows = [(tokens, group.trained or 0) for group in middle for tokens in group.tokens]
    ages = [[trained - version for version in tokens] for tokens, trained in rows]
    flat = [age for row in ages for age in row]
    predicted = cost(scenario, versions, seed=1)
    assert math.isclose(predicted.mean_age, statistics.mean(flat))
    assert predicted.max_age == max(flat) > 1 == predicted.max_full_age
    old = sum(age > 1 for age in flat) / len(flat)
    assert math.isclose(predicted.time_per_batch, predicted.step / predicted.length_ratio / (1 - old))
    assert 0.05 < old < 0.5 and math.isclose(predicted.older, old) and math.isclose(predicted.zero_weight, old)
    ranked = sorted(ages, key=len)
    quartiles = [[age for row in part for age in row] for part in np.array_split(np.array(ranked, object), 4)]
    np.testing.assert_allclose(predicted.full_weight, [np.mean(np.array(part) <= 1) for part in quartiles], rtol=0.02)


@pytest.mark.parametrize("published", PUBLISHED, ids=str)
def test_mean_staleness_in_closed_form(published):
    assert abs(cost(published.scenario, versions=250).group_age - published.formula) < 0.1


@pytest.mark.parametrize("on_new_weights", ["finish", "prefill_again"])
def test_the_rule_of_a_run(on_new_weights):
    """It drops no row, weights no token beyond the bound, and is the faster, the higher the bound."""
    scenario = replace(OTHER, rules=replace(OTHER.rules, on_new_weights=on_new_weights), prefill=0.001)
    steps = []
    for bound in BOUNDS:
        bounded = replace(scenario, rules=replace(scenario.rules, staleness=bound))
        predicted = cost(bounded, versions=200)
        for name, value in asdict(costs(bounded, 200)).items():
            assert math.isclose(value, getattr(predicted, name)), name
        steps.append(predicted.step)
        assert predicted.discarded == 0 and abs(predicted.length_ratio - 1) < 0.01
        assert predicted.max_full_age <= bound and predicted.group_age <= bound + 0.01
        if on_new_weights == "finish":
            assert predicted.max_age <= bound and predicted.older == 0
    assert np.diff(steps).max() <= 0.005 * steps[-1]
    assert steps[-1] < 0.7 * steps[0]


def test_staleness_0_is_the_synchronous_run():
    trace = simulate(RUN, versions=50)
    np.testing.assert_array_equal(trace.drawn[: 50 * 16], np.repeat(np.arange(50), 16))
    np.testing.assert_array_equal(trace.trained[: 50 * 16], trace.drawn[: 50 * 16])
    longest = trace.lengths.reshape(-1, 128)[:50].max(1)  # all rows of a batch start together
    np.testing.assert_allclose(np.diff(trace.begins), longest[1:] + 1000.0)
    predicted = summarise(trace)
    assert predicted.max_age == 0 and predicted.zero_weight == 0
    assert math.isclose(predicted.trainer_waits, 1 - 1000 / predicted.step)
    tokens = trace.lengths.reshape(-1, 128)[11:50].sum()  # between the beginnings of updates 10 and 49
    assert math.isclose(1 - predicted.rollouts_wait, tokens / (39 * predicted.step) / 128)


def test_pauses_and_costs_of_steps():
    """Times in closed form, one row of 10 tokens at a time and one in an update."""
    scenario = Scenario(Rules(1, 0, 6.0), slots=4, samples=1, lengths=measured([10]))
    assert costs(scenario, 20).step == 16
    assert costs(replace(scenario, transfer=3.0), 20).step == 19
    assert costs(replace(scenario, rules=replace(scenario.rules, reward=5.0)), 20).step == 21
    assert costs(replace(scenario, chunk=8), 20).step == 16  # the second chunk ends with the row
    assert costs(replace(scenario, empty=0.5), 20).step == 6 + 10 * (0.5 + 0.5 / 4)
    assert costs(replace(scenario, rules=Rules(1, 1, 6.0)), 21).step == (10 + 6) / 2  # two rows take turns
    again = replace(scenario, rules=Rules(1, 2, 7.0, "prefill_again"), slots=1, prefill=0.5, prompt=4)
    assert costs(again, 40).step == 10 + 0.5 * (7 + 4)  # weights come when the running row has 7 tokens


def test_settings_that_cannot_run_are_refused():
    with pytest.raises(ValueError, match="slots=7 cannot hold the samples=8"):
        replace(RUN, slots=7)
    with pytest.raises(ValueError, match="staleness=0.*publish=2"):
        replace(OTHER, publish=2)


def test_a_batch_is_the_groups_that_started_first_of_those_that_are_complete():
    """When the update can begin: enough groups are complete, and the trainer is free."""
    assert first_batch([(3.0, 0), (1.0, 1)], Rules(3, 0, 1.0), 9.0) is None
    complete = [(3.0, 0), (1.0, 5), (2.0, 4), (2.0, 3), (2.0, 9)]
    assert first_batch(complete, Rules(3, 0, 1.0), 0.0) == (2.0, [3, 4, 5])
    assert first_batch(complete, Rules(3, 0, 1.0), 2.9) == (2.0, [3, 4, 5])
    assert first_batch(complete, Rules(3, 0, 1.0), 3.0) == (2.0, [0, 3, 4])
    rng = np.random.default_rng(0)
    for _ in range(50):
        complete = [(float(time), number) for number, time in enumerate(rng.integers(0, 9, 20))]
        free = float(rng.integers(0, 9))
        batch = first_batch([complete[index] for index in rng.permutation(20)], Rules(7, 0, 1.0), free)
        assert batch is not None
        time, numbers = batch
        moments = [moment for moment in range(9) if sum(done <= moment for done, _ in complete) >= 7]
        assert time == moments[0]  # no rule could have begun earlier
        then = [number for done, number in complete if done <= max(time, free)]
        assert numbers == then[:7] and not set(then) - set(numbers) & set(range(numbers[-1]))


@pytest.mark.parametrize("staleness", [1, 9])
def test_the_loss_learns_from_the_tokens_that_are_fresh(staleness):
    """`without_older` of the trainer and `fresh` of the simulator are one rule. Fresh tokens keep their weights."""
    rng, step = np.random.default_rng(0), 7
    versions = rng.integers(0, step + 1, (5, 6)).astype(np.int32)
    weights = rng.uniform(0.5, 2, versions.shape).astype(np.float32)
    arrays = {item.name: jnp.zeros(versions.shape) for item in fields(Experience)}
    arrays |= {"old_logprobs": jnp.log(weights), "response_mask": jnp.ones(versions.shape, jnp.bool_)}
    experience = Experience(**arrays | {"versions": jnp.asarray(versions), "importance": jnp.asarray(weights)})  # type: ignore[arg-type]
    config = PolicyConfig(staleness=staleness, importance="token", importance_cap=5.0)
    masked: Any = without_older(experience, experience.ages(jnp.int32(step)), config).importance
    np.testing.assert_allclose(masked, np.where(fresh(versions, step, staleness), weights, 0), rtol=1e-6)
    assert (staleness == 9) == bool(np.all(masked))
