"""Faults that weights do not show, made below the code that reports, are seen before a batch is used."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.errors import RunFailure
from jrlhf.meshes import GENERATE, to_devices
from jrlhf.models import ForwardOptions
from jrlhf.models.generation.mixture import make_mixture
from jrlhf.models.generation.redraws import Redraws
from jrlhf.models.generation.sampling import SamplingConfig, sample
from jrlhf.models.lora import LoRAConfig
from jrlhf.rollouts.recompute import NONE, Compared, Row
from tests.jrlhf.rollouts.faulty import (
    ADAPTERS,
    AGAIN,
    BFLOAT,
    CACHES,
    CHANGED,
    CONFIG,
    DRAWS,
    FLOAT,
    PROGRAMS,
    REPORTS,
    S,
    setting,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def seen(
    make: Callable, mode: str = "keep_cache", *, onset: int = 0, worker: int = 1, lora: Any = None, dtype: Any = FLOAT
) -> None:
    """Asserts that a fault of one worker, from a version on, is seen: in float32 before a batch has such a token.

    In bfloat16 some versions later, since a version draws few tokens here.
    """
    own = setting((1, 1, 1), dtype, mode, lora)

    def wrap(batches):
        return [make(own, batch, onset) if number == worker else batch for number, batch in enumerate(batches)]

    fleet = own.fleet(wrap=wrap)
    with pytest.raises(RunFailure, match=f"logical worker {worker} does not draw as the weights of version"):
        for version in range(1, onset + (3 if dtype == FLOAT else 20)):
            batch, _ = own.iterate(fleet, version)
            newest = max(row[:n].max() for row, n in zip(batch.rows.versions, batch.rows.lengths, strict=True))
            assert dtype == BFLOAT or newest < onset


@pytest.mark.parametrize("mode", ["keep_cache", pytest.param("finish", marks=pytest.mark.full)])
@pytest.mark.parametrize("shift", [pytest.param(-1, marks=pytest.mark.full), 1])
def test_a_batch_of_whose_version_nothing_was_compared_is_refused(mode, shift):
    """Tokens have the number of another version: the one before, or the next one."""
    own, onset = setting((1, 1, 1), FLOAT, mode), 2
    fleet, mislabelled = own.fleet(), set[int]()
    record = fleet._record

    def wrong(lane, progress, seconds):
        record(lane, progress, seconds)
        for row in progress if lane.version >= onset else ():
            versions = fleet._groups[row.row // S].rows.versions
            versions[row.row % S, row.start : row.end] = lane.version + shift
            mislabelled.add(row.row // S)

    fleet._record = wrong
    with pytest.raises(RunFailure, match="the versions of the tokens are wrong"):
        for version in range(1, onset + 4):
            batch, _ = own.iterate(fleet, version)
            assert mislabelled.isdisjoint(batch.numbers.tolist())
    assert mislabelled
    fleet = own.fleet()
    for version in range(1, 10):
        own.iterate(fleet, version)
        assert fleet.metrics()["async/unchecked_versions"] == 0


DEFAULT = "caches are rounded to float8", "other tokens are reported", "new weights are read one chunk late"
FULL = "prompts are read by older weights", "caches are computed again with the old weights"
FULL += "the adapter is an older one", "the softcap is ignored"


def chosen(names: Iterable[str]) -> list[Any]:
    """One of each kind among the default tests or the full ones; the rest in `.ci/full kills`."""
    rest, full = pytest.mark.proof("kills"), pytest.mark.full
    return [pytest.param(n, marks=() if n in DEFAULT else full if n in FULL else rest) for n in names]


@pytest.mark.parametrize("name", chosen([*CACHES, *REPORTS]))
def test_faults_of_caches_and_reports_are_seen(name):
    seen({**CACHES, **REPORTS}[name])


@pytest.mark.parametrize("name", chosen(CHANGED))
def test_faults_that_begin_later_are_seen(name):
    seen(CHANGED[name], onset=2, worker=0)


@pytest.mark.parametrize("name", chosen(PROGRAMS))
def test_faults_of_programs_are_seen(name):
    seen(PROGRAMS[name])


@pytest.mark.parametrize("name", chosen([*AGAIN, "caches of other rows", "the programs keep version 0"]))
def test_faults_where_caches_are_computed_again_are_seen(name):
    seen({**AGAIN, **CACHES, **CHANGED}[name], "prefill_again", onset=1)


@pytest.mark.parametrize("name", chosen(ADAPTERS))
def test_faults_of_adapters_are_seen(name):
    seen(ADAPTERS[name], onset=1, lora=LoRAConfig(2, 8.0))


@pytest.mark.parametrize("name", DRAWS)
def test_faults_of_draws_whose_log_probabilities_are_right_are_seen(name):
    seen(DRAWS[name])


@pytest.mark.full
@pytest.mark.parametrize("name", ["one key draws all samples", "stop ids are lost"])
def test_gross_faults_of_draws_are_seen_in_bfloat16(name):
    seen(DRAWS[name], dtype=BFLOAT)


# Where programs compute in bfloat16 anyway, these faults are no larger than rounding.
WITHIN_ROUNDING = {"log-probabilities are in float8", "matrices were rounded to bfloat16"}


@pytest.mark.proof("kills")
@pytest.mark.parametrize(
    "name", [name for name in [*REPORTS, *CHANGED, *CACHES, *AGAIN] if name not in WITHIN_ROUNDING]
)
def test_faults_beyond_rounding_are_seen_in_bfloat16(name):
    mode, onset = ("prefill_again", 1) if name in AGAIN else ("keep_cache", 0 if name in REPORTS else 2)
    seen({**REPORTS, **CHANGED, **CACHES, **AGAIN}[name], mode, onset=onset, worker=0, dtype=BFLOAT)


GROSS = "other tokens are reported", "log-probabilities are 0", "caches are empty", "the programs keep version 0"


@pytest.mark.full
@pytest.mark.parametrize("name", GROSS)
def test_gross_faults_are_seen_in_bfloat16_before_the_first_batch_that_has_them(name):
    """At a start and after a resume, when few tokens were compared, or none."""
    own = setting((1, 1, 1), BFLOAT, "keep_cache")
    make, onset = {**REPORTS, **CACHES, **CHANGED}[name], 1 if name == GROSS[-1] else 0
    state: Any = None
    for start in (0, 2):
        fleet = own.fleet(state, wrap=lambda batches: [make(own, batches[0], onset), *batches[1:]])
        assert fleet._recompute._all.tokens == (0 if state is None else int(state.rounding[0]))
        with pytest.raises(RunFailure, match="logical worker 0 does not draw as the weights of version"):
            for version in range(start + 1, start + 3 + onset):
                batch, _ = own.iterate(fleet, version)
                newest = max(row[:n].max() for row, n in zip(batch.rows.versions, batch.rows.lengths, strict=True))
                assert newest < start + onset
        if state is None:
            clean = own.fleet()
            for version in (1, 2):
                _, state = own.iterate(clean, version)
            state = jax.tree.map(jnp.copy, state)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(((1, 1, 1), FLOAT, "keep_cache"), marks=pytest.mark.full),
        pytest.param(((1, 1, 1), FLOAT, "finish"), marks=pytest.mark.proof("kills")),
        pytest.param(((2, 1, 2), BFLOAT, "keep_cache"), marks=pytest.mark.proof("kills")),
        pytest.param(((1, 1, 1), FLOAT, "prefill_again", LoRAConfig(2, 8.0)), marks=pytest.mark.proof("kills")),
    ],
)
def test_a_run_that_goes_on_compares_the_same_rows(arguments):
    """And raises no alarm. Every state has the worker of each group, and keys and values of the rows that go on."""
    own = setting(*arguments)
    fleet, states, expected, compared = own.fleet(), [], [], 0

    def timeless() -> dict[str, float]:
        return {name: value for name, value in fleet.metrics().items() if not name.startswith("perf/")}

    for version in range(1, 7):
        batch, state = own.iterate(fleet, version)
        states.append(jax.tree.map(jnp.copy, state))
        expected.append((batch, timeless()))
        compared += fleet.metrics()["async/recomputed_tokens"]
        assert fleet.metrics().get("async/logprob_distance", 0.0) < (1e-5 if own.dtype == FLOAT else 0.1)
    assert compared > 50
    fleet = own.fleet(states[2])
    for version in range(4, 7):
        batch, state = own.iterate(fleet, version)
        jax.tree.map(np.testing.assert_array_equal, (batch, timeless()), expected[version - 1])
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state.tracked, states[-1].tracked)))


def test_metrics_count_what_was_compared_after_newer_weights_came():
    """Updates so long that each batch is drawn before the weights that learn from it, so `collect` compares nothing."""
    own = setting((1, 1, 1), FLOAT, "keep_cache")
    fleet = own.fleet()
    fleet._rules = replace(fleet._rules, update=500)
    for version in range(1, 5):
        batch, _ = own.iterate(fleet, version)
        newest = max(row[:n].max() for row, n in zip(batch.rows.versions, batch.rows.lengths, strict=True))
        assert newest == max(0, version - 2)
        metrics = fleet.metrics()
        assert metrics["async/recomputed_tokens"] > 0 and metrics["async/logprob_distance"] < 1e-5


def test_rows_of_a_worker_that_was_slow_may_come_after_those_of_newer_versions():
    fleet = setting((1, 1, 1), FLOAT, "keep_cache").fleet()
    fleet._verified = {1, 2, 3}

    def check(*versions: int) -> None:
        rows = SimpleNamespace(versions=np.array([versions]), lengths=np.array([len(versions)]))
        fleet._check_versions(cast(Any, SimpleNamespace(rows=rows)))

    check(2, 3)
    check(1, 3)
    with pytest.raises(RunFailure, match="nothing of version 4 of the weights was compared"):
        check(4, 4)


def test_no_state_is_saved_with_what_nothing_has_proven():
    own = setting((1, 1, 1), FLOAT, "keep_cache")
    fleet = own.fleet()
    own.iterate(fleet, 1)
    with jax.set_mesh(own.mesh), pytest.raises(RunFailure, match="weights of version 2 are not the trainer's"):
        fleet.collect()
        fleet.publish(own.version(1), own.published(2)[1])
        fleet.state()


def test_heads_that_attend_one_after_the_other_give_the_same():
    own = setting((1, 1, 1), FLOAT, "keep_cache")
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, 16)).astype(np.int32)
    on_mesh = to_devices((tokens, np.zeros(3, np.int32)), NamedSharding(own.mesh, GENERATE.batch_spec()))
    with jax.set_mesh(own.mesh):
        mixtures = [make_mixture(CONFIG, own.mesh, ForwardOptions(dtype=FLOAT), by_head=by) for by in (False, True)]
        at_once, one_by_one = (jax.jit(mixture)(*own.version(0), *on_mesh, None)[0] for mixture in mixtures)
    np.testing.assert_allclose(one_by_one, at_once, atol=1e-5)


def test_tokens_that_are_drawn_again_may_differ_by_rounding_at_their_place():
    """On a divided vocabulary. No rounding excuses a token that must not be drawn."""
    own, sampling = setting((1, 1, 2), FLOAT, "keep_cache"), SamplingConfig(8, temperature=0.7, token_limit=20)
    rng, rows, length, at = np.random.default_rng(0), 40, 6, np.tile(np.arange(2, 6, dtype=np.int32), (40, 1))
    tokens, starts = rng.integers(0, 20, (rows, length)).astype(np.int32), np.zeros(rows, np.int32)
    keys = jax.random.split(jax.random.key(3), rows)
    mixtures = [make_mixture(CONFIG, own.mesh, ForwardOptions(dtype=FLOAT), sampling=one) for one in (None, sampling)]
    at_place, differ = map(jax.jit, mixtures)

    def redrawn(mixture, rounded=None):
        host = tokens, starts, np.asarray(jax.random.key_data(keys)), np.full(rows, 2, np.int32), at
        *on_mesh, keys_, lengths, places = to_devices(host, NamedSharding(own.mesh, GENERATE.batch_spec()))
        nothing = to_devices(np.float32(0), NamedSharding(own.mesh, P()))
        redraws = Redraws(keys_, lengths, places, nothing, rounded)
        return mixture(*own.version(0), *on_mesh, None, redraws)[2]

    with jax.set_mesh(own.mesh):
        logits = redrawn(at_place)  # those at the last place depend on no token that is drawn there
        changed = np.asarray(logits) + rng.normal(size=logits.shape).astype(np.float32)
        last = jax.vmap(jax.random.fold_in)(keys, at[:, -1])
        may_stop = {"vocab_size": CONFIG.vocab_size, "may_stop": np.ones(rows, bool)}
        drawn, tokens[:, -1] = (
            np.asarray(sample(jnp.asarray(np.asarray(x)[:, -1]), last, sampling, **may_stop)[0])
            for x in (logits, changed)
        )
        assert 5 < (drawn != tokens[:, -1]).sum() < 35
        tokens[-1, -1] = 20  # must not be drawn
        exact, rounded = (
            np.asarray(redrawn(differ, jax.device_put(x, logits.sharding)))[:, -1] for x in (logits, changed)
        )
    np.testing.assert_array_equal(exact, drawn != tokens[:, -1])
    assert not rounded[:-1].any() and rounded[-1]


def test_what_is_not_finite_in_the_trainers_own_passes_is_no_workers_fault(monkeypatch):
    own = setting((1, 1, 1), FLOAT, "keep_cache")
    fleet, both = own.fleet(), own.recompute._both

    def poisoned(*arguments):
        logprobs, exact, *rest = both(*arguments)
        return logprobs, exact * np.float32(np.nan), *rest

    with monkeypatch.context() as patch, pytest.raises(RunFailure, match="the trainer's own .* and no worker"):
        patch.setattr(own.recompute, "_both", poisoned)
        own.iterate(fleet, 1)
    assert own.recompute._all == Compared()


def test_rows_that_lost_the_tokens_of_a_version_give_their_places_to_others():
    """Their process ended, and its successor draws these tokens again with newer weights."""
    own = setting((1, 1, 1), FLOAT, "keep_cache").recompute
    blank = np.zeros(4, np.int32)

    def row(number: int, versions: Sequence[int], goes_on: bool) -> Row:
        n = len(versions)
        return Row(number, number % 2, blank, blank[:n], blank[:n], np.array(versions), goes_on, blank[:2])

    lost, others = [row(n, [2, 2], True) for n in range(4)], [row(n, [3, 3], False) for n in range(4, 8)]
    assert own.places == len(lost)
    chosen = own._chosen(3, [*lost, *others], [0, 1, 2, 3])
    assert {one.number for one in chosen.values()} == {4, 5, 6, 7}
    chosen = own._chosen(3, [*lost, *others[:1]], [0, 1, 2, 3])  # the other places stay theirs
    assert {one.number for one in chosen.values()} == {1, 2, 3, 4}
    going_on = [row(n, [2, 3], True) for n in range(4)]
    assert own._chosen(3, [*going_on, *others], [0, 1, 2, 3]) == dict(enumerate(going_on))


def test_rounding_is_judged_by_the_same_tokens_and_by_its_spread():
    """One of 256 tokens had rounding 16 and the others none: σ is 1, and 64 tokens may be off by 6 · 8 σ."""
    own = setting((1, 1, 1), BFLOAT, "keep_cache").recompute
    own._all = Compared(255, 16.0, 16.0, 256.0)
    assert own._most(Compared(64)) > 48 and own._most(Compared(2)) > 48  # the spread is not known yet
    own._all = Compared(2)
    assert own._most(Compared(2)) == pytest.approx(6 * 8 * 2**-7, rel=1e-2)  # at first that of the dtype
    own._all = Compared(255, 16.0, 16.0, 256.0)
    own._all += Compared(1)
    for tokens, most in (
        (Compared(64), 48.0),
        (Compared(2), 48.0),
        (Compared(64, 0.0, 20.0), 88.0),
        (Compared(256), 96.0),
    ):
        assert most < own._most(tokens) < most + 0.1


def test_an_alarm_may_warn_instead(monkeypatch):
    sentences = []
    own: Any = setting((1, 1, 1), FLOAT, "keep_cache")
    monkeypatch.setattr(own.recompute, "_warn", sentences.append)
    monkeypatch.setattr(own.recompute, "alarms", {})
    wrong = REPORTS["log-probabilities are shifted"]
    fleet = own.fleet(wrap=lambda batches: [wrong(own, batches[0], 0), *batches[1:]])
    for version in range(1, 4):
        own.iterate(fleet, version)
    (sentence,) = sentences
    assert sentence.startswith("logical worker 0 does not draw as the weights of version 0 do")
    assert fleet.metrics()["async/logprob_alarms"] > 1 and [*own.recompute.alarms] == [0]
    infinite = REPORTS["log-probabilities are NaN"]
    with pytest.raises(RunFailure, match="logical worker 0 .* are not finite"):
        own.iterate(own.fleet(wrap=lambda batches: [infinite(own, batches[0], 0), *batches[1:]]), 1)


def test_a_run_may_cease_to_compare_and_begin_again():
    """Its rows are the same; those that were half drawn meanwhile are not compared."""
    own: Any = setting((1, 1, 1), FLOAT, "keep_cache")
    fleet, states, batches = own.fleet(), [], []
    for version in range(1, 10):
        batch, state = own.iterate(fleet, version)
        states.append(jax.tree.map(jnp.copy, state))
        batches.append(batch)
    fleet = own.fleet(states[1], compares=False)
    for version in range(3, 5):
        batch, state = own.iterate(fleet, version)
        jax.tree.map(np.testing.assert_array_equal, batch, batches[version - 1])
    assert "async/recomputed_tokens" not in fleet.metrics() and (np.asarray(state.tracked.row) == NONE).all()
    assert (np.asarray(states[3].tracked.row) != NONE).any()
    fleet, compared = own.fleet(state), 0
    for version in range(5, 10):
        batch, _ = own.iterate(fleet, version)
        jax.tree.map(np.testing.assert_array_equal, batch, batches[version - 1])
        compared += fleet.metrics()["async/recomputed_tokens"]
    assert compared > 0


@pytest.mark.proof("kills")
@pytest.mark.parametrize("mode", ["keep_cache", "prefill_again"])
@pytest.mark.parametrize(
    ("dtype", "config", "peak"),
    [(FLOAT, CONFIG, 1.0), (BFLOAT, CONFIG, 1.0), (BFLOAT, replace(CONFIG, softcap=None), 4.0)],
    ids=["float32", "bfloat16", "peaked"],
)
def test_a_thousand_clean_updates_raise_no_alarm(dtype, config, peak, mode):
    """Peaked: half a nat per token. There rounding has a heavy tail."""
    own = setting((1, 1, 1), dtype, mode, config=config, peak=peak)
    fleet, compared = own.fleet(), 0.0
    for version in range(1, 1001):
        own.iterate(fleet, version)
        compared += fleet.metrics()["async/recomputed_tokens"]
    assert compared > 1000
