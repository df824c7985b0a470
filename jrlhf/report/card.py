"""Writes the model card of an export: README.md with metadata for the Hugging Face hub, and a plot.

It has no times, dates or paths, so a resumed run gives the same bytes as an uninterrupted one.
"""

import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from jrlhf import __version__
from jrlhf.config.keys import classes_of, kinds_of
from jrlhf.config.parse import config_yaml
from jrlhf.config.places import PREFIX
from jrlhf.config.schema import Config, DatasetsData, RewardConfig
from jrlhf.config.stages import is_algorithm
from jrlhf.models.hf.directories import CARD, PLOT, PROMPTING, SIGNATURE
from jrlhf.models.hf.files import check_file
from jrlhf.models.weights import HeadKind
from jrlhf.report.charts import Chart, Series
from jrlhf.report.read import GOLD, SCORE, STAGES, Record, read_run
from jrlhf.report.sections import OWN_ANSWERS, accuracy, results
from jrlhf.roles.pretrained import hub_model, locate
from jrlhf.run.console import validation_key
from jrlhf.run.contents import best_step
from jrlhf.run.files import to_json
from jrlhf.run.resume import defines_results
from jrlhf.run.text import clean

HUB = "https://huggingface.co"
_LEFT_OUT = "(left out)"
_VALIDATED = "on held-out prompts before each iteration"
_PLACES = ("path", "critic", "reference", "model", "adapter", "function", "dataflow", "optimizer", "hooks")  # settings
_NAMES_OF_PARTS = ("name", "split", "metric", "stages", "stage")  # settings that the tables show, too
_ROLES = {"sft": "SFT", "preferences": "preferences", "prompts": "prompts", "heldout": "held-out prompts"}


@dataclass(frozen=True)
class CardData:
    """The contents of a card.

    config: of the run. record: the run's records until the exported step. stage: the last stage that trained the
    policy. step: its last step. head: "scalar" for a reward model. adapter: the directory contains only an adapter.
    license: metadata about the licence in the base's own card.
    """

    config: Config
    record: Record
    stage: str
    step: int
    head: HeadKind = "lm"
    adapter: bool = False
    license: Mapping[str, str | list[str]] | None = None

    @property
    def hub(self) -> Sequence[str]:
        """The names of models and datasets that the run took from the hub."""
        return self.record.hub

    def files(self, head: HeadKind, *, adapter: bool) -> dict[str, bytes]:
        """Returns name -> bytes of the card, the prompting settings and, if two values were measured, a plot."""
        return files(replace(self, head=head, adapter=adapter))


def card_of_run(run: Path, config: Config, stage: str, step: int) -> CardData:
    """Returns the contents of the cards of a run's models after a step of the last stage that trained the policy."""
    base = None if config.model.path is None else locate(config.model.path, "model.path")
    return card_data(config, read_run(run), stage, step, base)


def card_data(config: Config, record: Record, stage: str, step: int, base: Path | None) -> CardData:
    """Returns the contents of the cards of a policy after a step of a stage.

    record: of the whole run. Later steps are left out, and the summary, too, if it belongs to another step.
    base: the directory of the model from which the run started.
    """
    earlier = {"reward_model", *config.stages[: config.stages.index(stage)]}
    metrics = {name: rows for name, rows in record.metrics.items() if name in earlier}
    if own := [row for row in record.metrics.get(stage, []) if row["step"] <= step]:
        metrics[stage] = own
    best, last = best_step(record.summary, stage), record.summary.get("steps", {}).get(stage)
    exported = step == (last if best is None else best)
    record = replace(record, metrics=metrics, summary=record.summary if exported else {})
    return CardData(config, record, stage, step, license=None if base is None else license_of(base))


def files(data: CardData) -> dict[str, bytes]:
    """Returns name -> bytes of the card, the prompting settings and, if two values were measured, a plot."""
    plot = progress(data)
    parts = {CARD: card(data, plot="" if plot is None else plot[0]).encode()}
    if data.record.prompting and data.head == "lm" and not data.adapter:
        parts[PROMPTING] = to_json(data.record.prompting)
    return parts if plot is None else {**parts, PLOT: plot[1]}


