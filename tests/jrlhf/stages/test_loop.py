"""The loop of a stage: what it restores, refuses, warns of, and how it stops."""

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jrlhf.config.schema import Config, ProfileConfig, RewardConfig
from jrlhf.config.stages import CheckpointConfig, SFTConfig
from jrlhf.errors import Preempted, RunFailure, UserError
from jrlhf.meshes import make_mesh
from jrlhf.ppo import SFTBatch, TrainState, make_sft_step
from jrlhf.roles.optimizers import adamw
from jrlhf.run import clock
from jrlhf.run.clock import Stopwatch
from jrlhf.run.directory import RunDirectory
from jrlhf.run.files import saved_steps
from jrlhf.run.metrics import read_metrics
from jrlhf.run.preemption import PreemptionGuard
from jrlhf.run.profiler import deadline
from jrlhf.stages.hooks import hook_of
from jrlhf.stages.identity import Identity
from jrlhf.stages.learning import Learning
from jrlhf.stages.loop import run_stage
from jrlhf.stages.watching import hook_names

MESH = make_mesh(1, 8, 1)


class Services:
    """A console that remembers warnings, and a wandb that remembers what it is sent."""

    def __init__(self):
        self.warnings, self.entries = [], []
        self.warn, self.log = self.warnings.append, lambda *entry: self.entries.append(entry)
        self.line = self.warn

    @contextlib.contextmanager
    def progress(self, *_, **__):
        yield SimpleNamespace(advance=lambda *_: None, compiling=lambda call: None)


def context(path, *, steps=6, stages=("sft",), section=None, stop_after_skipped=5, stop=None, hooks=()):
    """hooks: by the settings that name them."""
    own = {
        "sections": {"sft": section or SFTConfig(warmup=0, save_every=2)},
        "length": lambda stage: steps,
        "stop_after_skipped": stop_after_skipped,
        "rewards_and_costs": (),
        "stages": stages,
        "algorithm": "ppo",
        "checkpoints": CheckpointConfig(2),
        "stop": stop,
        "hooks": [spec for spec, _ in hooks],
    }
    config: Any = SimpleNamespace(deadline=60.0, profile=ProfileConfig(), **own)
    services = {"console": Services(), "trackers": [Services()], "preemption": PreemptionGuard(), "phases": Stopwatch()}
    called = zip(hook_names(config), (hook for _, hook in hooks), strict=True)
    services["hooks"] = [(name, hook_of(name, hook)) for name, hook in called]
    return SimpleNamespace(run=RunDirectory(path), config=config, mesh=MESH, identity=Identity(), **services)


def init():
    return {"x": jax.device_put(jnp.zeros(8), NamedSharding(MESH, P("fsdp")))}


@jax.jit
def add(state, amount):
    return {"x": state["x"] + amount}


def advance(state, step):
    return add(state, float(step)), {"loss": float(step)}


def run(here, step=advance, meta=None):
    with jax.set_mesh(MESH):
        return run_stage(here, "sft", init, step, meta=meta or {}, announced=())


def test_the_seconds_of_a_stage_are_those_of_all_processes_that_advanced_it(tmp_path, monkeypatch):
    """Steps that a killed process took after its last checkpoint are not counted: the run has not got them.

    A stage ends when its last state is saved, so it has the same seconds in a process that only restores it.
    """
    now = [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def process(kill_at: int | None) -> dict[str, float]:
        here = context(tmp_path)
        now[0] += 7.0
        here.phases.lap("start")

        def step(state, number):
            if number == kill_at:
                raise RuntimeError("killed")
            now[0] += 10.0
            return advance(state, number)

        with contextlib.suppress(RuntimeError):
            run(here, step)
        now[0] += 1.0  # such as the end of writing the last state
        here.phases.lap("ppo")
        return here.phases.seconds

    process(kill_at=5)  # step 5 is done and not saved
    assert process(kill_at=None) == {"start": 7.0, "sft": 60.0, "ppo": 1.0}
    assert process(kill_at=None)["sft"] == 60.0  # it only restores the stage


def test_a_stage_saves_when_it_is_asked_to_stop_and_goes_on_from_its_newest_checkpoint(tmp_path):
    here = context(tmp_path, section=SFTConfig(warmup=0, save_every=6))

    def asked(state, step):
        here.preemption.requested = step == 2
        return advance(state, step)

    with pytest.raises(Preempted, match="sft stopped at step 3 of 6"):
        run(here, step=asked)
    here, taken = context(tmp_path), []

    def broken(state, step):
        taken.append(step)
        if step == 5:
            raise RuntimeError("lost")
        return advance(state, step)

    with pytest.raises(RuntimeError, match="lost"):
        run(here, step=broken)
    assert taken == [3, 4, 5]
    losses = [(stage, step, numbers["loss"]) for stage, step, numbers in here.trackers[0].entries]
    assert losses == [("sft", step + 1, float(step)) for step in (3, 4)]
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]

    def counted(state, step):
        taken.append(step)
        return advance(state, step)

    here = context(tmp_path)
    state = run(here, step=counted)
    assert taken == [3, 4, 5, 4, 5] and "sft goes on after step 4 of 6" in here.console.warnings
    np.testing.assert_array_equal(state["x"], np.full(8, 15.0))
    records = [(record["step"], record["loss"]) for record in read_metrics(tmp_path)]
    assert records == [(step + 1, float(step)) for step in range(6)]
    here = context(tmp_path)
    finished = run(here, step=lambda *_: pytest.fail("finished stages do nothing"))
    assert here.console.warnings == ["sft has done its 6 steps"]
    assert finished["x"].sharding == state["x"].sharding
    with pytest.raises(UserError, match=r"stage sft was made with another reference \(None there, b here\)"):
        run(context(tmp_path), meta={"reference": "b"})


