"""Maps old keys of configs to new ones, so that old configs and run directories still load."""

from collections.abc import Mapping
from typing import Any

from jrlhf.config.parse import Override, parsed, section_with
from jrlhf.config.stages import ALGORITHMS

_ANNOTATOR = ("prompts", "samples_per_prompt", "foreign_lines", "margin", "heldout_prompts", "label_flip")
_ARITHMETIC = ("terms", "digits", "problems", "demonstrations", "forgotten", "units_first")
_SAMPLING = ("temperature", "top_k", "top_p", "min_new_tokens")

_MOVED = {  # old key -> new key
    **{f"arithmetic.{key}": f"data.{key}" for key in _ARITHMETIC},
    **{f"reward_model.{key}": f"data.annotator.{key}" for key in _ANNOTATOR},
    "sft.renaming": "data.renaming",
    **{f"evaluation.{key}": f"validation.{key}" for key in ("every", "k", "temperature")},
}


def modernize(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a parsed config with new keys in place of old ones, and notices about them for `Config.notices`."""
    mapping = _copied(given)
    stages = parsed(mapping.get("stages"), "stages")
    stages = list(stages) if isinstance(stages, list | tuple) else ["ppo"]
    learner = next((stage for stage in stages if stage in (*ALGORITHMS, "dpo")), None)
    moved = []
    for old, new in _moves(learner).items():
        section, _, name = old.partition(".")
        values = parsed(mapping.get(section), section)
        if not isinstance(values, dict) or name not in values:
            continue
        mapping[section], value = values, values.pop(name)
        target, last = section_with(mapping, new, old)
        if last not in target or isinstance(value, Override):
            target[last] = value
        if name != "rollout_batch" or learner == "dpo":
            moved.append(f"{old} is now {new}")
    if mapping.get("arithmetic") == {}:
        del mapping["arithmetic"]
    return mapping, {"notices": (f"old keys were read: {', '.join(moved)}",) if moved else ()}


def _moves(learner: str | None) -> dict[str, str]:
    """Returns old key -> new key. learner: the run's algorithm of reinforcement learning, or "dpo"; None: neither."""
    if learner in ALGORITHMS:
        return _MOVED | {f"{learner}.{key}": f"sampling.{key}" for key in _SAMPLING}
    return _MOVED | {f"ppo.{key}": f"sampling.{key}" for key in _SAMPLING} | {"ppo.rollout_batch": "sampling.batch"}


def _copied(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}