def card(data: CardData, *, plot: str = "") -> str:
    """Returns the Markdown text. plot: what the plot shows; empty: there is none."""
    sections = [
        f"---\n{_metadata(data)}---\n\n# {_title(data)}",
        f"{SIGNATURE}, which does RLHF in JAX.",
        *_results(data, plot),
        "## Recipe",
        *_recipe(data),
        *_data(data),
        *_rewards(data),
        *_use(data),
        "## Versions",
        f"jrlhf {__version__}, jax {version('jax')}, flax {version('flax')}, "
        f"Python {platform.python_version()}; format of the weights: Hugging Face, safetensors.",
    ]
    return "\n\n".join(sections) + "\n"


def license_of(base: Path) -> dict[str, str | list[str]]:
    """Returns the licence metadata of the card in a model's directory; empty if there is none."""
    from huggingface_hub.repocard import metadata_load  # takes long, and warns in a notebook without widgets

    try:
        check_file(base / CARD)
        metadata = metadata_load(base / CARD) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    terms: dict[str, str | list[str]] = {}
    for key in ("license", "license_name", "license_link"):
        value = metadata.get(key)
        if isinstance(value, str):
            terms[key] = clean(value)
        elif isinstance(value, list) and all(isinstance(part, str) for part in value):
            terms[key] = [clean(part) for part in value]
    return terms


def _short(path: str, data: CardData) -> str:
    """Returns the hub name of a model or dataset on the hub; for any other path its last part."""
    last = re.split(r"[/\\]", path.rstrip("/\\"))[-1].rpartition("@")[2]
    return hub_model(path, data.record.hub) or (_LEFT_OUT if last.startswith("~") else clean(last))


def _text(text: str) -> str:
    """Returns a text of the user as one line, escaped for Markdown."""
    return re.sub(r"([\\`*_\[\]<>&|~#])", r"\\\1", clean(text))


def _code(text: str) -> str:
    """Returns a text of the user as a code span of Markdown."""
    text = clean(text)
    ticks = _ticks(text, 1)
    return f"{ticks} {text} {ticks}" if "`" in text else f"{ticks}{text}{ticks}"


def _ticks(text: str, least: int) -> str:
    """Returns a longer sequence of backticks than any in a text."""
    return "`" * max(least, *(len(run) + 1 for run in re.findall("`+", text)), 0)


def _metadata(data: CardData) -> str:
    config, scalar = data.config, data.head == "scalar"
    values: dict[str, Any] = {"library_name": "peft" if data.adapter else "transformers"}
    values["pipeline_tag"] = "text-classification" if scalar else "text-generation"
    values |= data.license or {}
    if base := hub_model(config.model.path, data.record.hub):
        values |= {"base_model": base, "base_model_relation": "adapter" if data.adapter else "finetune"}
    if names := [path.partition(":")[0] for _, path, _ in _datasets(config) if path in data.record.hub]:
        values["datasets"] = list(dict.fromkeys(names))
    stages = ["reward-model"] if scalar else [stage.replace("_", "-") for stage in _done(data)]
    lora = ["lora"] if config.lora is not None else []
    values["tags"] = list(dict.fromkeys(["jrlhf", *stages, *lora]))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _done(data: CardData) -> list[str]:
    """The stages of the exported model, in their order."""
    stages = data.config.stages
    return ["reward_model"] if data.head == "scalar" else list(stages[: stages.index(data.stage) + 1])


def _title(data: CardData) -> str:
    path = data.config.model.path
    trained = " and ".join(STAGES.get(stage, stage) for stage in _done(data) if stage != "reward_model")
    base = "A language model" if path is None else _text(_short(path, data))
    if data.head == "scalar":
        return "A reward model" if path is None else f"A reward model of {base}"
    kind = ": a LoRA adapter" if data.adapter else "" if path is None else ","
    return f"{base}{kind} trained with {trained}" if trained else base


