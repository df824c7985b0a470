"""The head of the report: what kind of run it was, and what came out of it."""

import math
from pathlib import PurePosixPath

from jrlhf.report.charts import number
from jrlhf.report.parts import card, plain
from jrlhf.report.record import TITLES, Record
from jrlhf.report.rewards import KINDS, failure_counts
from jrlhf.run.console import duration

_NOTHING = ("", "0", "null")  # how a config says that there is none


def chips(run: Record) -> str:
    """What the run is, in a few words each."""
    found = [*_progress_chip(run), *_stages_chip(run), *_model_chips(run), *_mesh_chip(run), *_plan_chip(run)]
    for key, name in (("compute.dtype", ""), ("seed", "seed ")):
        if key in run.settings:
            found.append(f"{name}{run.settings[key]}")
    if run.seconds:
        found.append(duration(sum(run.seconds.values())))
    return "<p class=chips>" + "".join(f"<span>{plain(chip)}</span>" for chip in found) + "</p>"


def _progress_chip(run: Record) -> list[str]:
    if run.summary:
        return ["finished"]
    stages = [stage for stage in ("sft", "reward_model", run.algorithm) if run.metrics.get(stage)]
    if not stages:
        return []
    last = stages[-1]
    done = run.metrics[last][-1]["step"]
    total = run.setting(f"{last}.iterations" if last == run.algorithm else f"{last}.steps")
    return [f"unfinished: {last} {done}" + (f" of {total:.0f}" if total else "")]


def _stages_chip(run: Record) -> list[str]:
    names = {"sft": "SFT", "reward_model": "reward model", **TITLES}
    return [" → ".join(names.get(stage, stage) for stage in run.metrics)] if run.metrics else []


def _model_chips(run: Record) -> list[str]:
    found = []
    path, rank, adapter, base = (
        run.settings.get(key, "") for key in ("model.path", "lora.rank", "lora.path", "lora.base")
    )
    if path not in _NOTHING:
        found.append(PurePosixPath(path).name or path)
    if rank not in _NOTHING:
        alpha = run.setting("lora.alpha")
        found.append(f"LoRA rank {rank}" + (f", alpha {alpha:g}" if alpha else ""))
    elif adapter not in _NOTHING:
        found.append(f"LoRA from {PurePosixPath(adapter).name or adapter}")
    if found and found[-1].startswith("LoRA ") and base not in (*_NOTHING, "auto"):
        found.append(f"{base} base")
    return found


def _mesh_chip(run: Record) -> list[str]:
    sizes = {axis: run.settings.get(f"mesh.{axis}", "1") for axis in ("data", "fsdp", "tensor")}
    split = " × ".join(f"{axis} {'auto' if size == '-1' else size}" for axis, size in sizes.items() if size != "1")
    simulated = run.settings.get("device.simulated", "null")
    on = "" if simulated in _NOTHING else f" on {simulated} simulated devices"
    return [f"mesh {split}{on}"] if split else []


def _plan_chip(run: Record) -> list[str]:
    return [] if run.plan is None or run.plan.name == "colocate" else [f"plan {run.plan.name}"]


def outcome(run: Record) -> str:
    """The figures that the run is judged by, and before them a warning where reward functions failed."""
    cards = [
        *_measure_card(run),
        *_loss_card(run),
        *_accuracy_card(run),
        *_preference_card(run),
        *_cost_card(run),
        *_kl_card(run),
        *_distinct_card(run),
        *_time_card(run),
    ]
    return _warning(run) + (f"<div class=cards>{''.join(cards)}</div>" if cards else "")


def _warning(run: Record) -> str:
    counts, steps = failure_counts(run)
    if not counts:
        return ""
    total = sum(count.total() for count in counts.values())
    rows = "".join(
        f"<li>{'' if kind == 'rewards' else 'cost '}<code>{plain(name)}</code> "
        + ", ".join(f"{plain(way)} <b>{count:,}</b>" for way, count in ways.most_common())
        + "</li>"
        for (kind, name), ways in counts.items()
    )
    failed = " and ".join(word for kind, word in KINDS.items() if any(kind == each for each, _ in counts))
    iterations = len(run.metrics[run.algorithm])
    when = f"in {len(steps)} of {iterations} iterations, the last time in iteration {steps[-1]}"
    printed = ", ".join(f"{KINDS[kind]}-{name}.log" for kind, name in counts)
    return (
        f"<div class='card warning'><h3>{failed.capitalize()} functions failed on {total:,} "
        f"sample{'s' * (total != 1)}</h3><ul>{rows}</ul><p class=note>{when}. Each of these samples was given "
        "the score that the config names for failures, "
        f"which says nothing about the answer. What the functions printed is in {plain(printed)}.</p></div>"
    )


