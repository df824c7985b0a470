"""The names of the files in a run's directory, and readers of its small ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrlhf.errors import UserError
from jrlhf.models.hf.directories import PROMPTING

CONFIG, PLAN, FUSED, ENVIRONMENT, SAMPLES = "config.yaml", "plan.yaml", "fused.json", "environment.txt", "samples.jsonl"
SUMMARY, TOKENIZER, HUB = "summary.json", "tokenizer.json", "hub.txt"
PREFERENCES, REPORT = "preferences.jsonl", "report.html"
ROLLOUTS = "rollouts.jsonl"  # of asynchronous runs: a line for each row, whose text it does not have
FLEET = "fleet.yaml"  # settings of `fleet` that may change while a run goes on; a store has no copy of it
EXPORTS = "model", "adapter", "reward_model", "reward_adapter"


def read_summary(directory: Path) -> dict[str, Any]:
    """Reads a run's summary.json; empty if the run has not ended."""
    return _read_object(directory / SUMMARY)


def read_fused(directory: Path) -> dict[str, Any]:
    """Reads the table of a run's fused updates, as `FusedUpdates.to_json` writes it; empty if there is none."""
    return _read_object(directory / FUSED)


def best_step(summary: Mapping[str, Any], stage: str) -> int | None:
    """Returns the step of the weights with which a stage ended by `checkpoints.best`; None: with its last ones."""
    best = summary.get("best", {})
    return best["step"] if best.get("stage") == stage else None


def read_prompting(directory: Path) -> dict[str, Any]:
    """Returns how to prompt the model in the directory of a run or an export; empty if that is not recorded.

    chat: in conversations. prompt_end: the end of each plain prompt.
    """
    places = [place for place in (directory, directory / "model") if (place / PROMPTING).is_file()]
    path = (places or [directory])[0] / PROMPTING
    content, kinds = _read_object(path), {"chat": bool, "prompt_end": str}
    for name, kind in kinds.items():
        if not isinstance(content.get(name, kind()), kind):
            raise UserError(f"{path}: {name} is {content[name]!r}, not a {kind.__name__}: correct it, or delete it")
    return {name: content[name] for name in kinds if name in content}


def _read_object(path: Path) -> dict[str, Any]:
    of_run = (path.parent / CONFIG).is_file()
    remedy = "delete it and resume the run" if of_run else "export or download the model again"
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object: {remedy}")
    return content
