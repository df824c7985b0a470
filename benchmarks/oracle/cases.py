"""Random inputs of the comparisons: ragged rows, masks with holes, empty rows, extreme ratios, fractional scores."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Arrays = dict[str, np.ndarray]
Kind = Literal["prefix", "gaps", "single"]
SCORES = np.array([0, 0.1, 1 / 3, 0.7, 1, -2.5], np.float32)  # few, so that groups have equal ones


@dataclass(frozen=True)
class Shape:
    """How large a batch is, and how unpleasant."""

    rows: int = 8
    time: int = 9
    kind: Kind = "prefix"  # responses without a hole; with holes; of one token each
    empty: bool = False  # rows without a token that counts
    spread: float = 0.3  # of log-ratios between policies, in nats


def responses(rng: np.random.Generator, shape: Shape) -> Arrays:
    """Lengths and mask. Index 0 never counts; of a batch without empty rows every row counts."""
    rows, time = shape.rows, shape.time
    prompt = rng.integers(1, max(2, time // 2), rows)
    length = np.ones(rows, np.int64) if shape.kind == "single" else 1 + rng.integers(0, time - prompt)
    if shape.empty:
        length[rng.choice(rows, max(1, rows // 3), replace=False)] = 0
    clock = np.arange(time)[None]
    mask = (prompt[:, None] <= clock) & (clock < (prompt + length)[:, None])
    if shape.kind == "gaps":
        first = clock == np.where(mask.any(1), mask.argmax(1), -1)[:, None]
        mask &= (rng.random((rows, time)) < 0.6) | first
    return {"mask": mask, "prompt_lengths": prompt.astype(np.int32), "response_lengths": length.astype(np.int32)}


def batch(seed: int, shape: Shape, *, by_row: bool = False) -> Arrays:
    """All that an algorithm reads of a batch. `by_row`: every token of a row has the row's advantage."""
    rng = np.random.default_rng(seed)
    arrays = responses(rng, shape)
    size = (shape.rows, shape.time)

    def normal(scale: float = 1.0) -> np.ndarray:
        return (rng.normal(size=size) * scale).astype(np.float32)

    old = (-rng.exponential(size=size)).astype(np.float32)
    advantages = normal()
    arrays |= {
        "old_logprobs": old,
        "logprobs": old + normal(shape.spread),
        "ref_logprobs": old + normal(shape.spread),
        "rollout_logprobs": old + normal(shape.spread),
        "entropy": rng.exponential(size=size).astype(np.float32),
        "advantages": np.broadcast_to(advantages[:, :1], size).copy() if by_row else advantages,
        "rewards": normal(),
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "scores": rng.choice(SCORES, shape.rows),
        "baselines": rng.normal(size=shape.rows).astype(np.float32),
    }
    return arrays


def tokens(seed: int, count: int, width: int, vocab: int, *, scale: float = 1.0) -> Arrays:
    """Hidden states whose logits have a standard deviation of about `scale`, targets, and weights of the results."""
    rng = np.random.default_rng(seed)
    return {
        "hidden": (rng.normal(size=(count, width)) * scale / np.sqrt(width)).astype(np.float32),
        "unembedding": rng.normal(size=(vocab, width)).astype(np.float32),
        "targets": rng.integers(0, vocab, count).astype(np.int32),
        "weights": rng.normal(size=count).astype(np.float32),
        "entropy_weights": rng.normal(size=count).astype(np.float32),
    }