def _measure_card(run: Record) -> list[str]:
    before, after = run.graded("before"), run.graded("after")
    if not before:
        return []
    measure, name = run.measure, run.measure_name.capitalize()
    own = "" if measure == "gold" else "; the run's own rewards"
    own += f", which {run.title} optimises on other prompts" if own and run.algorithm in run.metrics else ""
    held_out = run.held_out
    on = f" on {held_out['n']} held-out prompts" if "n" in held_out else ""
    if not after:
        error = before.get(f"{measure}_standard_error")
        note = f"{before[measure]:.3f}" + ("" if error is None else f" ± {error:.3f}") + f"{on}{own}"
        return [card(f"{name}, held out", number(before[measure]), note)]
    note = f"{after[measure] - before[measure]:+.3f} through {run.title}{on}"
    if "difference" in held_out:
        difference, error = held_out["difference"], held_out.get("standard_error") or 0.0
        note = f"{difference:+.3f} ± {error:.3f} through {run.title}{on}"
        note += f", {difference / error:.1f} standard errors" if error else ""
    value = f"{number(before[measure])}<i>→</i><wbr>{number(after[measure])}"
    return [card(f"{name}, held out", value, note + own)]


def _cost_card(run: Record) -> list[str]:
    before, after = (run.graded(name).get("cost") for name in ("before", "after"))
    if before is None or after is None:
        return []
    error = run.graded("after").get("cost_standard_error")
    note = f"{after:.3f}" + ("" if error is None else f" ± {error:.3f}") + f" after {run.title}"
    limit = run.setting(f"{run.algorithm}.algorithm.cost_limit")
    note += "" if limit is None else f"; the limit is {limit:g}"
    return [card("Cost, held out", f"{number(before)}<i>→</i><wbr>{number(after)}", note)]


def _loss_card(run: Record) -> list[str]:
    """The outcome of a run that ends with SFT."""
    values = [value for value in run.curve("sft", "sft/eval_loss")[1] if math.isfinite(value)]
    if not values or run.algorithm in run.metrics:
        return []
    best = min(values)
    note = f"nats a response token, {math.exp(min(values[-1], 700.0)):.3g} in perplexity"
    note += f"; it was {number(best)} at best" if number(best) != number(values[-1]) else ""
    return [card("SFT loss, held out", number(values[-1]), note)]


def _accuracy_card(run: Record) -> list[str]:
    return _pairs_card(run, "reward_model", "Reward model", "right about")


def _preference_card(run: Record) -> list[str]:
    return _pairs_card(run, "dpo", "Preferences", "the policy prefers the better of")


def _pairs_card(run: Record, stage: str, title: str, verdict: str) -> list[str]:
    accuracy = run.summary.get(f"{stage}_accuracy")
    if accuracy is None:
        accuracy = (run.curve(stage, f"{stage}/eval_accuracy")[1] or [math.nan])[-1]
    if not math.isfinite(accuracy):
        return []
    pairs = (run.curve(stage, f"{stage}/eval_pairs")[1] or [math.nan])[-1]
    known = pairs > 0
    error = f" ± {math.sqrt(accuracy * (1 - accuracy) / pairs):.1%}" if known else ""
    of = f"{pairs:,.0f} held-out pairs" if known else "held-out pairs"
    return [card(title, f"{accuracy:.1%}", f"{verdict} {accuracy:.1%}{error} of {of}")]


def _kl_card(run: Record) -> list[str]:
    values = run.rl_curve("objective/kl")[1]
    if not values:
        return []
    quarter = [value for value in values[-max(len(values) // 4, 1) :] if math.isfinite(value)]
    mean = sum(quarter) / len(quarter) if quarter else math.nan
    target = run.setting(f"{run.algorithm}.algorithm.kl_target")
    note = "nats a response, mean of the last quarter"
    if target:
        note += f"; the target is {target:g} ({mean / target - 1:+.0%})"
    return [card("KL to the reference", number(mean), note)]


def _distinct_card(run: Record) -> list[str]:
    before, after = (run.graded(name).get("distinct") for name in ("before", "after"))
    if not before or not after:
        return []
    note = f"{after} distinct held-out responses, {before} before {run.title}"
    return [card("Variety kept", f"{after / before:.0%}", note)]


def _time_card(run: Record) -> list[str]:
    if not run.seconds:
        return []
    shares = ", ".join(f"{name.replace('_', ' ')} {duration(each)}" for name, each in run.seconds.items())
    return [card("Time", duration(sum(run.seconds.values())), shares)]
