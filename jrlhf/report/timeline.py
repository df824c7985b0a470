"""Where the time of an iteration goes, call by call."""

import numpy as np

from jrlhf.console import duration
from jrlhf.report.parts import lead, plain
from jrlhf.report.record import Record

# The calls of an iteration in the order in which they run, with what each does.
_CALLS = (
    ("validation", "answer and score held-out prompts"),
    ("reshard", "actor weights to the generation layout"),
    ("gen", "generate responses"),
    ("reward", "reward model scores"),
    ("reward_functions", "reward functions' scores"),
    ("old_log_prob", "actor log-probs"),
    ("ref", "reference log-probs"),
    ("values", "critic values"),
    ("cost_values", "cost critic values"),
    ("reward_wait", "wait for reward functions"),
    ("pool", "keep groups that differ"),
    ("adv", "rewards and advantages"),
    ("update_critic", "train the critic"),
    ("update_cost_critic", "train the cost critic"),
    ("update_actor", "train the actor"),
    ("update", "experience, train both"),
)
_SETTLED = 2  # the first iterations compile


def timeline(run: Record) -> str:
    """The median iteration as bars laid end to end. Calls that most iterations do without are only told."""
    records = run.metrics.get(run.algorithm, [])
    settled = records[_SETTLED:] if len(records) > _SETTLED else records
    seconds: dict[str, float] = {}
    for key in dict.fromkeys(key for each in settled for key in each if key.startswith("timing_s/")):
        seconds[key.removeprefix("timing_s/")] = float(np.median([each.get(key) or 0.0 for each in settled]))
    step = seconds.pop("step", 0.0)
    beside = seconds.pop("reward_functions", 0.0) if "reward_wait" in seconds else 0.0
    seconds = {name: length for name, length in seconds.items() if length > 0}
    if not seconds:
        return ""
    known = dict(_CALLS)
    names = [name for name in known if name in seconds] + [name for name in seconds if name not in known]
    rest = step - sum(seconds.values())
    if rest > 0.005 * step:
        names.append("rest")
        seconds["rest"] = rest
    whole = sum(seconds.values())
    rows, start = [], 0.0
    for index, name in enumerate(names):
        length = seconds[name]
        place = f"left:{start / whole:.2%};width:{length / whole:.2%}"
        rows.append(
            f"<div class=call><span class=what><b>{plain(name)}</b> {plain(known.get(name, ''))}</span>"
            f"<span class=lane><span class='bar b{index % 6 + 1}' style='{place}'></span></span>"
            f"<span class=num>{_milliseconds(length)}</span><span class=num>{_share(length / whole)}</span></div>"
        )
        start += length
    return lead(_told(run, seconds, whole, beside, len(settled))) + f"<div class='card gantt'>{''.join(rows)}</div>"


def _told(run: Record, seconds: dict[str, float], whole: float, beside: float, count: int) -> str:
    records = run.metrics[run.algorithm]
    first = records[0].get("timing_s/step")
    article, unit = ("A", "step") if run.algorithm == "dpo" else ("An", "iteration")
    told = f"The median of {count} {unit}s takes" if count > 1 else f"{article} {unit} takes"
    told += f" {_milliseconds(whole)}"
    told += f"; the first one, which compiles, took {duration(first)}." if first and len(records) > _SETTLED else "."
    switch, generate = seconds.get("reshard"), seconds.get("gen")
    if switch is not None and generate:
        told += f" Switching the actor to its generation layout costs {switch / whole:.1%} of it."
    if beside > 0:
        told += f" Reward functions take {_milliseconds(beside)} beside the other calls"
        told += f", which wait {_milliseconds(seconds.get('reward_wait', 0.0))} for them."
    validations = [each for each in run.rl_curve("timing_s/validation")[1] if each > 0]
    if validations and "validation" not in seconds:
        told += f" Validation, {len(validations)} times in all, takes {_milliseconds(float(np.median(validations)))}."
    return told


def _share(part: float) -> str:
    return f"{part:.1%}" if part < 0.0095 else f"{part:.0%}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
