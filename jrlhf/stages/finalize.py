"""The end of a run: held-out evaluation, the models in Hugging Face form, samples, the summary and the report."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jrlhf.config.places import is_address
from jrlhf.config.schema import Config
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.errors import UserError
from jrlhf.models.hf import export_adapter, export_hf
from jrlhf.models.weights import HeadKind
from jrlhf.ppo import SafeRLHFConfig
from jrlhf.rewards.mixture import Rewards
from jrlhf.rewards.text_model import ENDS
from jrlhf.roles.model import Model
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.pretrained import base_name, describe, locate
from jrlhf.run.directory import SUMMARY, Run
from jrlhf.run.files import to_json
from jrlhf.run.metrics import StageRecords, read_metrics
from jrlhf.run.processes import from_main
from jrlhf.stages.context import Context
from jrlhf.stages.evaluate import Graded, compare, grade_heldout

if TYPE_CHECKING:
    from jrlhf.report.card import Facts


@dataclass
class Outcome:
    """The results of a run's stages so far.

    seconds: duration of each phase in this process. reward: the reward model that the run trained, if any.
    before: the grades of the policy before the algorithm. rewards, costs: the roles that score answers.
    """

    policy: Model
    seconds: Mapping[str, float]
    reward: Model | None = None
    before: Graded | None = None
    rewards: Rewards | None = None
    costs: Rewards | None = None


def finish(context: Context, outcome: Outcome) -> dict[str, Any]:
    """Evaluates the policy on held-out prompts, writes models, samples, summary and report; returns the summary."""
    from jrlhf.report import read_run, results, write_report  # draws with matplotlib, which takes long to load

    run = context.run
    run.begin(context.console.line)
    with context.console.status("answering the held-out prompts"):
        after = grade_heldout(context, outcome.policy, outcome.rewards, outcome.costs)
    summary = from_main(partial(_summarise, context, outcome, after))
    with context.console.status("writing the model"):
        try:
            _export_all(context, outcome)
        except FileExistsError as error:  # a file of the user, which would be deleted
            raise UserError(f"{error}; then resume the run") from error
    from_main(lambda: str(write_report(run.path)))
    if run.writes:
        place = None if is_address(context.config.run_dir) else run.path  # an address gets the files at the end
        context.console.summary(results(read_run(run.path)), summary["phases"], place)
    return summary


def _export_all(context: Context, outcome: Outcome) -> None:
    """Exports the policy, and the reward model if this run trained one."""
    config, run, tokenizer = context.config, context.run, context.task.tokenizer
    stage = [name for name in config.stages if name != "reward_model" or len(config.stages) == 1][-1]
    facts = card_facts(run, config, stage, config.length(stage)) if run.writes else None
    export(run, config, tokenizer, outcome.policy, facts)
    if (reward := outcome.reward) is not None:
        if reward.base is not None:  # the base is on all devices, and is exported with the adapter
            reward = RolePlacement.of(context.mesh).store(reward, donate=False)
        with jax.set_mesh(reward.mesh):
            export(run, config, tokenizer, reward, facts, head="scalar")


def _summarise(context: Context, outcome: Outcome, after: Graded | None) -> dict[str, Any]:
    """Writes samples and summary.json. Without an algorithm the grades of the only policy appear as `before`."""
    first, second = (after, None) if outcome.before is None else (outcome.before, after)
    summary: dict[str, Any] = {}
    if first is not None:
        _write_samples(context, first, second)
        summary["held_out"] = compare(first, second)
    steps = {stage: context.config.length(stage) for stage in context.config.stages}
    summary |= {**_from_metrics(context), "steps": steps, "phases": dict(outcome.seconds)}
    context.run.write(SUMMARY, to_json(summary, indent=2))
    return summary


def card_facts(run: Run, config: Config, stage: str, step: int) -> "Facts":
    """The contents of the model cards of a run, after a step of the last stage that trained the policy."""
    from jrlhf.report import read_run
    from jrlhf.report.card import facts_of

    base = None if config.model.path is None else locate(config.model.path, "model.path")
    return facts_of(config, read_run(run.path), stage, step, base)


def export(
    run: Run, config: Config, tokenizer: Tokenizer, model: Model, facts: "Facts | None", head: HeadKind = "lm"
) -> None:
    """Writes a model in Hugging Face form to model/ or reward_model/; an adapter also to adapter/, in PEFT's form.

    Replaces the files of an earlier export. facts: contents of the cards; None in a process that writes nothing.
    """
    origin = None if config.model.path is None else describe(config.model.path, "model.path")
    dtype = config.export.dtype
    if dtype == "auto":
        dtype = "float32" if origin is None else origin.dtype
    name, adapter_name = ("model", "adapter") if head == "lm" else ("reward_model", "reward_adapter")
    params, lora = model.onloaded().params, model.architecture.lora
    if lora is not None:
        base, card = base_name(config.model.path, facts.record.hub if facts else ()), _card(facts, head, adapter=True)
        export_adapter(params, model.config, lora, run.path / adapter_name, base_name=base, card=card)
    export_hf(
        params if model.base is None else model.base,
        model.config,
        run.path / name,
        adapter=None if model.base is None else params,
        lora=lora,
        dtype=jnp.dtype(dtype),
        family=None if origin is None else origin.family,
        tokenizer_json=tokenizer.to_json() if tokenizer.directory is None else None,
        tokenizer_dir=tokenizer.directory,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        bos_id=origin.bos_id if origin is not None and tokenizer.bos_id is None else tokenizer.bos_id,
        generation=None if origin is None else origin.generation,
        card=_card(facts, head),
    )
    if head == "scalar" and run.writes:
        settings = json.loads((run.path / name / "config.json").read_text(encoding="utf-8")) | {ENDS: "eos"}
        run.write(f"{name}/config.json", json.dumps(settings, indent=2) + "\n")


def _card(facts: "Facts | None", head: HeadKind, *, adapter: bool = False) -> dict[str, bytes]:
    if facts is None:
        return {}
    from jrlhf.report.card import files

    return files(replace(facts, head=head, adapter=adapter))


def _write_samples(context: Context, before: Graded, after: Graded | None) -> None:
    StageRecords(context.run.path, "evaluation", -1)  # removes samples of an earlier evaluation of this run
    heldout = context.task.heldout
    assert heldout is not None
    samples, several = [], len(set(before.sources)) > 1
    for row, example in enumerate(heldout.examples[: len(before.responses)]):
        sample: dict[str, object] = {"stage": "evaluation", "step": 0, "prompt": heldout.texts[row]}
        if isinstance(example.completion, str):
            sample["reference"] = example.completion
        if several:
            sample["source"] = example.source
        for when, graded in {"before": before, "after": after}.items():
            if graded is not None:
                sample |= {when: graded.responses[row].text, f"{before.measure}_{when}": float(graded.scores[row])}
                if graded.learnt is not None:
                    sample[f"reward_{when}"] = float(graded.learnt[row])
        samples.append(sample)
    context.run.add_samples(samples)


def _from_metrics(context: Context) -> dict[str, Any]:
    """The figures of the summary from metrics.jsonl: accuracies on held-out pairs, and the last KL and cost."""
    records = read_metrics(context.run.path)

    def values(name: str) -> list[float]:
        return [record[name] for record in records if record.get(name) is not None]

    def last_quarter(numbers: list[float]) -> float:
        return float(np.mean(numbers[-max(len(numbers) // 4, 1) :]))

    summary: dict[str, Any] = {}
    for stage in ("reward_model", "dpo"):
        if accuracies := values(f"{stage}/eval_accuracy"):
            summary[f"{stage}_accuracy"] = accuracies[-1]
    algorithm = context.config.rl.algorithm if context.config.algorithm else None
    if (costs := values("cost/mean")) and isinstance(algorithm, SafeRLHFConfig):
        summary["cost"] = {"last_quarter": last_quarter(costs), "limit": algorithm.cost_limit}
    if algorithm and (kl := values("objective/kl")):
        summary |= {"kl_last_quarter": last_quarter(kl), "kl_target": algorithm.kl_target}
    return summary
