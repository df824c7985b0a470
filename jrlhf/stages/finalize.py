"""The end of a run: held-out evaluation, the models in Hugging Face form, samples, the summary and the report."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jrlhf.config.parse import config_yaml
from jrlhf.config.places import is_address
from jrlhf.config.schema import Config
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.errors import UserError, alike
from jrlhf.models.hf.adapters import export_adapter
from jrlhf.models.hf.config import ENDS, drawn_with
from jrlhf.models.hf.export import export_hf
from jrlhf.models.weights import HeadKind
from jrlhf.ppo.config.algorithms import SafeRLHFConfig
from jrlhf.rewards.mixture import Rewards
from jrlhf.rewards.types import score_or_none, scores_of
from jrlhf.roles.model import Model
from jrlhf.roles.placement import RolePlacement
from jrlhf.roles.pretrained import base_name, describe
from jrlhf.run.checkpoints import read_meta
from jrlhf.run.contents import REPORT, SAMPLES, SUMMARY, best_step, read_summary
from jrlhf.run.directory import RunDirectory
from jrlhf.run.files import saved_steps, sha256, to_json
from jrlhf.run.metrics import StageRecords, read_metrics
from jrlhf.run.processes import from_main
from jrlhf.stages.context import Context
from jrlhf.stages.evaluate import Graded, compare, doubts, evaluate
from jrlhf.stages.watching import BEST, WATCH

FINISHED = "finished"  # key in the summary: a digest of the config with which the run ended


@dataclass
class Outcome:
    """The results of a run's stages so far.

    reward: the reward model that the run trained, if any.
    before: the grades of the policy before the algorithm. rewards, costs: the roles that score answers.
    """

    policy: Model
    reward: Model | None = None
    before: Graded | None = None
    rewards: Rewards | None = None
    costs: Rewards | None = None


class ModelCard(Protocol):
    """The contents of the cards of a run's models."""

    @property
    def hub(self) -> Sequence[str]:
        """The names of models and datasets that the run took from the hub."""
        ...

    def files(self, head: HeadKind, *, adapter: bool) -> dict[str, bytes]:
        """Returns name -> bytes of the files of the policy's card ("lm") or the reward model's, or of its adapter's."""
        ...


def finished(context: Context) -> dict[str, Any] | None:
    """Returns the summary of a run that has ended with this very config, and still has all that it left; or None."""
    run, config = context.run, context.config
    if is_address(config.run_dir):  # what is there may lack what a killed process had not copied yet
        return None
    models = ["model"] + ["reward_model"] * ("reward_model" in config.stages)
    files = [REPORT, *run.collected, *(f"{model}/config.json" for model in models)]
    files += ["adapter/adapter_config.json"] * (config.lora is not None)
    summary = read_summary(run.path)
    ended = summary.get("steps", {})
    files += [f"checkpoints/{stage}/{ended.get(stage, 0)}" for stage in config.stages]
    if not all((run.path / name).exists() for name in files):
        return None
    return summary if summary.get(FINISHED) == sha256(config_yaml(config)) else None


def deliver(context: Context, outcome: Outcome, card_of: Callable[[str, int], ModelCard]) -> dict[str, Any]:
    """Evaluates the policy on held-out prompts; writes samples, summary and models. Returns the summary.

    card_of: (the last stage that trained the policy, its last step) -> the card.
    """
    run = context.run
    run.begin(context.console.line)
    after = evaluate(context, outcome.policy, outcome.rewards, outcome.costs)
    best = _best(context)  # in all processes, which read a checkpoint together
    summary = from_main(partial(_summarise, context, outcome, after, best))
    with context.console.status("writing the model"):
        try:
            _export_all(context, outcome, card_of, best)
        except FileExistsError as error:  # a file of the user, which would be deleted
            raise UserError(f"{error}; then resume the run") from error
    return summary