def test_a_compilation_after_the_first_iterations_is_told_with_its_cause(tmp_path):
    here = context(tmp_path, section=SFTConfig(warmup=0, save_every=6))
    double, triple = jax.jit(lambda x: 2 * x), jax.jit(lambda x: 3 * x)

    def grows(state, step):
        double(jnp.ones(4 if step < 4 else 5, jnp.float16))
        state, metrics = advance(state, step)
        # The first validation of a process compiles; after a resume it may be late.
        return state, metrics | ({"val-core/score": float(triple(jnp.float16(1)))} if step == 3 else {})

    run(here, step=grows)
    (warning,) = [text for text in here.console.warnings if "float16" in text or "f16[5]" in text]
    assert warning.startswith("sft step 5 compiled") and "f16[4]" in warning
    counts = [record["perf/compilations"] for record in read_metrics(tmp_path)]
    assert counts[2] == 0 and counts[3] >= 1 and counts[4] >= 1


def test_a_hang_ends_the_process_and_shows_where_it_was():
    """Also where a block of its own, with another deadline, ended before."""
    code = "import time\nfrom jrlhf.run.profiler import deadline\n"
    code += "with deadline(0.3):\n    with deadline(60):\n        pass\n    time.sleep(60)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and "line 6" in ended.stderr
    assert "took longer than deadline=0.3 seconds" in ended.stderr.splitlines()[-1]  # below the threads


def test_threads_with_deadlines_leave_no_timer():
    def short() -> None:
        for _ in range(200):
            with deadline(600):
                pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            for pending in [threads.submit(short) for _ in range(3)]:
                pending.result()
    finally:
        sys.setswitchinterval(interval)
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert [timer for timer in timers if not timer.finished.is_set()] == []


def test_rows_that_are_meant_to_count_nowhere_end_no_run():
    rewards = (
        RewardConfig(name="a", function="exact_match", abstain=True),
        RewardConfig(name="b", function="exact_match", on_failure="exclude"),
        RewardConfig(name="c", function="exact_match", abstain=True, weight=0.0),
    )
    config, warnings = Config(stop_after_skipped=3, rewards=rewards), []
    optimizer = adamw(config.rl.actor, updates=config.rl.updates)
    state = SimpleNamespace(trained={"actor": TrainState.create({"w": jnp.ones(2)}, optimizer)})
    learning = Learning(config, "ppo", state, warnings.append)
    counts = {"rewards/a/abstained": 2, "rewards/b/failures": 1, "rewards/c/abstained": 5, "actor/skipped_updates": 1}
    for step in range(1, 10):
        learning.measure(state, counts | {"critic/score/nonfinite": 3}, step)
        assert learning.in_vain(step, 100, last=False) == ""
    assert [warning for warning in warnings if "no finite score" in warning] == []
    for step in range(10, 13):
        learning.measure(state, counts | {"critic/score/nonfinite": 4}, step)
    assert "3 updates of actor in a row were skipped" in learning.in_vain(12, 100, last=False)


def test_an_update_without_a_row_whose_score_is_finite_is_one_that_is_not_finite():
    """And one that is applied begins the count of those in a row again, whatever was skipped with it."""
    config, warnings = Config(stop_after_skipped=3), []
    optimizer = adamw(config.rl.actor, updates=config.rl.updates)
    update = jax.jit(optimizer.update)
    states = [TrainState.create({"w": jnp.ones(2)}, optimizer)]
    for _ in range(3):
        updates, opt_state = update({"w": jnp.ones(2)}, states[-1].opt_state, states[-1].params)
        states.append(TrainState(optax.apply_updates(states[-1].params, updates), opt_state, states[-1].step))
    state = [SimpleNamespace(trained={"actor": state}) for state in states]
    learning, step = Learning(config, "ppo", state[0], warnings.append), 0

    def measure(applied: int, lost: int) -> str:
        nonlocal step
        step += 1
        metrics = {"critic/score/nonfinite": lost, "actor/skipped_updates": 1, "actor/nonfinite_updates": 0}
        learning.measure(state[applied], metrics, step)
        return learning.in_vain(step, 100, last=step == 100)

    assert [measure(0, 2), measure(0, 2), measure(1, 2), measure(1, 2), measure(1, 0), measure(1, 2)] == [""] * 6
    assert "3 updates of actor in a row were skipped" in measure(1, 2)
    assert len(warnings) == 2 and "2 rows have no finite score" in warnings[0]
    assert "a score is not finite" in warnings[1]
    # Whether a stage has skipped all updates does not depend on where a resume began.
    last = {"actor/skipped_updates": 1, "actor/nonfinite_updates": 1}
    for applied, ends in ((0, True), (1, False)):
        resumed = Learning(config, "ppo", state[applied], warnings.append)
        resumed.measure(state[applied], last, 100)
        assert bool(resumed.in_vain(100, 100, last=True)) == ends


