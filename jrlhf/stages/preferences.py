"""Preference pairs, for the stages that learn from them: from a dataset, or sampled from the policy by the task."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Shaped

from jrlhf.data.batches import key_for, pad_rows, put_rows
from jrlhf.data.types import Ids, Pairs, Response
from jrlhf.errors import Preempted
from jrlhf.roles.model import Model
from jrlhf.run.contents import PREFERENCES
from jrlhf.run.files import to_json
from jrlhf.stages.context import Context


def collect_pairs(context: Context, policy: Model) -> tuple[Pairs, Pairs]:
    """The task's pairs to learn from, and its held-out pairs. Sampled pairs are saved in preferences.jsonl."""
    assert context.task.pairs is not None
    train, heldout = context.task.pairs(_PolicySampler(context, policy))
    if train.rows:
        context.run.write(PREFERENCES, b"".join(map(to_json, train.rows)))
    return train, heldout


def put_pairs(context: Context, pairs: Pairs, rows: np.ndarray, mesh: Mesh) -> list[Array]:
    """Puts on a mesh: tokens and lengths of chosen answers, the same of rejected ones, and the prompts' lengths."""
    sides = pairs.chosen, pairs.rejected
    chosen, rejected = (pad_rows([side[row] for row in rows], context.length) for side in sides)
    prompt_lengths = np.array([pairs.prompt_lengths[row] for row in rows], np.int32)
    return put_rows([*chosen, *rejected, prompt_lengths], mesh)


def accuracies(right: Shaped[np.ndarray, "N"], clear: Bool[np.ndarray, "N"] | None) -> dict[str, float]:
    """The share of held-out pairs whose better answer is preferred (`right`), and the number of these pairs.

    clear: mask of the pairs that count (gold gap above the margin). If no pair counts, there is no share. With `clear`,
    the share of all pairs is also returned.
    """
    every = {} if clear is None else {"eval_accuracy_with_close_pairs": float(right.mean())}
    counted = right if clear is None else right[clear]
    shares = {"eval_accuracy": float(counted.mean())} if len(counted) else {}
    return shares | {"eval_pairs": len(counted)} | every


@dataclass(frozen=True)
class _PolicySampler:
    """Answers a task's prompts with a policy, with the settings of rollouts."""

    context: Context
    policy: Model

    def responses(self, prompts: Sequence[Ids], count: int, purpose: str) -> list[list[Response]]:
        """Returns `count` rounds, each with one response to every prompt."""
        context, rows, rounds = self.context, len(prompts), []
        for number in range(count):
            context.console.line(f"sampling {purpose}: {number * rows} of {count * rows} responses")
            if context.preemption.agreed():
                raise Preempted("stopped while preferences were sampled; earlier stages are saved")
            rounds.append(context.sampler.sample(self.policy, prompts, key_for(context.config.seed, purpose, number)))
        return rounds

    def rng(self, purpose: str) -> np.random.Generator:
        """A generator that depends on the run's seed and the purpose alone."""
        return np.random.default_rng((self.context.config.seed, zlib.crc32(purpose.encode())))
