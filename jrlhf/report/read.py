"""Reads a run's files as plain data (`Record`). Missing files, stages and numbers are empty."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jrlhf.config.keys import flatten
from jrlhf.config.parse import parse_yaml
from jrlhf.config.stages import TITLES
from jrlhf.errors import UserError, beside, one_line
from jrlhf.meshes.plan import Plan, plan_of
from jrlhf.run.contents import CONFIG, ENVIRONMENT, HUB, PLAN, SAMPLES, read_fused, read_prompting, read_summary
from jrlhf.run.files import read_jsonl
from jrlhf.run.metrics import METRICS, TIMELINE, read_metrics

REWARD_KINDS = {"rewards": "reward", "costs": "cost"}  # prefix of the metrics -> its singular
FAILURES = "failures/"
SCORE, GOLD, KL = "critic/score/mean", "gold/score", "objective/kl"
STAGES = {"sft": "SFT", "reward_model": "reward model", **TITLES}  # usual names

Metrics = dict[str, Any]
Sample = dict[str, Any]
Curve = tuple[list[float], list[float]]  # steps, values
Named = tuple[str, str]  # (key of REWARD_KINDS, name of a reward or a cost)


@dataclass(frozen=True)
class Record:
    """The contents of a run directory."""

    name: str
    config: str = ""
    settings: dict[str, str] = field(default_factory=dict)  # dotted keys of the config -> their values as text
    environment: str = ""
    metrics: dict[str, list[Metrics]] = field(default_factory=dict)  # by stage
    samples: list[Sample] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None  # the devices of each call of the algorithm
    fused: dict[str, Any] = field(default_factory=dict)  # the table of fused updates: see `FusedUpdates.to_json`
    timelines: list[Metrics] = field(default_factory=list)  # the calls of iterations, of all stages
    prompting: dict[str, Any] = field(default_factory=dict)  # how to prompt the model
    hub: tuple[str, ...] = ()  # names of models and datasets that the run took from the hub

    @property
    def held_out(self) -> dict[str, Any]:
        """The comparison on held-out prompts, before and after the algorithm."""
        return self.summary.get("held_out") or {}

    @property
    def algorithm(self) -> str:
        """The stage that trains the policy on rewards or preferences."""
        names = *self.metrics, *re.findall(r"\w+", self.settings.get("stages", ""))
        return next((name for name in names if name not in ("sft", "reward_model")), "ppo")

    @property
    def title(self) -> str:
        """The usual name of the algorithm."""
        return TITLES.get(self.algorithm, self.algorithm)

    @property
    def trained(self) -> bool:
        """True if the algorithm has run for at least one iteration."""
        return self.algorithm in self.metrics

    @property
    def has_kl(self) -> bool:
        """True if the run has measured its KL from a reference."""
        return bool(self.curve(KL)[1])

    @property
    def iterations(self) -> list[Metrics]:
        """The records of the algorithm."""
        return self.metrics.get(self.algorithm, [])

    @property
    def measure(self) -> str:
        """The measure of answers to held-out prompts.

        "gold": the built-in task's rubric, which training never sees. "score": the weighted sum of the run's own
        rewards, which training optimises, on other prompts.
        """
        default = "gold" if any(GOLD in record for record in self.iterations) else "score"
        return str(self.held_out.get("measure", default))

    @property
    def measure_name(self) -> str:
        return "gold score" if self.measure == "gold" else self.measure

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase: from the summary, or else the sums of the iterations."""
        if self.summary.get("phases"):
            return {str(name): float(seconds) for name, seconds in self.summary["phases"].items()}
        sums = {stage: float(np.nansum(self.curve("timing_s/step", stage)[1])) for stage in self.metrics}
        return {stage: seconds for stage, seconds in sums.items() if seconds > 0}

    def curve(self, metric: str, stage: str | None = None) -> Curve:
        """Returns steps and values of a metric, by default in the algorithm. Values that are not finite become NaN."""
        records = self.iterations if stage is None else self.metrics.get(stage, [])
        points = [(float(record["step"]), record[metric]) for record in records if metric in record]
        return [step for step, _ in points], [math.nan if value is None else float(value) for _, value in points]

    def names(self, prefix: str) -> list[str]:
        """Returns the algorithm's metrics that begin with `prefix`, in the order of their first occurrence."""
        return list(dict.fromkeys(key for record in self.iterations for key in record if key.startswith(prefix)))

    def setting(self, key: str) -> float | None:
        """Returns a number of the config; None if it is not a number."""
        try:
            return float(self.settings[key])
        except (KeyError, ValueError):
            return None

    def algorithm_setting(self, key: str) -> float | None:
        return self.setting(f"{self.algorithm}.algorithm.{key}")

    def graded(self, when: str) -> dict[str, Any]:
        """Returns the held-out results of the model "before" or "after"; empty without a mean of the measure."""
        results = self.held_out.get(when) or {}
        return results if results.get(self.measure) is not None else {}

    def both(self, name: str) -> tuple[Any, Any]:
        """Returns a held-out result before and after the algorithm."""
        return self.graded("before").get(name), self.graded("after").get(name)

    # --- Rewards and costs by name: `rewards/NAME/mean`, `rewards/NAME/failures/KIND`, `rewards/NAME/EXTRA` ---

    def named_metrics(self) -> Iterator[tuple[Named, str, str]]:
        """Yields ((kind, name), rest, metric) of every metric `rewards/NAME/REST` or `costs/NAME/REST`."""
        for kind in REWARD_KINDS:
            for key in self.names(f"{kind}/"):
                name, _, rest = key.removeprefix(f"{kind}/").partition("/")
                yield (kind, name), rest, key

    def reward_names(self, kind: str = "rewards") -> list[str]:
        """Returns the names of the run's rewards, or costs."""
        return list(dict.fromkeys(name for (k, name), rest, _ in self.named_metrics() if k == kind and rest == "mean"))


def read_run(run_dir: Path | str) -> Record:
    """Reads what a run has written. Raises UserError for a directory without a run, and for damaged files."""
    directory = Path(run_dir)
    if not (directory / CONFIG).exists() and not (directory / METRICS).exists():
        near = sorted(str(path.parent) for path in Path().glob(f"*/*/{CONFIG}") if path.parent.name == directory.name)
        remedy = beside(directory, "name a run's directory" + "".join(f", such as {path}" for path in near[:1]))
        raise UserError(f"{directory} holds no run (neither {CONFIG} nor {METRICS}): {remedy}")

    def text(name: str) -> str:
        try:
            return (directory / name).read_text(encoding="utf-8") if (directory / name).exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{directory / name} cannot be read ({error}): bring it back from a backup") from error

    try:
        plan = plan_of(parse_yaml(text(PLAN), PLAN)) if text(PLAN) else None
    except (ValueError, UserError) as error:
        reason = one_line(error)
        raise UserError(f"{directory / PLAN} holds no plan ({reason}): delete it and resume the run") from error
    metrics: dict[str, list[Metrics]] = {}
    for record in read_metrics(directory):
        metrics.setdefault(record["stage"], []).append(record)
    return Record(
        name=directory.resolve().name,
        config=text(CONFIG),
        settings=flatten(parse_yaml(text(CONFIG), str(directory / CONFIG)) or {}),
        environment=text(ENVIRONMENT),
        metrics=metrics,
        samples=list(read_jsonl(directory / SAMPLES)),
        summary=read_summary(directory),
        plan=plan,
        fused=read_fused(directory),
        timelines=list(read_jsonl(directory / TIMELINE)),
        prompting=read_prompting(directory),
        hub=tuple(text(HUB).splitlines()),
    )
