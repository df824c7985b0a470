"""Preference pairs: two responses to one prompt, ranked by an annotator who errs now and then.

The annotator is a known rubric, so that the quality of the learned reward can be measured: `rubric.py`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np

from jrlhf.tasks.docstrings.corpus import Example
from jrlhf.tasks.docstrings.rubric import Rubric


@dataclass(frozen=True)
class Pair:
    """One comparison, in the shape that preference datasets have (`prompt`, `chosen`, `rejected`).

    flipped: the annotator erred: by the rubric, `rejected` is the better one.
    """

    prompt: str
    chosen: str
    rejected: str
    flipped: bool = False


def annotate(
    signature: str,
    first: str,
    second: str,
    rubric: Rubric,
    rng: np.random.Generator,
    *,
    flip: float = 0.05,
    margin: float = 0.0,
) -> Pair | None:
    """Rank two responses to one signature; None for a tie.

    Args:
        rng: drawn from once for a pair, and not at all for a tie.
        flip: probability of the wrong label. At 0 the result is the rubric's own order.
        margin: scores that differ by no more than this are a tie.
    """
    scored_first = (rubric.score(signature, first), first)
    scored_second = (rubric.score(signature, second), second)
    return _rank(signature, scored_first, scored_second, rng, flip, margin)


def build_pairs(
    signatures: Sequence[str],
    candidates: Sequence[Sequence[str]],
    rubric: Rubric,
    rng: np.random.Generator,
    *,
    per_prompt: int = 6,
    flip: float = 0.05,
    margin: float = 0.0,
) -> list[Pair]:
    """Rank candidates against each other, prompt by prompt, as InstructGPT did (Ouyang et al. 2022, section 3.4).

    Where a prompt has more pairs than `per_prompt`, those are taken that spread evenly from the smallest difference in
    score to the largest: far pairs teach the reward its large features, close ones its small features.

    Args:
        signatures: one a prompt.
        candidates: the responses to each prompt; repeated ones count once.
        rng, flip, margin: as in `annotate`. Use `flip=0` for pairs to measure with.
    """
    pairs: list[Pair] = []
    for signature, responses in zip(signatures, candidates, strict=True):
        scored = [(rubric.score(signature, response), response) for response in dict.fromkeys(responses)]
        ranked = sorted(
            (both for both in combinations(scored, 2) if not _tied(*both, margin)),
            key=lambda both: abs(both[0][0] - both[1][0]),
        )
        for first, second in _spread(ranked, per_prompt):
            pair = _rank(signature, first, second, rng, flip, margin)
            assert pair is not None
            pairs.append(pair)
    return pairs


def with_real_lines(
    examples: Sequence[Example], samples: Sequence[Sequence[str]], rng: np.random.Generator, *, foreign: int = 1
) -> list[list[str]]:
    """Candidates for each example: a model's samples, the real line, and `foreign` real lines of other functions.

    A foreign line is as well written as the real one and about something else: such pairs differ in nothing but what
    they say, and teach the reward to look at the signature.
    """
    if foreign > 0 and len(examples) < 2:
        raise ValueError(f"foreign={foreign} needs other functions' lines, and there is {len(examples)} example")
    candidates = []
    for row, (example, drawn) in enumerate(zip(examples, samples, strict=True)):
        # An offset of 1..n-1 can never come back to the example itself.
        others = [(row + int(offset)) % len(examples) for offset in rng.integers(1, len(examples), size=foreign)]
        candidates.append([*drawn, example.summary, *(examples[other].summary for other in others)])
    return candidates


def pairs_jsonl(pairs: Iterable[Pair]) -> str:
    """Pairs as JSON lines: the columns are those that preference datasets have."""
    return "".join(json.dumps(asdict(pair), ensure_ascii=False) + "\n" for pair in pairs)


def _tied(first: tuple[float, str], second: tuple[float, str], margin: float) -> bool:
    # Scores are sums of the same items in floating point; equal ones may differ in the last bits.
    return abs(first[0] - second[0]) <= max(margin, 1e-9)


def _rank(
    signature: str,
    first: tuple[float, str],
    second: tuple[float, str],
    rng: np.random.Generator,
    flip: float,
    margin: float,
) -> Pair | None:
    if _tied(first, second, margin):
        return None
    better, worse = (first[1], second[1]) if first[0] > second[0] else (second[1], first[1])
    flipped = bool(rng.random() < flip)
    chosen, rejected = (worse, better) if flipped else (better, worse)
    return Pair(signature + "\n", chosen, rejected, flipped)


def _spread(ranked: list, count: int) -> list:
    if len(ranked) <= count:
        return ranked
    return [ranked[round(position)] for position in np.linspace(0, len(ranked) - 1, count)]