@pytest.mark.parametrize("updates", [20, 21])
def test_a_warmup_as_long_as_the_stage_is_told(updates):
    section, warnings = SFTConfig(warmup=20, steps=updates), list[str]()
    config: Any = SimpleNamespace(sections={"sft": section}, stop_after_skipped=5, rewards_and_costs=())
    state = TrainState.create({"w": jnp.ones(8)}, adamw(section, updates=updates))
    Learning(config, "sft", state, warnings.append)
    assert warnings == ["sft.warmup=20 is not below the 20 updates: it is 2 here"] * (updates == 20)


def test_updates_that_nothing_is_learned_from_are_told_and_counted_and_end_the_run(tmp_path):
    """Random weights that are lost, gradients and rates: a model of what a user must see, against the loop."""
    config = SFTConfig(learning_rate=0.1, warmup=3, final=0.5, steps=20)
    optimizer, tokens = adamw(config, updates=20), jnp.zeros((8, 2), jnp.int32)

    def logprobs(params, tokens, factor):  # the factor stands for whatever is not finite in a batch
        return params["w"].sum() * factor + jnp.zeros(tokens.shape), jnp.zeros(tokens.shape)

    step_fn = make_sft_step(logprobs, optimizer)
    batch = SFTBatch(tokens, jnp.ones((8, 2), bool))
    nothing, rng = batch.loss_mask & False, np.random.default_rng(12)
    ends = {"in a row": 0, "none at all": 0, "done": 0}
    for number in range(5):
        limit, share = rng.choice([0, 1, 3, 5]), rng.choice([0.0, 0.3, 0.7, 1.0])
        kinds = rng.choice(
            ["bad", "empty", "good"], p=[share, (1 - share) / 2, (1 - share) / 2], size=rng.integers(2, 9)
        )
        factors = [
            rng.choice(np.array([np.nan, np.inf, -np.inf, 3e38], np.float32)) if kind == "bad" else 1 for kind in kinds
        ]
        here: Any = context(tmp_path / str(number), steps=len(kinds), section=config, stop_after_skipped=int(limit))
        here.run.path.mkdir()

        def advance(state, step, kinds=kinds, factors=factors):
            rows = SFTBatch(tokens, nothing) if kinds[step] == "empty" else batch
            return step_fn(state, rows, jnp.float32(factors[step]))

        def init():
            return TrainState.create({"w": jax.device_put(jnp.ones(8), NamedSharding(MESH, P("fsdp")))}, optimizer)

        row, applied, rates, end = 0, 0, [], len(kinds) + 1  # end: later than the last step, unless it comes before
        for step, kind in enumerate(kinds, start=1):
            applied, row = applied + (kind == "good"), 0 if kind == "good" else row + (kind == "bad")
            count = max(applied - 1, 0)
            rates.append(0.1 * (min(count + 1, 3) / 3 if count < 3 else 0.75 + 0.25 * np.cos(np.pi * (count - 3) / 17)))
            if limit and (row >= limit or (row and step == len(kinds) and not applied)):
                end = step
                break
        try:
            with jax.set_mesh(MESH):
                run_stage(here, "sft", init, advance, meta={}, announced=())
            assert end > len(kinds)
            ends["done"] += 1
        except RunFailure as error:
            assert str(error).startswith(f"sft ends at step {end} of {len(kinds)}: {row} updates of sft in a row")
            assert (end in saved_steps(here.run.path / "checkpoints" / "sft")) == (end < len(kinds))
            ends["in a row" if row >= limit else "none at all"] += 1
        records, skipped = read_metrics(here.run.path), [step for step, kind in enumerate(kinds) if kind != "good"]
        assert [record["sft/nonfinite_updates"] for record in records] == [*(kinds == "bad")[:end]]
        np.testing.assert_allclose([record["sft/lr"] for record in records], rates, rtol=1e-5)
        assert [record["training/global_step"] for record in records] == list(range(1, len(rates) + 1))
        why = ["is not finite" if kinds[step] == "bad" else "no token of it counts" for step in skipped[:1]]
        warned = [
            f"sft step {step + 1}: an update of sft is skipped, because" for step in skipped[:1] if step < len(rates)
        ]
        assert len(here.console.warnings) == len(warned)
        for text, start, reason in zip(here.console.warnings, warned, why, strict=False):
            assert text.startswith(start) and text.endswith(reason)
    assert all(ends.values()), ends
