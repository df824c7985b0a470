"""What a run has written, as the report reads it. Files, stages and figures that are not there are empty."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jrlhf.config.parse import flatten, parse_yaml
from jrlhf.errors import UserError
from jrlhf.meshes.plan import Plan, plan_of
from jrlhf.run.directory import CONFIG, ENVIRONMENT, PLAN, SAMPLES, read_summary
from jrlhf.run.files import read_jsonl
from jrlhf.run.metrics import METRICS, read_metrics

TITLES = {
    "dpo": "DPO",
    "ppo": "PPO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "reinforce_pp_baseline": "REINFORCE++-baseline",
    "remax": "ReMax",
    "safe_rlhf": "Safe RLHF",
}  # stage -> what people call it


@dataclass(frozen=True)
class Record:
    """What a run directory holds."""

    name: str
    config: str
    settings: dict[str, str]  # the config's dotted keys and their values as text
    environment: str
    metrics: dict[str, list[dict[str, Any]]]  # by stage
    samples: list[dict[str, Any]]
    summary: dict[str, Any]
    plan: Plan | None = None  # on which devices each call of the algorithm runs

    @property
    def held_out(self) -> dict[str, Any]:
        """The comparison on held-out prompts, before and after reinforcement learning."""
        return self.summary.get("held_out") or {}

    @property
    def algorithm(self) -> str:
        """The stage that trains the policy on rewards or preferences."""
        return next((stage for stage in self.metrics if stage in TITLES), "ppo")

    @property
    def title(self) -> str:
        """What people call it."""
        return TITLES[self.algorithm]

    @property
    def measure(self) -> str:
        """What the answers to held-out prompts are measured by.

        "gold": the built-in task's rubric, which training never sees. "score": the weighted sum of the run's own
        rewards, which training optimises, on other prompts.
        """
        if "measure" in self.held_out:
            return str(self.held_out["measure"])
        return "gold" if any("gold/score" in each for each in self.metrics.get(self.algorithm, [])) else "score"

    @property
    def measure_name(self) -> str:
        return {"gold": "gold score"}.get(self.measure, self.measure)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase: from the summary, else the sums of the iterations."""
        if self.summary.get("phases"):
            return {str(name): float(seconds) for name, seconds in self.summary["phases"].items()}
        sums = {stage: float(np.nansum(self.curve(stage, "timing_s/step")[1])) for stage in self.metrics}
        return {stage: seconds for stage, seconds in sums.items() if seconds > 0}

    def rl_curve(self, metric: str) -> tuple[list[float], list[float]]:
        """`curve` of the stage of reinforcement learning."""
        return self.curve(self.algorithm, metric)

    def rl_names(self, prefix: str) -> list[str]:
        """`names` of the stage of reinforcement learning."""
        return self.names(self.algorithm, prefix)

    def curve(self, stage: str, metric: str) -> tuple[list[float], list[float]]:
        """Steps and values of the records that have the metric; what was not finite is NaN."""
        found = [(each["step"], each[metric]) for each in self.metrics.get(stage, []) if metric in each]
        return [float(step) for step, _ in found], [math.nan if value is None else float(value) for _, value in found]

    def names(self, stage: str, prefix: str) -> list[str]:
        """The metrics of a stage whose names begin so, in the order in which they came up."""
        records = self.metrics.get(stage, [])
        return list(dict.fromkeys(key for each in records for key in each if key.startswith(prefix)))

    def setting(self, key: str) -> float | None:
        """A number of the config, None where it is not one."""
        try:
            return float(self.settings[key])
        except (KeyError, ValueError):
            return None

    def graded(self, name: str) -> dict[str, Any]:
        """The held-out figures of the model "before" or "after"; empty without a mean of the measure."""
        found = self.held_out.get(name) or {}
        return found if found.get(self.measure) is not None else {}


def read_run(run_dir: Path | str) -> Record:
    """Reads what a run has written so far.

    Raises:
        UserError: the directory holds no run, or one of its files cannot be read.
    """
    directory = Path(run_dir)
    if not (directory / CONFIG).exists() and not (directory / METRICS).exists():
        raise UserError(f"{directory} holds no run (neither {CONFIG} nor {METRICS}): name a run's directory")

    def text(name: str) -> str:
        return (directory / name).read_text(encoding="utf-8") if (directory / name).exists() else ""

    try:
        plan = plan_of(yaml.safe_load(text(PLAN))) if text(PLAN) else None
    except (ValueError, yaml.YAMLError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{directory / PLAN} holds no plan ({reason}): delete it and resume the run") from error
    metrics: dict[str, list[dict[str, Any]]] = {}
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
    )
