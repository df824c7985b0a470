"""What a model answers to the held-out questions, how far it is from the first model, and what it forgot of English."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import numpy as np

from benchmarks.real.common import Rows, scores
from jrlhf.api import Policy, load
from jrlhf.data.batches import key_for, pad_rows, put_rows, read_responses, row_keys
from jrlhf.data.types import Response
from jrlhf.models import SamplingConfig, Schedule
from jrlhf.roles.compiled import CompiledModel
from jrlhf.roles.generating import engine_of

BATCH = 128  # rows at a time
KL_ROWS = 128  # responses from which the KL is estimated
PASSAGES, CHARACTERS = 32, 1000  # of Python's language reference, which ships with Python as `pydoc_data.topics`
SAMPLES = 8  # responses that a result shows


def responses(policy: Policy, rows: Rows, limit: int, seed: int) -> list[Response]:
    """One response to each row at temperature 1; `limit` tokens at most. Equal seeds give equal random numbers."""
    generator, drawn = policy.generator, []
    sampling = SamplingConfig(limit, temperature=1.0, stop_ids=generator.tokenizer.eos_ids)
    draw = engine_of(*generator.place, sampling, Schedule(chunk=limit))
    width = max(len(row["ids"]) for row in rows)
    with jax.set_mesh(generator.mesh):
        for first in range(0, len(rows), BATCH):
            ids = [row["ids"] for row in rows[first : first + BATCH]]
            keys = row_keys(key_for(seed, "grade"), len(ids), generator.mesh, first=first)
            placed = put_rows(pad_rows(ids, width), generator.mesh)
            generation = draw(generator.model.params, *placed, keys, *generator.model.frozen)
            drawn += read_responses(generator.tokenizer, jax.device_get(generation))
    return drawn


def logprobs(policy: Policy, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The log-probabilities of each row's tokens after the first."""
    generator, values = policy.generator, []
    score = CompiledModel(*generator.place).score_logprobs(temperature=1.0)
    width = max(map(len, rows))
    with jax.set_mesh(generator.mesh):
        for first in range(0, len(rows), BATCH // 4):
            some = rows[first : first + BATCH // 4]
            placed = put_rows(pad_rows(some, width), generator.mesh)
            table = np.asarray(score(generator.model.params, *placed, *generator.model.frozen)[0])
            values += [of_row[1 : len(row)] for of_row, row in zip(table, some, strict=True)]
    return values


def divergence(policy: Policy, first: Policy, rows: Rows, drawn: Sequence[Response]) -> np.ndarray:
    """log(policy / first) of each response: its mean estimates the KL of the policy from the first model, in nats."""
    texts = [[*row["ids"], *response.ids] for row, response in zip(rows, drawn, strict=True)]
    pairs = zip(logprobs(policy, texts), logprobs(first, texts), drawn, strict=True)
    return np.array([float((ours - theirs)[-len(response.ids) :].sum()) for ours, theirs, response in pairs])


def passages() -> list[str]:
    """Ordinary text: the beginnings of the first chapters of Python's reference, by name, that are long enough."""
    return [text[:CHARACTERS] for _, text in sorted(topics.items()) if len(text) >= CHARACTERS][:PASSAGES]


def perplexity(policy: Policy) -> float:
    values = logprobs(policy, [policy.tokenizer.encode(text) for text in passages()])
    return math.exp(-float(np.concatenate(values).mean()))


def grade(model: Path, first: Path, rows: Rows, limit: int, seed: int) -> dict[str, Any]:
    """The measures of a model. right: for each held-out question, in their order, whether the response is right."""
    policy = load(model)
    drawn = responses(policy, rows, limit, seed)
    texts = [response.text for response in drawn]
    right = [bool(score) for score in scores(texts, rows)]
    result: dict[str, Any] = {"accuracy": float(np.mean(right)), "right": "".join("01"[one] for one in right)}
    result |= {"tokens": float(np.mean([len(response.ids) for response in drawn])), "perplexity": perplexity(policy)}
    shown = zip(rows[:SAMPLES], texts, right, strict=False)
    result["samples"] = [{"prompt": row["prompt"], "response": text, "right": one} for row, text, one in shown]
    if model != first:
        nats = divergence(policy, load(first), rows[:KL_ROWS], drawn[:KL_ROWS])
        result["kl"] = {"mean": float(nats.mean()), "standard_error": float(nats.std(ddof=1) / len(nats) ** 0.5)}
    return result


def main() -> None:
    """Does what the file that the command line names says."""
    order = json.loads(Path(sys.argv[1]).read_text())
    measures = grade(Path(order["model"]), Path(order["first"]), order["rows"], order["limit"], 0)
    Path(order["out"]).write_text(json.dumps(measures))


if __name__ == "__main__":
    main()
