"""The audit of an asynchronous run: it recounts what the metrics say, and names each record that does not agree."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrlhf.errors import RunFailure
from jrlhf.ppo import Experience, PolicyConfig, age_metrics, experience_metrics, importance_weights
from jrlhf.ppo.off_policy import weight_shares, without_older
from jrlhf.report.__main__ import cli
from jrlhf.report.audit import audit, recount
from jrlhf.run.files import append_jsonl, read_jsonl
from jrlhf.stages.row_records import row_records, weigh

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, SAMPLES, TIME, STEP, STALENESS = 12, 3, 10, 6, 2
CONFIG = PolicyConfig(importance="token", importance_cap=1.2, mask_token=(0.5, 2.0), staleness=STALENESS)
weights_of = jax.jit(importance_weights, static_argnames="config")


def experience_of(seed: int, config: PolicyConfig = CONFIG) -> Experience:
    """Rows of random lengths, versions and log-probabilities, of which some count in no loss, with their weights."""
    rng, zeros = np.random.default_rng(seed), jnp.zeros((ROWS, TIME), jnp.float32)
    starts, lengths = rng.integers(1, 4, ROWS), rng.integers(1, 7, ROWS)
    time = np.arange(TIME)[None, :]
    mask = (starts[:, None] <= time) & (time < (starts + lengths)[:, None])
    versions = np.sort(rng.integers(0, STEP + 1, (ROWS, TIME)), axis=1)
    gap = np.where(mask, rng.normal(0, 0.5, (ROWS, TIME)), 0)
    arrays: dict[str, Any] = {"prompt_lengths": starts, "response_lengths": lengths, "versions": versions}
    arrays |= {"response_mask": mask & (rng.random(ROWS) < 0.8)[:, None], "old_logprobs": np.float32(gap)}
    arrays |= {"finished": rng.random(ROWS) < 0.5, "tokens": np.zeros((ROWS, TIME), int)}
    empty: Any = dict.fromkeys(("logprobs", "rewards", "advantages"), zeros)
    empty |= dict.fromkeys(("ref_logprobs", "values", "returns"))
    drawn: Any = jax.tree.map(jnp.asarray, arrays) | empty | {"version": jnp.int32(STEP)}
    weights = weights_of(drawn["old_logprobs"], drawn["response_mask"], config) if config.corrections else None
    return Experience(**drawn, scores=jnp.zeros(ROWS, jnp.float32), importance=weights)


@partial(jax.jit, static_argnames="config")
def logged(experience: Experience, config: PolicyConfig) -> dict[str, jax.Array]:
    """What an iteration logs of the experience."""
    ages, metrics = experience.ages(jnp.int32(STEP)), experience_metrics(experience)
    metrics |= age_metrics(experience, ages)
    if config.staleness is not None:
        experience = without_older(experience, ages, config)
    return metrics | weight_shares(experience, ages, config)


def rows_of(experience: Experience, config: PolicyConfig, groups: int = 0) -> list[dict[str, Any]]:
    """The records of the rows, whose groups are numbered from `groups`."""
    fields = {name: getattr(experience, name) for name in vars(experience)}
    fields |= weigh(experience, STEP, algorithm=config)
    origins = [(groups + row // SAMPLES, 0) for row in range(ROWS)]
    return row_records(origins, jax.device_get(fields), STEP)


def differences(metrics: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    recounted = recount(rows)
    assert len(recounted) == 23 and recounted.keys() <= metrics.keys()
    return {name: abs(value - float(metrics[name])) for name, value in recounted.items()}


@pytest.mark.parametrize("seed", range(5))
def test_random_batches_are_recounted(seed):
    """Several rows have one length, some count nowhere; tokens are too old, masked, truncated and none of these."""
    for config in (replace(CONFIG, staleness=None), replace(CONFIG, importance=None, mask_token=None), CONFIG):
        experience = experience_of(seed, config)
        metrics, rows = logged(experience, config), rows_of(experience, config)
        assert max(differences(metrics, rows).values()) < 1e-6
    assert sum(row["masked"] for row in rows) > 0 and sum(row["truncated"] for row in rows) > 0


def configure(run: Path, algorithm: str = "", asynchronous: str = "asynchronous: {staleness: 2}, ") -> None:
    """Writes the config of a run with these settings."""
    rest = "data: {source: arithmetic}\nstages: [sft, grpo]\nrewards: [{name: exact, function: exact_match}]\n"
    (run / "config.yaml").write_text(f"{rest}grpo: {{{asynchronous}algorithm: {{{algorithm}}}}}\n")


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of three iterations that agrees with itself."""
    configure(tmp_path)
    for step in range(1, 4):
        experience = experience_of(step)
        named = {"stage": "grpo", "step": step}
        metrics = {name: float(x) for name, x in logged(experience, CONFIG).items()}
        append_jsonl(tmp_path / "metrics.jsonl", [named | metrics])
        append_jsonl(tmp_path / "rollouts.jsonl", [named | row for row in rows_of(experience, CONFIG, 4 * step)])
    return tmp_path


