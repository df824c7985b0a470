"""What the stages of a run learn from and are measured by, whatever it was read from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jrlhf.data.encode import Ids, Prompts, Sequences
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example, Response


class PairSampler(Protocol):
    """What a task may use to make preference pairs: answers of the run's policy, and random numbers."""

    def responses(self, prompts: Sequence[Ids], count: int, purpose: str) -> list[list[Response]]:
        """`count` rounds; each has one response to each prompt. Equal purposes give equal responses."""
        ...

    def rng(self, purpose: str) -> np.random.Generator:
        """A generator that depends on the run's seed and the purpose alone."""
        ...


@dataclass(frozen=True)
class SFTData:
    """Texts to imitate.

    count: rows to learn from.
    batch: (rows, step) -> their token ids and which of them are learnt. The step matters where rows change with time.
    heldout: texts that are only measured; may be none.
    """

    count: int
    batch: Callable[[np.ndarray, int], Sequences]
    heldout: Sequences


@dataclass(frozen=True)
class Pairs:
    """Answers of which an annotator preferred the first: whole sequences of token ids, prompt and answer together.

    prompt_lengths: tokens of each pair's prompt, with which both of its sequences begin.
    clear: in held-out pairs, whether the annotator could tell the two apart; None: in all of them.
    rows: the pairs as rows of a dataset, where they were sampled from the policy: a run keeps them.
    """

    chosen: Sequence[Ids]
    rejected: Sequence[Ids]
    prompt_lengths: Sequence[int]
    clear: np.ndarray | None = None
    rows: Sequence[Mapping[str, Any]] = ()

    def __len__(self) -> int:
        return len(self.chosen)


@dataclass(frozen=True)
class Grades:
    """What a measure that training never sees says of some answers: one number each, and what it is made of."""

    scores: np.ndarray
    items: dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """What a run learns from and is measured by; None where no stage needs it.

    fingerprint: one word for all of it; a checkpoint that was made with another is refused.
    description: a line for the log.
    pairs: makes pairs to learn from and held-out pairs. The built-in task samples their answers from the policy.
    prompts, heldout: to answer in reinforcement learning, and to validate on.
    gold: a measure that only measures; None where the run's own rewards are all there is.
    chat: whether the model is given conversations, or plain text.
    """

    tokenizer: Tokenizer
    fingerprint: str
    description: str
    sft: SFTData | None = None
    pairs: Callable[[PairSampler], tuple[Pairs, Pairs]] | None = None
    prompts: Prompts | None = None
    heldout: Prompts | None = None
    gold: Callable[[Sequence[Example], Sequence[str]], Grades] | None = None
    chat: bool = False
