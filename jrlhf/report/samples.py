"""What the model says: held-out prompts before and after, and the latest of training and of validation."""

from collections.abc import Sequence
from typing import Any

from jrlhf.report.parts import change_cell, lead, number_cell, plain, table, text_cell
from jrlhf.report.record import Record

_LATEST = 12
Sample = dict[str, Any]


def samples(run: Record) -> str:
    """The section."""
    evaluated = [each for each in run.samples if each.get("stage") == "evaluation"]
    compared = [each for each in evaluated if "before" in each and "after" in each]
    if compared:
        shown = _before_and_after(run, compared)
    else:
        shown = _answers(run, [each for each in evaluated if "before" in each])
    latest = [each for each in run.samples if "response" in each]
    validated = [each for each in latest if each.get("kind") == "validation"]
    trained = [each for each in latest if each.get("kind") != "validation"]
    opened = not shown
    for title, found in (("The latest validation", validated), ("The latest of training", trained)):
        if found:
            shown += _group(title, _latest_table(found), opened=opened)
            opened = False
    return shown


def _before_and_after(run: Record, found: list[Sample]) -> str:
    measure, name = run.measure, run.measure_name
    changes = [(each.get(f"{measure}_after") or 0.0) - (each.get(f"{measure}_before") or 0.0) for each in found]
    order = sorted(range(len(found)), key=changes.__getitem__)
    better, worse = sum(change > 1e-9 for change in changes), sum(change < -1e-9 for change in changes)
    told = (
        f"Of {len(found)} held-out prompts {better} are answered better after {run.title} than before by the {name}, "
        f"{worse} worse and {len(found) - better - worse} alike."
    )
    groups = [("The first ones", list(range(min(10, len(found)))))]
    if len(found) > 10:
        groups += [
            (f"Where the {name} fell most", [index for index in order[:6] if changes[index] < 0]),
            ("Where it rose most", [index for index in order[::-1][:6] if changes[index] > 0]),
        ]
    tables = [
        _group(title, _pairs_table(run, [found[index] for index in chosen]), opened=not position)
        for position, (title, chosen) in enumerate(groups)
        if chosen
    ]
    return lead(told) + "".join(tables)


def _answers(run: Record, found: list[Sample]) -> str:
    """Answers of a run that compares nothing: the first ones, the lowest and the highest by the measure."""
    if not found:
        return ""
    key = f"{run.measure}_before"
    groups = [("The first ones", found[:10])]
    graded = sorted((each for each in found if each.get(key) is not None), key=lambda each: each[key])
    if len(found) > 10 and graded:
        groups += [
            (f"With the lowest {run.measure_name}", graded[:6]),
            ("With the highest", graded[::-1][:6]),
        ]
    told = f"Answers to {len(found)} held-out prompts."
    return lead(told) + "".join(
        _group(title, _pairs_table(run, chosen), opened=not position) for position, (title, chosen) in enumerate(groups)
    )


def _group(title: str, body: str, *, opened: bool) -> str:
    return f"<details{' open' if opened else ''}><summary>{plain(title)}</summary>{body}</details>"


def _pairs_table(run: Record, found: list[Sample]) -> str:
    measure = run.measure
    compared = any("after" in each for each in found)
    source, reference, graded, reward = (
        any(each.get(key) not in (None, "") for each in found)
        for key in ("source", "reference", f"{measure}_before", "reward_before")
    )
    columns = [("prompt", ""), *([("before", ""), ("after", "")] if compared else [("answer", "")])]
    columns += [("reference", "")] * reference + [("source", "")] * source
    columns += [("reward", "num")] * reward + [(measure, "num")] * graded + [("", "")] * (compared and graded)
    rows = []
    for each in found:
        cells = [text_cell(each.get("prompt", ""), "code"), text_cell(each.get("before", ""))]
        cells += [text_cell(each.get("after", ""))] * compared
        cells += [text_cell(each.get("reference", ""), "aside")] * reference
        cells += [text_cell(each.get("source", ""), "aside")] * source
        cells += [_step_cell(each, "reward", compared)] * reward + [_step_cell(each, measure, compared)] * graded
        if compared and graded:
            old, new = each.get(f"{measure}_before"), each.get(f"{measure}_after")
            cells.append("<td></td>" if old is None or new is None else change_cell(new - old, 2))
        rows.append(cells)
    return table(columns, rows, "texts")


def _step_cell(sample: Sample, name: str, compared: bool) -> str:
    """`old → new`, or the old one alone."""
    old, new = (number_cell(sample.get(f"{name}_{when}")) for when in ("before", "after"))
    return old.removesuffix("</td>") + " → " + new.removeprefix("<td class=num>") if compared else old


def _latest_table(found: Sequence[Sample]) -> str:
    found = found[-_LATEST:]
    source, scored, gold = (
        any(each.get(key) not in (None, "") for each in found) for key in ("source", "score", "gold")
    )
    columns = [("step", "num"), ("prompt", ""), ("response", ""), *[("source", "")] * source]
    columns += [("score", "num")] * scored + [("gold", "num")] * gold
    rows = []
    for each in found:
        cells = [
            f"<td class=num>{plain(str(each.get('step', '')))}</td>",
            text_cell(each.get("prompt", ""), "code"),
            text_cell(each["response"]),
        ]
        cells += [text_cell(each.get("source") or "", "aside")] * source
        cells += [number_cell(each.get("score"))] * scored + [number_cell(each.get("gold"))] * gold
        rows.append(cells)
    return table(columns, rows, "texts")