def test_a_run_that_agrees_is_summed_up(run, capsys):
    assert cli([str(run), "--audit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 iterations learned from 12 groups, 36 rows, each once"
    assert len(lines) == 24 and all("recounted in 3 iterations, greatest difference" in line for line in lines[1:])
    metrics = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(metrics[:2]))  # killed before the metrics of the third one
    assert audit(run).iterations == 2


def older(row: dict[str, Any]) -> bool:
    return any(row["version"] - version > STALENESS for version, _ in row["versions"])


FAULTS = {
    "has 2 rows in place of 3": lambda rows: rows.pop(4),
    "group 4 in .* was learned from before": lambda rows: [row.update(group=4) for row in rows[12:15]],
    "no lines of iteration 2: lines were lost": lambda rows: rows.__delitem__(slice(12, 24)),
    "no lines of iteration 3: lines were lost": lambda rows: rows.__delitem__(slice(24, 36)),
    "response_length/mean of iteration 1": lambda rows: _longer(rows),
    "response_length/clip_ratio of iteration 1": lambda rows: rows[5].update(end=_other(rows[5]["end"])),
    r"has \d tokens, but versions of": lambda rows: rows[7].update(tokens=rows[7]["tokens"] + 1),
    "of weights that are newer than those": lambda rows: rows[8]["versions"][-1].__setitem__(0, STEP + 1),
    "training/off_policy/": lambda rows: _counted(rows)["versions"][0].__setitem__(0, -5),
    "tokens older than the bound, but only 0 of weight 0": lambda rows: _counted(filter(older, rows)).update(masked=0),
    "rollout_corr/rollout_rs_masked_fraction": lambda rows: _fewer(rows),
    "rollout_corr/rollout_is_ratio_fraction_high": lambda rows: _counted(rows).update(truncated=5),
    "which .* count: all of them, or none": lambda rows: _counted(rows).update(counted=99),
}


def _counted(rows: Any) -> dict[str, Any]:
    return next(row for row in rows if row["counted"] > 1)


def _other(end: str) -> str:
    return {"stop": "length", "length": "stop"}[end]


def _longer(rows: list[dict[str, Any]]) -> None:
    """Another token of weights within the bound."""
    row = next(row for row in rows if STEP - row["versions"][-1][0] <= STALENESS)
    row["versions"][-1][1] += 1
    row["tokens"] += 1
    row["counted"] += row["counted"] > 0


def _fewer(rows: list[dict[str, Any]]) -> None:
    """Another token of weight 0."""
    row = next(row for row in rows if row["counted"] > row["masked"] + row["truncated"])
    row["masked"] += 1


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault, run):
    rows = list(read_jsonl(run / "rollouts.jsonl"))
    FAULTS[fault](rows)
    (run / "rollouts.jsonl").unlink()
    append_jsonl(run / "rollouts.jsonl", rows)
    with pytest.raises(RunFailure, match=fault):
        audit(run)


def test_what_cannot_be_recounted_is_one_sentence(run, capsys):
    rows = list(read_jsonl(run / "rollouts.jsonl"))
    del rows[3]["versions"]
    (run / "rollouts.jsonl").unlink()
    with pytest.raises(RunFailure, match="no lines of iteration 1: lines were lost"):
        audit(run)
    append_jsonl(run / "rollouts.jsonl", rows)
    assert cli([str(run), "--audit"]) == 2
    assert "has a damaged row ('versions')" in capsys.readouterr().err
    configure(run, asynchronous="")
    (run / "rollouts.jsonl").unlink()
    assert cli([str(run), "--audit"]) == 2
    assert "has no iterations of an asynchronous run: there is nothing to recount" in capsys.readouterr().err


def test_where_bounds_are_of_weights_two_tokens_may_round_to_their_other_side(run):
    rows = list(read_jsonl(run / "rollouts.jsonl"))
    _fewer(rows)
    (run / "rollouts.jsonl").unlink()
    append_jsonl(run / "rollouts.jsonl", rows)
    for setting in ("mask_token: null", "importance: sequence", "mask_token: [0.5, 2.0]"):
        configure(run, setting)
        if "null" in setting:
            with pytest.raises(RunFailure, match="rollout_rs_masked_fraction"):
                audit(run)
        else:
            assert audit(run).iterations == 3
    for row in rows[:12]:
        row["masked"] = row["counted"]
    (run / "rollouts.jsonl").unlink()
    append_jsonl(run / "rollouts.jsonl", rows)
    with pytest.raises(RunFailure, match="rollout_corr/"):
        audit(run)


def test_weights_of_the_updates_own_forward_pass_are_not_recounted(run):
    """With interpolation the metrics of weights are means over updates, which the rows do not tell."""
    configure(run, "old_logprobs: interpolate, importance: token")
    records = list(read_jsonl(run / "metrics.jsonl"))
    for record in records:
        record["rollout_corr/rollout_is_ratio_fraction_high"] = 0.5
    (run / "metrics.jsonl").unlink()
    append_jsonl(run / "metrics.jsonl", records)
    assert not any(name.startswith("rollout_corr") for name in audit(run).checked)
    del records[1]["response_length/mean"]
    (run / "metrics.jsonl").unlink()
    append_jsonl(run / "metrics.jsonl", records)
    with pytest.raises(RunFailure, match="response_length/mean of iteration 2 .* is not in metrics.jsonl"):
        audit(run)
