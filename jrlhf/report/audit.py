"""Recounts the metrics of an asynchronous run from the records of its rows: `python -m jrlhf.report RUN --audit`.

A run logs means over arrays on devices. Its rollouts.jsonl says, for each row, which weights drew how many of its
tokens and how many of them count in the loss. Both must tell the same. This file computes nothing with JAX.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from jrlhf.config.load import load_config
from jrlhf.errors import RunFailure, UserError, one_line
from jrlhf.ppo.config.policy import PolicyConfig
from jrlhf.report.read import read_run
from jrlhf.run.contents import CONFIG, ROLLOUTS
from jrlhf.run.files import read_jsonl

TOLERANCE = 1e-5  # relative: metrics are means in float32
QUARTILES = 4
_AGES = "training/off_policy/"
_TRUNCATED, _MASKED = "rollout_corr/rollout_is_ratio_fraction_high", "rollout_corr/rollout_rs_masked_fraction"
_MASKED_ROWS, _FULL = "rollout_corr/rollout_rs_seq_masked_fraction", "rollout_corr/full_weight/quartile_"

Row = Mapping[str, Any]


@dataclass
class Audit:
    """What was recounted. checked: metric -> number of iterations, and the greatest difference from the log."""

    rows: int = 0
    groups: int = 0
    iterations: int = 0
    checked: dict[str, tuple[int, float]] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yields a summary, and a line for each metric."""
        yield f"{self.iterations} iterations learned from {self.groups} groups, {self.rows} rows, each once"
        for name, (count, difference) in sorted(self.checked.items()):
            yield f"{name}: recounted in {count} iterations, greatest difference {difference:.2g}"


def audit(run_dir: Path | str) -> Audit:
    """Recounts a run, and returns what was compared.

    Raises RunFailure with a sentence for the first row, group or metric that does not agree, and UserError for a run
    without records of rows, or with damaged ones.
    """
    record, path = read_run(run_dir), Path(run_dir) / ROLLOUTS
    logged = {int(metrics["step"]): metrics for metrics in record.iterations}
    if not (Path(run_dir) / CONFIG).exists():
        raise UserError(f"{run_dir} has no {CONFIG}, whose settings tell how to recount: bring it back from a backup")
    config = load_config(str(Path(run_dir) / CONFIG))
    if config.asynchronous is None or not logged:
        raise UserError(f"{run_dir} has no iterations of an asynchronous run: there is nothing to recount")
    algorithm, staleness = config.rl.algorithm, config.asynchronous.staleness
    result, used, before = Audit(), set[int](), 0
    try:
        for step, rows in groupby(read_jsonl(path), itemgetter("step")):
            if step != before + 1:
                raise RunFailure(f"{path} has no lines of iteration {before + 1}: lines were lost")
            if step not in logged:  # the run goes on, or was killed between two writes
                break
            listed, iteration = [*rows], f"iteration {step} of {run_dir}"
            _check_rows(listed, used, staleness, iteration)
            recounted, near = recount(listed, weights=not algorithm.weighs_in_loss), _near_bounds(algorithm, listed)
            _compare(result, recounted, logged[step], near, iteration)
            result.rows += len(listed)
            before = step
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} has a damaged row ({one_line(error)}): bring it back from a backup") from error
    if before < max(logged):
        raise RunFailure(f"{path} or metrics.jsonl has no lines of iteration {before + 1}: lines were lost")
    result.groups, result.iterations = len(used), before
    return result


def _near_bounds(algorithm: PolicyConfig, rows: Sequence[Row]) -> float:
    """Returns the share of an iteration's tokens whose weights may round to the other side of a bound.

    The records are computed by another program than the update. Without corrections a weight depends on the age alone.
    Bounds of single tokens allow two tokens, and bounds of whole rows the longest row, in a quartile of the batch.
    """
    if not algorithm.corrections:
        return 0.0
    counts = [row["counted"] for row in rows]
    return QUARTILES * (max(counts) if algorithm.weighs_rows else 2) / max(sum(counts), 1)


def _compare(
    result: Audit, recounted: Mapping[str, float], logged: Mapping[str, Any], near: float, iteration: str
) -> None:
    """Compares what the rows of an iteration give with its metrics; those of weights are logged where they exist.

    near: tolerance of shares of weights.
    """
    for name, value in recounted.items():
        if name not in logged:
            if not name.startswith("rollout_corr/"):
                raise RunFailure(f"{name} of {iteration} is not in metrics.jsonl")
            continue
        written = math.nan if logged[name] is None else float(logged[name])
        difference = abs(value - written)
        if not difference <= TOLERANCE * max(1.0, abs(value)) + near * name.startswith("rollout_corr/"):
            raise RunFailure(f"{name} of {iteration} is {written:g} in metrics.jsonl, but its rows give {value:g}")
        count, greatest = result.checked.get(name, (0, 0.0))
        result.checked[name] = count + 1, max(greatest, difference)


