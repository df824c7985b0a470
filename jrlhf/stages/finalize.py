"""The end of a run: held-out evaluation, the models in Hugging Face form, samples, the summary and the report."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrlhf.config.schema import Config
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.models.hf import HFConfig, export_adapter, export_hf
from jrlhf.models.params import HeadKind
from jrlhf.ppo import SafeRLHFConfig
from jrlhf.report import write_report
from jrlhf.rewards.mixture import Rewards
from jrlhf.rewards.text_model import ENDS
from jrlhf.roles.compiled import mesh_of
from jrlhf.roles.model import Model
from jrlhf.roles.pretrained import describe
from jrlhf.run.directory import SUMMARY
from jrlhf.run.metrics import read_metrics, truncate_after
from jrlhf.run.processes import from_main
from jrlhf.stages.context import Context
from jrlhf.stages.evaluate import Graded, compare, grade_heldout


def finish(
    context: Context,
    policy: Model,
    before: Graded | None,
    reward: Model | None,
    rewards: Rewards | None,
    costs: Rewards | None,
    phases: Mapping[str, float],
) -> dict[str, Any]:
    """Measures the policy on held-out prompts, and writes what the run leaves behind.

    before: how the policy did that the algorithm began with, if the run has one. reward: the reward model that it
    trained. costs: what the answers are measured by besides. phases: seconds that this process spent in each.
    """
    with context.console.status("answering the held-out prompts"):
        graded = grade_heldout(context, policy, rewards, costs)
    first, second = (graded, None) if before is None else (before, graded)
    summary = from_main(partial(_summarise, context, first, second, phases))
    with context.console.status("writing the model"):
        export(context, policy)
        if reward is not None:
            with jax.set_mesh(mesh_of(reward)):
                export(context, reward, head="scalar")
    from_main(lambda: write_report(context.run.path))
    context.console.summary(summary, context.run.path)
    return summary


def _summarise(
    context: Context, first: Graded | None, second: Graded | None, phases: Mapping[str, float]
) -> dict[str, Any]:
    """Writes samples and summary.json."""
    summary: dict[str, Any] = {}
    if first is not None:
        _write_samples(context, first, second)
        summary["held_out"] = compare(first, second)
    summary |= {**_from_metrics(context), "chat": context.task.chat, "phases": dict(phases)}
    context.run.write(SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def export(context: Context, model: Model, head: HeadKind = "lm") -> None:
    """Writes a model in Hugging Face form: model/ or reward_model/, whole; of an adapter also adapter/, PEFT's form.

    What stands there from an earlier end of this run is replaced.
    """
    path, config, tokenizer = context.run.path, context.config, context.task.tokenizer
    origin = _origin(config)
    dtype = config.export.dtype
    if dtype == "auto":
        dtype = "float32" if origin is None else origin.dtype
    name = "model" if head == "lm" else "reward_model"
    params = model.onloaded().params
    if model.architecture.lora is not None:
        adapter = path / ("adapter" if head == "lm" else "reward_adapter")
        base = config.model.path
        export_adapter(params, model.config, model.architecture.lora, adapter, base_name=base)
    export_hf(
        params if model.base is None else model.base,
        model.config,
        path / name,
        adapter=None if model.base is None else params,
        lora=model.architecture.lora,
        dtype=jnp.dtype(dtype),
        family=None if origin is None else origin.family,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id,
        **_tokenizer_files(tokenizer),
    )
    if head == "scalar" and context.run.writes:
        described = json.loads((path / name / "config.json").read_text(encoding="utf-8")) | {ENDS: "eos"}
        context.run.write(f"{name}/config.json", json.dumps(described, indent=2) + "\n")


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, Any]:
    if tokenizer.directory is None:
        return {"tokenizer_json": tokenizer.to_json()}
    return {"tokenizer_dir": tokenizer.directory}


def _origin(config: Config) -> HFConfig | None:
    """What the directory says that the actor came from."""
    return None if config.model.path is None else describe(config.model.path, "model.path")


def _write_samples(context: Context, before: Graded, after: Graded | None) -> None:
    truncate_after(context.run.path, "evaluation", -1)  # what an earlier end of this run wrote
    heldout, measure = context.task.heldout, before.measure
    assert heldout is not None
    several = len(set(before.sources)) > 1
    context.run.add_samples(
        {
            "stage": "evaluation",
            "step": 0,
            "prompt": heldout.texts[row],
            **({"reference": example.completion} if isinstance(example.completion, str) else {}),
            **({"source": example.source} if several else {}),
            **_sample("before", measure, before, row),
            **({} if after is None else _sample("after", measure, after, row)),
        }
        for row, example in enumerate(heldout.examples[: len(before.responses)])
    )


def _sample(when: str, measure: str, graded: Graded, row: int) -> dict[str, object]:
    learnt = {} if graded.learnt is None else {f"reward_{when}": float(graded.learnt[row])}
    return {when: graded.responses[row].text, f"{measure}_{when}": float(graded.scores[row]), **learnt}


def _from_metrics(context: Context) -> dict[str, Any]:
    """What the summary repeats of metrics.jsonl: accuracies on held-out pairs, and the KL that the run settled on."""
    records = read_metrics(context.run.path)
    found: dict[str, Any] = {}
    for stage in ("reward_model", "dpo"):
        accuracies = [
            each[f"{stage}/eval_accuracy"] for each in records if each.get(f"{stage}/eval_accuracy") is not None
        ]
        found |= {f"{stage}_accuracy": accuracies[-1]} if accuracies else {}
    costs = [each["cost/mean"] for each in records if each.get("cost/mean") is not None]
    algorithm = context.config.rl.algorithm if context.config.algorithm else None
    if costs and isinstance(algorithm, SafeRLHFConfig):
        found["cost"] = {"last_quarter": _last_quarter(costs), "limit": algorithm.cost_limit}
    kl = [each["objective/kl"] for each in records if each.get("objective/kl") is not None]
    if kl and algorithm:
        found["kl_last_quarter"] = _last_quarter(kl)
        found["kl_target"] = algorithm.kl_target
    return found


def _last_quarter(values: Sequence[float]) -> float:
    """The mean over the last quarter of the iterations."""
    return float(np.mean(values[-max(len(values) // 4, 1) :]))
