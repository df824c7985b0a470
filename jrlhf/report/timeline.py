"""Sections on the calls of an iteration: how long each takes, and on which devices it runs."""

from typing import NamedTuple

import numpy as np

from jrlhf.report.charts import COLORS
from jrlhf.report.read import Record
from jrlhf.run.console import duration

# The calls of an iteration in the order in which they run, and what each does.
_CALLS = {
    "validation": "answer and score held-out prompts",
    "reshard": "switch weights to the layout of a call",
    "gen": "generate responses",
    "reward": "scores of reward models",
    "old_log_prob": "actor log-probs",
    "ref": "reference log-probs",
    "values": "critic values",
    "cost_values": "cost critic values",
    "reward_wait": "wait for functions' scores",
    "pool": "select groups with different scores",
    "adv": "rewards and advantages",
    "update_critic": "train the critic",
    "update_cost_critic": "train the cost critic",
    "update_actor": "train the actor",
    "update": "experience, train both",
    "transfer": "arrays to the devices of a call",
    "sleep": "offload weights and states and bring them back",
}
_PARALLEL = {"reward_functions": "reward functions", "cost_functions": "cost functions"}  # run in other processes
_COMPILING = 2  # iterations at the start that compile


class Lane(NamedTuple):
    """A bar in a row of its own. start, width: shares of the row; numbers: texts at its end."""

    name: str
    note: str
    start: float
    width: float
    color: int
    numbers: tuple[str, str]


def timeline(run: Record) -> tuple[str, list[Lane]]:
    """Draws the median iteration as bars laid end to end. A call that most iterations do without has no bar."""
    settled = run.iterations[_COMPILING:] or run.iterations
    seconds: dict[str, float] = {}
    for key in dict.fromkeys(key for record in settled for key in record if key.startswith("timing_s/")):
        seconds[key.removeprefix("timing_s/")] = float(np.median([record.get(key) or 0.0 for record in settled]))
    step = seconds.pop("step", 0.0)
    parallel = {words: seconds.pop(name) for name, words in _PARALLEL.items() if seconds.get(name)}
    seconds = {name: length for name, length in seconds.items() if length > 0}
    if not seconds:
        return "", []
    seconds = {name: seconds[name] for name in [*(name for name in _CALLS if name in seconds), *seconds]}
    rest = step - sum(seconds.values())
    if rest > 0.005 * step:
        seconds["rest"] = rest
    total = sum(seconds.values())
    lanes, start = [], 0.0
    for index, (name, length) in enumerate(seconds.items()):
        share = length / total
        numbers = _milliseconds(length), f"{share:.1%}" if share < 0.0095 else f"{share:.0%}"
        lanes.append(Lane(name, _CALLS.get(name, ""), start / total, share, index % COLORS + 1, numbers))
        start += length
    return _summary(run, seconds, total, parallel, len(settled)), lanes


def _summary(run: Record, seconds: dict[str, float], total: float, parallel: dict[str, float], count: int) -> str:
    first, settled = run.iterations[0].get("timing_s/step"), len(run.iterations) > _COMPILING
    article, unit = ("A", "step") if run.algorithm == "dpo" else ("An", "iteration")
    text = f"The median of {count} {unit}s takes" if count > 1 else f"{article} {unit} takes"
    text += f" {_milliseconds(total)}"
    text += f"; the first one, which compiles, took {duration(first)}." if first and settled else "."
    if "reshard" in seconds:
        text += f" Switching weights from layout to layout costs {seconds['reshard'] / total:.1%} of it."
    if parallel:
        work = " and ".join(f"{words} ({_milliseconds(length)})" for words, length in parallel.items())
        text += f" In parallel run {work}; the calls wait {_milliseconds(seconds.get('reward_wait', 0.0))} for them."
    validations = [length for length in run.curve("timing_s/validation")[1] if length > 0]
    if validations and "validation" not in seconds:
        text += f" Validation, {len(validations)} times in all, takes {_milliseconds(float(np.median(validations)))}."
    return text


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def placement(run: Record) -> tuple[str, list[Lane]]:
    """Draws the plan: a bar for each call across the devices that it runs on; empty with a single device."""
    plan = run.plan
    if plan is None or plan.devices == 1:
        return "", []
    text = (
        f"The plan is {plan.name}. A bar spans the devices, of {plan.devices}, that a call runs on, "
        "in its layout and mesh; one colour is one role."
    )
    if any(call.micro_batches > 1 for call in plan.placements.values()):
        text += " × n: a device computes its rows in n parts."
    roles = list(dict.fromkeys(name.partition(".")[0] for name in plan.placements))
    lanes = []
    for name, call in plan.placements.items():
        sizes = zip(("data", "fsdp", "tensor"), call.sizes, strict=True)
        mesh = " × ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one device"
        start, width = call.devices.start / plan.devices, call.devices.count / plan.devices
        parts = f"× {call.micro_batches}" if call.micro_batches > 1 else ""
        color = roles.index(name.partition(".")[0]) % COLORS + 1
        lanes.append(Lane(name, f"{call.layout} · {mesh}", start, width, color, (str(call.devices), parts)))
    return text, lanes