def mark_finished(context: Context, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Writes and returns the summary of a run that has written everything else. One that is killed before is completed
    by a resume."""
    whole = {**summary, FINISHED: sha256(config_yaml(context.config))}
    context.run.write(SUMMARY, to_json(whole, indent=2))
    return whole


def _export_all(
    context: Context, outcome: Outcome, card_of: Callable[[str, int], ModelCard], best: Mapping[str, Any]
) -> None:
    """Exports the policy, and the reward model if this run trained one."""
    config, run, tokenizer = context.config, context.run, context.task.tokenizer
    stage = [name for name in config.stages if name != "reward_model" or len(config.stages) == 1][-1]
    step = best_step({"best": best}, stage)
    card = card_of(stage, _last_step(run, stage) if step is None else step) if run.writes else None
    export(run, config, tokenizer, outcome.policy, card)
    if (reward := outcome.reward) is not None:
        if reward.base is not None:  # the base is on all devices, and is exported with the adapter
            reward = RolePlacement.of(context.mesh).store(reward, donate=False)
        with jax.set_mesh(reward.mesh):
            export(run, config, tokenizer, reward, card, head="scalar")


def _best(context: Context) -> dict[str, Any]:
    """The stage, step and value of the weights that were chosen by `checkpoints.best`; empty: there are none."""
    own = context.config.checkpoints
    for stage in filter(own.best_in, context.config.stages):
        folder = context.run.path / "checkpoints" / stage
        steps = saved_steps(folder)
        name, value, step = read_meta(folder, steps[-1]).get(WATCH, {}).get(BEST, [None] * 3)
        if name == own.best and step in steps:
            return {"stage": stage, "metric": name.removeprefix("-"), "value": value, "step": step}
    return {}


def _last_step(run: RunDirectory, stage: str) -> int:
    """The last step of a stage that has ended, perhaps early."""
    return saved_steps(run.path / "checkpoints" / stage)[-1]


def _summarise(context: Context, outcome: Outcome, after: Graded | None, best: Mapping[str, Any]) -> dict[str, Any]:
    """Writes samples and summary.json. Without an algorithm the grades of the only policy appear as `before`."""
    first, second = (after, None) if outcome.before is None else (outcome.before, after)
    summary, records = dict[str, Any](), read_metrics(context.run.path)
    if first is not None:
        _write_samples(context, first, second)
        equal = values_of(records, "group/zero_std")
        warnings = doubts(outcome.before, first if second is None else second, context.sampling, equal)
        summary["held_out"] = compare(first, second) | ({"doubts": warnings} if warnings else {})
    config, rows = context.config, records
    if best:  # nothing remains of what was learned later
        rows = [row for row in records if row["stage"] != best["stage"] or row["step"] <= best["step"]]
    steps = {stage: _last_step(context.run, stage) for stage in config.stages}
    summary |= {**_from_metrics(config, rows), "steps": steps, "phases": dict(context.phases.seconds)}
    summary |= {"best": best} if best else {}
    metric, logged = config.stop and config.stop.metric, {name for record in records for name in record}
    if metric is not None and metric.removeprefix("-") not in logged:
        remedy = alike(metric.removeprefix("-"), logged, "metrics.jsonl has the names")
        context.console.warn(f"stop.metric={metric} had no effect, because no step has logged it: {remedy}")
    context.run.write(SUMMARY, to_json(summary, indent=2))
    return summary


def export(
    run: RunDirectory, config: Config, tokenizer: Tokenizer, model: Model, card: ModelCard | None, head: HeadKind = "lm"
) -> None:
    """Writes a model in Hugging Face form to model/ or reward_model/; an adapter also to adapter/, in PEFT's form.

    Replaces the files of an earlier export. card: None in a process that writes nothing.
    """
    origin = None if config.model.path is None else describe(config.model.path, "model.path")
    dtype = config.export.dtype
    if dtype == "auto":
        dtype = "float32" if origin is None else origin.dtype
    generation = {} if origin is None else origin.generation
    if config.drawing:
        generation = drawn_with(generation, config.drawing)
    name, adapter_name = ("model", "adapter") if head == "lm" else ("reward_model", "reward_adapter")
    pad_id = tokenizer.pad_id if head == "lm" else _pad_of_classifier(tokenizer)
    params, lora = model.onloaded().params, model.architecture.lora
    if lora is not None:
        base, files = base_name(config.model.path, card.hub if card else ()), _files(card, head, adapter=True)
        export_adapter(params, model.config, lora, run.path / adapter_name, base_name=base, card=files)
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
        pad_id=pad_id,
        bos_id=origin.bos_id if origin is not None and tokenizer.bos_id is None else tokenizer.bos_id,
        generation=generation,
        card=_files(card, head),
    )
    if head == "scalar" and run.writes:
        named = {} if pad_id is None else {"pad_token": tokenizer.backend.id_to_token(pad_id)}
        changes = {"config.json": {ENDS: "eos"}, "tokenizer_config.json": named, "special_tokens_map.json": named}
        for file, more in changes.items():
            path = run.path / name / file
            if path.exists():
                settings = json.loads(path.read_text(encoding="utf-8")) | more
                run.write(f"{name}/{file}", json.dumps(settings, indent=2) + "\n")


def _pad_of_classifier(tokenizer: Tokenizer) -> int | None:
    """A special token with which no answer ends, for padding: transformers reads a score at the last token that is not
    the pad. None: there is no such token, and transformers takes one text at a time."""
    if tokenizer.pad_id is not None and tokenizer.pad_id not in tokenizer.eos_ids:
        return tokenizer.pad_id
    added = tokenizer.backend.get_added_tokens_decoder().items()
    ids = {index: token.content for index, token in added if token.special and index < tokenizer.vocab_size}
    others = ids.keys() - set(tokenizer.eos_ids)
    return min(others, key=lambda index: ("pad" not in ids[index].lower(), index), default=None)


def _files(card: ModelCard | None, head: HeadKind, *, adapter: bool = False) -> dict[str, bytes]:
    return {} if card is None else card.files(head, adapter=adapter)


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
                score = score_or_none(graded.scores[row])
                sample |= {when: graded.responses[row].text, f"{before.measure}_{when}": score}
                sample |= scores_of(row, graded.by_reward, f"scores_{when}")
                if graded.learnt is not None:
                    sample[f"reward_{when}"] = float(graded.learnt[row])
        samples.append(sample)
    context.run.append(SAMPLES, samples)


def values_of(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Returns the values of a metric in the records that have it."""
    return [record[name] for record in records if record.get(name) is not None]


def _from_metrics(config: Config, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the summary from metrics.jsonl: accuracies on held-out pairs, and the last KL and cost."""
    values = partial(values_of, records)

    def last_quarter(numbers: list[float]) -> float:
        return float(np.mean(numbers[-max(len(numbers) // 4, 1) :]))

    summary: dict[str, Any] = {}
    for stage in ("reward_model", "dpo"):
        if accuracies := values(f"{stage}/eval_accuracy"):
            summary[f"{stage}_accuracy"] = accuracies[-1]
    algorithm = config.rl.algorithm if config.algorithm else None
    if (costs := values("cost/mean")) and isinstance(algorithm, SafeRLHFConfig):
        summary["cost"] = {"last_quarter": last_quarter(costs), "limit": algorithm.cost_limit}
    if algorithm and (kl := values("objective/kl")):
        summary |= {"kl_last_quarter": last_quarter(kl), "kl_target": algorithm.kl_target}
    return summary