def _results(data: CardData, plot: str) -> list[str]:
    run, scalar = data.record, data.head == "scalar"
    shown = accuracy(run, "reward_model", "Reward model", "right about") if scalar else results(run)
    rows = [[title, " → ".join(values), note] for title, values, note in shown]
    note = f" {OWN_ANSWERS}" if plot.endswith(_VALIDATED) else ""
    picture = [f"![{plot}]({PLOT})", f"{plot[0].upper()}{plot[1:]}.{note}"] if plot else []
    table = [_table(["figure", "value", "note"], rows)] if rows else []
    doubts = ["\n".join(f"- {_text(doubt)}" for doubt in run.held_out.get("doubts", ()))] if rows and not scalar else []
    return ["## Results", *table, *filter(None, doubts), *picture] if rows or picture else []


def progress(data: CardData) -> tuple[str, bytes] | None:
    """Returns (description, PNG) of a plot of the held-out score, or else of the score in training or the loss.

    Returns None if nothing was measured twice. The same metrics give the same bytes.
    """
    run = data.record
    validated = {key: parsed for key in run.names("val-core/") if (parsed := validation_key(key)) is not None}
    means = [key for key, (source, _, statistic) in validated.items() if source == "all" and statistic[:4] == "mean"]
    training = f"in the iterations of {run.title}"
    curves = [(f"{run.measure_name} {_VALIDATED}", key, None) for key in means]
    curves += [(f"gold score of the answers {training}", GOLD, None), (f"mean score {training}", SCORE, None)]
    curves += [("share of held-out pairs whose better answer the policy prefers", "dpo/eval_accuracy", "dpo")]
    losses = [("loss on held-out rows in SFT", "sft/eval_loss", "sft"), ("loss in SFT", "sft/loss", "sft")]
    if data.head == "scalar":
        shown = "share of held-out pairs that the reward model is right about"
        curves, losses = [(shown, "reward_model/eval_accuracy", "reward_model")], []
    for label, metric, stage in curves + losses:
        series = Series("", *run.curve(metric, stage))
        if len(series.finite[0]) > 1:
            return clean(label), Chart(clean(label), [series], xlabel="step" if stage else "iteration").png()
    return None


def _recipe(data: CardData) -> list[str]:
    config, lines = data.config, []
    for stage in _done(data):
        unit, length = "iterations" if is_algorithm(stage) else "steps", config.length(stage)
        ended = (data.record.metrics.get(stage) or [{"step": length}])[-1]["step"]  # perhaps early
        done = data.step if stage == data.stage and data.head == "lm" else ended
        count = f"{done} {unit}" if done == length else f"{done} of {length} {unit}"
        lines.append(f"{len(lines) + 1}. {STAGES.get(stage, stage)}: {count}")
    settings = yaml.safe_dump(_settings(data), sort_keys=False, allow_unicode=True, width=1000).rstrip()
    fence = _ticks(settings, 3)
    text = (
        "The settings that are not the defaults, without those that only say where and how it is computed. Paths are "
        f"given by their last part, and `{_LEFT_OUT}` stands for texts, options and columns. In a file, with these in "
        "full, they train the model again: "
        "`python -m jrlhf.train --config FILE`."
    )
    return ["\n".join(lines), text, f"{fence}yaml\n{settings}\n{fence}"]


def _settings(data: CardData) -> dict[str, Any]:
    """Returns the settings that define the results and are not the defaults.

    Numbers and choices are shown, and paths are shortened. All other values, which may contain anything, are replaced;
    only their names are shown.
    """

    def plain(value: Any, kind: Any, key: str) -> Any:
        if isinstance(value, list):
            listed = next((one for one in (kind, *get_args(kind)) if get_origin(one) is tuple), None)
            inner = kind if listed is None else get_args(listed)[0]
            return [plain(part, inner, f"{key}[{index}]") for index, part in enumerate(value)]
        if isinstance(value, dict) and classes_of(kind):
            return section(value, kind, key)
        if isinstance(value, dict):
            return {name if str(name).isidentifier() else _LEFT_OUT: _LEFT_OUT for name in value}
        if not isinstance(value, str) or value in _choices(kind):
            return value
        name = key.rpartition(".")[2].partition("[")[0]
        if ".client." in key:  # its model is no directory
            return _LEFT_OUT
        return _short(value, data) if name in _PLACES else clean(value) if name in _NAMES_OF_PARTS else _LEFT_OUT

    def section(values: Mapping[str, Any], kind: Any, key: str) -> dict[str, Any]:
        cls = type(data.config.data) if key == "data" else classes_of(kind)[0]
        kinds, mapping = kinds_of(cls, values), {}
        for name, value in values.items():
            inner = f"{key}.{name}" if key else name
            if isinstance(value, dict) and value:
                part = plain(value, kinds[name], inner)
                mapping |= {name: part} if part else {}
            elif defines_results(inner):
                mapping[name] = plain(value, kinds[name], inner)
        return mapping

    return section(yaml.safe_load(config_yaml(data.config, defaults=False)), Config, "")


