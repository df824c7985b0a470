"""Whole asynchronous runs: the same bits as the synchronous run, twice, and after a kill."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jrlhf.config import load_config
from jrlhf.config.check import uncorrected
from jrlhf.errors import RunFailure, UserError
from jrlhf.models.generation.continuous import ContinuousBatch
from jrlhf.planning.resolve import select_resources
from jrlhf.report.audit import audit
from jrlhf.rollouts.asynchronous import masks_much
from jrlhf.rollouts.state import Collected, Drawn
from jrlhf.run.files import read_jsonl
from jrlhf.run.metrics import read_metrics
from jrlhf.stages import rl
from jrlhf.train import main
from tests.jrlhf.stages.test_plan_runs import maker
from tests.support.runs import resumed, stage_of, timeless

pytestmark = pytest.mark.usefixtures("quick_compilation")

SETTINGS = (
    "device.simulated=8 mesh.data=4 mesh.fsdp=2 compute.remat=full "
    "model.embed=16 model.layers=2 model.heads=2 model.kv_heads=1 model.head_dim=8 model.mlp=32 "
    "data.digits=1 data.problems=60 data.heldout_rows=8 data.max_prompt=4 data.max_response=6 model.max_positions=16 "
    "sft.steps=2 sft.batch=8 sft.warmup=1 evaluation.prompts=8 plan=disaggregated "
    "rollout.chunk=2 rollout.buckets=1 rollout.lengths=1"
).split()
SECTION = "iterations=4", "rollout_batch=16", "save_every=1", "actor.learning_rate=0.01", "actor.warmup=0"
ADAPTER = "lora.rank=2", "lora.alpha=8"
# So few steps teach no sums: rewards that differ need another rule.
REWARD = "rewards=[{name: low, function: format_regex, options: {pattern: '[0-4].*'}}]"
# Metrics of synchronous runs, recorded with an earlier program that decayed norms, too: therefore without decay.
GOLDEN = Path(__file__).parent / "golden.json"
ALGORITHMS = {
    "grpo": ("grpo.algorithm.samples=2",),
    "dapo": ("dapo.algorithm.samples=2", "dapo.algorithm.max_rounds=3"),
    "ppo": ("ppo.critic.learning_rate=0.01", "ppo.critic.warmup=0"),
    "safe_rlhf": ("costs=[{name: words, function: word_count}]", "safe_rlhf.critic.learning_rate=0.01"),
}


def config(directory: Path, name: str, algorithm: str = "grpo", settings: Sequence[str] = (), **asynchronous: Any):
    options = [f"{algorithm}.asynchronous.{key}={value}" for key, value in asynchronous.items()]
    section = [f"{algorithm}.{setting}" for setting in SECTION]
    named = [f"run_dir={directory}", f"name={name}", f"stages=[sft, {algorithm}]"]
    # The packaged config's section of GRPO is left out: it would be another algorithm's.
    text = Path("configs/arithmetic-grpo.yaml").read_text().partition("\ngrpo:")[0]
    file = directory / f"{name}.yaml"
    file.write_text(text + "\nevaluation: {prompts: 8}\n")
    own = ALGORITHMS.get(algorithm, ())
    return load_config(str(file), [*SETTINGS, REWARD, *named, *section, *own, *options, *settings])


def run(config: Any) -> Path:
    main(config)
    return Path(config.run_dir) / config.name


def proven(part: str, *cases: list[str]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.proof(part), id=str(case)) for case in cases]


SYNCHRONOUS = (
    *proven("kills", ["grpo"], ["dapo"], ["ppo"], ["ppo", *ADAPTER]),
    *proven("runs", ["reinforce_pp"], ["grpo", *ADAPTER], ["grpo", *ADAPTER, "lora.base=int8"], ["safe_rlhf"]),
    *proven("runs", ["grpo", "sampling.stop=['12', '7', '33']", "sampling.min_new_tokens=1"]),
)


@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_with_staleness_0_the_run_is_the_synchronous_one_bit_for_bit(case, tmp_path):
    """In one process, and where another one draws. With more logical workers log-probabilities round otherwise.

    The synchronous run has the recorded metrics, up to float32's rounding.
    """
    algorithm, *settings = case
    trained = ["actor"] + ["critic"] * (algorithm in ("ppo", "safe_rlhf"))
    settings += ["sft.weight_decay=0", *(f"{algorithm}.{role}.weight_decay=0" for role in trained)]
    plain = run(config(tmp_path, "plain", algorithm, settings))
    golden_of = json.loads(GOLDEN.read_text())
    if len(case) == 1 and algorithm in golden_of:
        records = [record for record in read_metrics(plain) if record["stage"] == algorithm]
        for record, golden in zip(records, golden_of[algorithm], strict=True):
            assert {name: record[name] for name in golden} == pytest.approx(golden, rel=1e-4, abs=1e-6)
    for name, more in (("one", []), ("two", ["fleet.workers=1"])):
        path = run(config(tmp_path, name, algorithm, [*settings, *more], staleness=0, update_steps=3))
        for synchronous, fleet in zip(timeless(plain), timeless(path), strict=True):
            assert synchronous == {key: fleet[key] for key in synchronous}  # the other metrics speak of the fleet
        weights = [(one / "model" / "model.safetensors").read_bytes() for one in (plain, path)]
        assert weights[0] == weights[1]
        assert audit(path).iterations == 4
    assert not (plain / "rollouts.jsonl").exists()


@pytest.mark.proof("runs")
def test_reward_models_score_an_asynchronous_run_as_the_synchronous_one(tmp_path, settings, user):
    """RLOO with a reward model that the run trains, one that reads text, and a function, which differ between rows."""
    make = maker(tmp_path, settings, user)
    section: dict[str, Any] = {"algorithm": {"samples": 2}}
    options = {"asynchronous": {"staleness": 0, "update_steps": 3}}
    paths = [
        run(make(name, "rloo", "disaggregated", before=("reward_model",), rloo=section | own))
        for name, own in (("plain", {}), ("fleet", options))
    ]
    for synchronous, fleet in zip(*map(timeless, paths), strict=True):
        assert synchronous == {key: fleet[key] for key in synchronous}
    first, second = ((path / "model" / "model.safetensors").read_bytes() for path in paths)
    assert first == second
    for record in stage_of(paths[1], "rloo"):
        assert all(record[f"rewards/{name}/std"] > 0 for name in ("reward_model", "judge", "short"))


@pytest.mark.proof("runs")
def test_a_validation_is_that_of_the_trainers_weights_outside_of_an_asynchronous_run(tmp_path, monkeypatch, capsys):
    """A synchronous run validates the same weights. What a batch masks is warned of once."""
    validate, weights, policies = rl.validate, list[Any](), iter(())

    def recorded(context, policy, *others):
        weights.append(jax.device_get(policy.params))
        return validate(context, policy, *others)

    def again(context, policy, *others):
        place = lambda host, own: jax.device_put(host, own.sharding)  # noqa: E731
        return validate(context, policy.holding(jax.tree.map(place, next(policies), policy.params)), *others)

    monkeypatch.setattr(rl, "validate", recorded)
    monkeypatch.setattr("jrlhf.rollouts.asynchronous.MUCH", -1.0)
    settings = "validation.every=1", "validation.k=2", "grpo.iterations=3"
    path = run(config(tmp_path, "asynchronous", "grpo", settings, staleness=1, update_steps=3))
    assert capsys.readouterr().out.count("grpo.asynchronous.staleness=1 gives weight 0 to") == 1
    policies = iter(weights)
    monkeypatch.setattr(rl, "validate", again)
    outside = run(config(tmp_path, "outside", "grpo", settings))
    values, expected = (
        [{name: x for name, x in record.items() if name.startswith("val-")} for record in stage_of(one, "grpo")]
        for one in (path, outside)
    )
    assert values == expected and len(values) == 3 and all(values) and len({str(one) for one in values}) > 1
    samples, others = (
        [line["response"] for line in read_jsonl(one / "samples.jsonl") if line.get("kind") == "validation"]
        for one in (path, outside)
    )
    assert samples == others != []


@pytest.mark.proof("kills")
@pytest.mark.parametrize("case", [["keep_cache"], ["prefill_again", *ADAPTER], ["finish"]], ids=str)
def test_a_run_that_goes_on_from_any_step_has_the_same_bits(case, tmp_path):
    on_new_weights, *settings = case
    options = {"staleness": 2, "uncorrected": True, "update_steps": 3, "on_new_weights": on_new_weights}
    whole = config(tmp_path, "whole", settings=["checkpoints.keep=4", *settings], **options)
    path = run(whole)
    files = path / "model" / "model.safetensors", path / "rollouts.jsonl"
    expected = timeless(path), [file.read_bytes() for file in files]
    audited = audit(path).checked  # tokens of several ages, some of which are older than the bound
    assert {"training/off_policy/token_staleness/max", "rollout_corr/rollout_rs_masked_fraction"} <= audited.keys()
    assert [record["perf/compilations"] for record in read_metrics(path) if record["stage"] == "grpo"][2:] == [0, 0]
    for step in (4, 2):
        resumed(whole, *range(step, 5))
        assert (timeless(path), [file.read_bytes() for file in files]) == expected
    lines = [line for line in read_jsonl(path / "timeline.jsonl") if line["stage"] == "grpo"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:  # slices of several devices that one CPU simulates: no call overlaps with another
        calls = sorted((call for call in line["calls"] if not call["copies"]), key=lambda call: call["start"])
        assert {call["devices"] for call in calls} == {"0-3", "4-7"}
        assert all(call["end"] <= later["start"] + 2e-6 for call, later in pairwise(calls)), calls


@pytest.mark.proof("kills")
def test_a_run_ends_before_it_learns_from_wrong_log_probabilities(tmp_path, monkeypatch):
    decode, chunks = ContinuousBatch.decode, []

    def wrong(self, weights):
        chunks.append(decode(self, weights))
        if len(chunks) < 12:
            return chunks[-1]
        responses = [row.response and (row.response[0], row.response[1] - 0.1, row.response[2]) for row in chunks[-1]]
        return [replace(row, response=own) for row, own in zip(chunks[-1], responses, strict=True)]

    monkeypatch.setattr(ContinuousBatch, "decode", wrong)
    with pytest.raises(RunFailure, match="logical worker 0 does not draw as the weights of version"):
        run(config(tmp_path, "wrong", staleness=1, update_steps=3))
    records = [record for record in read_metrics(tmp_path / "wrong") if record["stage"] == "grpo"]
    assert 0 < len(records) < 4 and all(record["async/logprob_distance"] < 1e-4 for record in records)


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [{}, {"staleness": 0, "update_steps": 3}], ids=["synchronous", "slices"])
def test_what_a_reward_does_not_judge_adds_nothing_and_is_in_no_mean_of_it(asynchronous, tmp_path):
    file = tmp_path / "halves.py"
    file.write_text("def half(completions):\n    return [None if len(text) % 2 else 1.0 for text in completions]\n")
    rewards = f"{REWARD[:-1]}, {{name: half, function: '{file}:half', skip_none: true}}]"
    records = stage_of(run(config(tmp_path, "skipping", settings=[rewards], **asynchronous)), "grpo")
    skipped = [record.get("rewards/half/skipped", 0) for record in records]
    assert any(0 < count < 16 for count in skipped)
    for record, count in zip(records, skipped, strict=True):
        assert record["rewards/half/failures"] == 0 and record.get("rewards/half/mean", 1) == 1
        assert record["critic/score/mean"] == pytest.approx(record["rewards/low/mean"] + (16 - count) / 16, abs=1e-6)


def test_what_cannot_be_asynchronous_is_one_sentence(tmp_path):
    for algorithm, settings, sentence in (
        (
            "grpo",
            ["plan=colocate"],
            "draws on devices of its own: set plan=disaggregated, which halves the devices, or fleet.workers=1",
        ),
        ("remax", [], "remax calls actor.generate, actor.generate_greedy: leave asynchronous out"),
    ):
        with pytest.raises(UserError, match=sentence):
            select_resources(config(tmp_path, "refused", algorithm, settings, staleness=1))
    for settings, sentence in (
        (["fleet.workers=2", "grpo.asynchronous.logical_workers=1"], "=2 exceeds grpo.asynchronous.logical_workers=1"),
        (["grpo.asynchronous.logical_workers=3"], "rollout.slots=16 must give each of 3 logical worker.s. a multiple"),
        (["fleet.workers=2", "fleet.devices=[a]"], "names the GPUs of 1 process.es., and fleet.workers=2: give each"),
        (
            ["fleet.workers=1", "fleet.devices=['4,4']"],
            "fleet.devices names the GPU 4 twice: give each process GPUs of",
        ),
        (["fleet.workers=1", "fleet.devices=[a]"], r"fleet.devices=\[a\] has no effect on a CPU"),
        (["fleet.deadline=9"], "fleet.deadline=9.0 has no effect with fleet.workers=null"),
    ):
        with pytest.raises(UserError, match=sentence):
            select_resources(config(tmp_path, "refused", "grpo", settings, staleness=1))
    with pytest.raises(UserError, match="fleet.workers=2 draws .* give grpo a section asynchronous"):
        select_resources(config(tmp_path, "refused", "grpo", ["fleet.workers=2"]))
    with pytest.raises(UserError, match="grpo.asynchronous.staleness=-1: it must be at least 0"):
        config(tmp_path, "negative", staleness=-1)


def test_a_bound_that_masks_much_is_warned_of(tmp_path):
    """Tokens after the end of a row do not count."""
    versions, lengths = np.array([[0, 1, 2, 2], [2, 2, 2, 0]]), np.array([4, 3])
    batch = Collected(np.arange(2), np.zeros(2, int), Drawn(versions, versions, versions, lengths, lengths > 0), 2)
    warning = masks_much(config(tmp_path, "tight", staleness=1), batch)
    assert warning is not None and "grpo.asynchronous.staleness=1 gives weight 0 to 14% of the tokens" in warning
    assert masks_much(config(tmp_path, "wide", staleness=2), batch) is None


def test_a_run_without_a_correction_is_warned_of(tmp_path):
    assert uncorrected(config(tmp_path, "fresh", staleness=0)) is None
    assert uncorrected(config(tmp_path, "weighted", "grpo", ["grpo.algorithm.importance=token"], staleness=1)) is None
    warning = uncorrected(config(tmp_path, "plain", staleness=1))
    assert warning is not None and "staleness=1 without an off-policy correction" in warning