def _check_rows(rows: Sequence[Row], used: set[int], staleness: float, iteration: str) -> None:
    """Checks groups and rows of an iteration by themselves, and adds its groups to `used`."""
    _check_groups(rows, used, iteration)
    for row in rows:
        _check_row(row, staleness, iteration)


def _check_groups(rows: Sequence[Row], used: set[int], iteration: str) -> None:
    """Checks that each group is whole and was never used before, and adds it to `used`."""
    counts = Counter(row["group"] for row in rows)
    samples = max(counts.values())
    for group, count in counts.items():
        if count != samples:
            raise RunFailure(f"group {group} in {iteration} has {count} rows in place of {samples}")
        if group in used:
            raise RunFailure(f"group {group} in {iteration} was learned from before")
        used.add(group)


def _check_row(row: Row, staleness: float, iteration: str) -> None:
    """Checks that the parts of a row's record agree, and that no token older than the bound has a weight."""
    name, drawn = f"row {row['row']} of group {row['group']} in {iteration}", sum(count for _, count in row["versions"])
    if drawn != row["tokens"]:
        raise RunFailure(f"{name} has {row['tokens']} tokens, but versions of {drawn}")
    if any(version > row["version"] for version, _ in row["versions"]):
        raise RunFailure(f"{name} has tokens of weights that are newer than those that learned from it")
    if row["counted"] not in (0, row["tokens"]):
        raise RunFailure(f"{name} has {row['tokens']} tokens, of which {row['counted']} count: all of them, or none")
    older = sum(count for version, count in row["versions"] if row["version"] - version > staleness)
    if row["counted"] and row["masked"] < older:
        raise RunFailure(f"{name} has {older} tokens older than the bound, but only {row['masked']} of weight 0")


def recount(rows: Sequence[Row], *, weights: bool = True) -> dict[str, float]:
    """The metrics of an iteration's lengths, ages and weights, under their names in metrics.jsonl.

    Ages and weights are those of rows that count in the loss; without any, they are left out. weights: False where the
    weights are computed within the update, of which the rows do not tell.
    """
    lengths = [row["tokens"] for row in rows]
    metrics = _spread("response_length", lengths, [1] * len(rows))
    metrics["response_length/clip_ratio"] = sum(row["end"] == "length" for row in rows) / len(rows)
    counted = [row for row in rows if row["counted"]]
    if not counted:
        return metrics
    ages = [[(row["version"] - version, count) for version, count in row["versions"]] for row in counted]
    newest, oldest = ([choose(age for age, _ in own) for own in ages] for choose in (min, max))
    once = [1] * len(counted)
    spans = [old - new + 1 for new, old in zip(newest, oldest, strict=True)]
    metrics |= _spread(f"{_AGES}trajectory_spans", spans, once)
    metrics |= _spread(f"{_AGES}trajectory_staleness", newest, once)
    metrics |= _spread(f"{_AGES}trajectory_staleness_worst", oldest, once)
    metrics |= _spread(f"{_AGES}token_staleness", *zip(*(pair for own in ages for pair in own), strict=True))
    if not weights:
        return metrics
    tokens = sum(row["counted"] for row in counted)
    metrics[_MASKED] = sum(row["masked"] for row in counted) / tokens
    metrics[_TRUNCATED] = sum(row["truncated"] for row in counted) / tokens
    metrics[_MASKED_ROWS] = sum(row["masked"] > 0 for row in counted) / len(counted)
    return metrics | {f"{_FULL}{part + 1}": share for part, share in enumerate(_full_weight(counted))}


def _spread(name: str, values: Sequence[float], counts: Sequence[int]) -> dict[str, float]:
    """Mean, maximum and minimum of values that occur `counts` times."""
    return {
        f"{name}/mean": float(np.average(values, weights=counts)),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def _full_weight(rows: Sequence[Row]) -> list[float]:
    """The share of tokens whose weight is neither 0 nor truncated, in each quartile of the rows by length.

    Rows of one length cannot be told apart, so each of them is divided among the quartiles that they fill together.
    """
    of_length = defaultdict[int, list[Row]](list)
    for row in rows:
        of_length[row["counted"]].append(row)
    full, all_tokens, before = [0.0] * QUARTILES, [0.0] * QUARTILES, 0
    for length, own in sorted(of_length.items()):
        whole = sum(length - row["masked"] - row["truncated"] for row in own)
        for part in range(QUARTILES):
            low, high = (len(rows) * (part + end) / QUARTILES for end in (0, 1))
            share = max(min(before + len(own), high) - max(before, low), 0) / len(own)
            full[part] += share * whole
            all_tokens[part] += share * length * len(own)
        before += len(own)
    return [x / y if y else 0.0 for x, y in zip(full, all_tokens, strict=True)]