def _choices(kind: Any) -> set[str]:
    """The words from which a setting of this type is chosen."""
    return {kind} if isinstance(kind, str) else set().union(*map(_choices, get_args(kind)))


def _datasets(config: Config) -> list[tuple[str, str, str]]:
    """Returns (purpose, path, split) of all datasets that a run reads."""
    if not isinstance(config.data, DatasetsData):
        return []
    parts = [(_ROLES[key.partition("[")[0]], part) for key, part in config.data.datasets.items()]
    return [(title, part.path, part.split) for title, part in parts if part.path is not None]


def _data(data: CardData) -> list[str]:
    config, lines = data.config, []
    for title, path, split in _datasets(config):
        if path.startswith(PREFIX):
            lines.append(f"- {title}: rows in the memory of the program that trained it")
            continue
        link = f"[{path}]({HUB}/datasets/{path.partition(':')[0]})"
        named = link if path in data.record.hub else _code(_short(path, data))
        lines.append(f"- {title}: {named}, split {_code(split)}")
    lines = lines or [f"The built-in task `{config.data.source}`."]
    limits = f"At most {config.data.max_prompt} tokens of prompt and {config.data.max_response} of response."
    return ["## Data", "\n".join(lines), limits]


def _rewards(data: CardData) -> list[str]:
    config = data.config

    def row(kind: str, part: RewardConfig) -> list[str]:
        source = _short(str(getattr(part, str(part.kind))), data)
        return [part.name, kind, f"{part.kind} {_code(source)}", f"{part.weight:g}"]

    rows = [row(kind, part) for _, kind, part in config.rewards_and_costs]
    if "reward_model" in config.stages and config.algorithm:
        weight = config.sections["reward_model"].weight
        rows.insert(0, ["reward_model", "reward", "the reward model that the run trained", f"{weight:g}"])
    return ["## Rewards", _table(["name", "kind", "source", "weight"], rows)] if rows else []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(clean(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _use(data: CardData) -> list[str]:
    config, scalar = data.config, data.head == "scalar"
    task = "SequenceClassification" if scalar else "CausalLM"
    name, library = (f"AutoPeftModelFor{task}", "peft") if data.adapter else (f"AutoModelFor{task}", "transformers")
    code = f'from {library} import {name}\n\nmodel = {name}.from_pretrained("MODEL")'
    parts = ["## Use", "`MODEL` is the directory of this file, or its name on the hub."]
    if not scalar and not data.adapter:
        parts.append("    python -m jrlhf.generate --model MODEL")
        if end := data.record.prompting.get("prompt_end"):
            parts.append(f"Prompts of the training end in {_code(repr(end))}.")
    parts.append(f"```python\n{code}\n```")
    kind = "adapter" if data.adapter else "model"
    if scalar:
        remedy = f"In a config, it is the reward of a run as `rewards: [{{{kind}: MODEL}}]`."
    else:
        remedy = f"Training begins with it where a config says `{'lora' if data.adapter else 'model'}.path: MODEL`."
    resume = "A run that was stopped goes on with `python -m jrlhf.train --config RUN/config.yaml --resume`, where "
    resume += "`RUN` is its directory."
    return [*parts, "## Continue", *([remedy] if scalar or config.model.path is not None else []), resume]
