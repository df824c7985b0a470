"""Where the time of an iteration goes, call by call."""

import numpy as np

from jrlhf.report.charts import COLORS
from jrlhf.report.parts import lane, lead
from jrlhf.report.record import Record
from jrlhf.run.console import duration

# The calls of an iteration in the order in which they run, with what each does.
_CALLS = (
    ("validation", "answer and score held-out prompts"),
    ("reshard", "switch weights to the layout of a call"),
    ("gen", "generate responses"),
    ("reward", "scores of reward models"),
    ("old_log_prob", "actor log-probs"),
    ("ref", "reference log-probs"),
    ("values", "critic values"),
    ("cost_values", "cost critic values"),
    ("reward_wait", "wait for functions' scores"),
    ("pool", "keep groups that differ"),
    ("adv", "rewards and advantages"),
    ("update_critic", "train the critic"),
    ("update_cost_critic", "train the cost critic"),
    ("update_actor", "train the actor"),
    ("update", "experience, train both"),
    ("transfer", "arrays to the devices of a call"),
    ("sleep", "weights and states from the host and back"),
)
_BESIDE = {"reward_functions": "reward functions", "cost_functions": "cost functions"}  # in processes of their own
_SETTLED = 2  # the first iterations compile


def timeline(run: Record) -> str:
    """The median iteration as bars laid end to end. Calls that most iterations do without are only told."""
    records = run.metrics.get(run.algorithm, [])
    settled = records[_SETTLED:] if len(records) > _SETTLED else records
    seconds: dict[str, float] = {}
    for key in dict.fromkeys(key for each in settled for key in each if key.startswith("timing_s/")):
        seconds[key.removeprefix("timing_s/")] = float(np.median([each.get(key) or 0.0 for each in settled]))
    step = seconds.pop("step", 0.0)
    beside = {what: seconds.pop(name) for name, what in _BESIDE.items() if seconds.get(name)}
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
        figures = _milliseconds(length), _share(length / whole)
        rows.append(lane(name, known.get(name, ""), start / whole, length / whole, index % COLORS + 1, *figures))
        start += length
    return lead(_told(run, seconds, whole, beside, len(settled))) + f"<div class='card gantt'>{''.join(rows)}</div>"


def _told(run: Record, seconds: dict[str, float], whole: float, beside: dict[str, float], count: int) -> str:
    records = run.metrics[run.algorithm]
    first = records[0].get("timing_s/step")
    article, unit = ("A", "step") if run.algorithm == "dpo" else ("An", "iteration")
    told = f"The median of {count} {unit}s takes" if count > 1 else f"{article} {unit} takes"
    told += f" {_milliseconds(whole)}"
    told += f"; the first one, which compiles, took {duration(first)}." if first and len(records) > _SETTLED else "."
    if "reshard" in seconds:
        told += f" Switching weights from layout to layout costs {seconds['reshard'] / whole:.1%} of it."
    if beside:
        spent = " and ".join(f"{what} ({_milliseconds(length)})" for what, length in beside.items())
        told += f" Beside the calls work {spent}, for which they wait {_milliseconds(seconds.get('reward_wait', 0.0))}."
    validations = [each for each in run.rl_curve("timing_s/validation")[1] if each > 0]
    if validations and "validation" not in seconds:
        told += f" Validation, {len(validations)} times in all, takes {_milliseconds(float(np.median(validations)))}."
    return told


def _share(part: float) -> str:
    return f"{part:.1%}" if part < 0.0095 else f"{part:.0%}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
