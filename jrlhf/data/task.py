"""The data of a run, whatever they were read from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jrlhf.data.encode import Pairs, Prompts, Sequences
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example, Ids, Response


class PairSampler(Protocol):
    """Gives a task what it needs to make preference pairs: answers of the run's policy, and random numbers."""

    def responses(self, prompts: Sequence[Ids], count: int, purpose: str) -> list[list[Response]]:
        """`count` rounds; each has one response to each prompt. Equal purposes give equal responses."""
        ...

    def rng(self, purpose: str) -> np.random.Generator:
        """Returns a generator that depends on the run's seed and the purpose alone."""
        ...


@dataclass(frozen=True)
class SFTData:
    """Texts to imitate."""

    count: int  # rows to learn from
    # (rows, step) -> their token ids and which of them are learned. The step matters where rows change with time.
    batch: Callable[[np.ndarray, int], Sequences]
    heldout: Sequences  # texts that are only measured; may be none


@dataclass(frozen=True)
class Grades:
    """The scores that a gold measure, which training never sees, gives to answers; and their parts by name."""

    scores: np.ndarray
    items: dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """The data that a run learns from and is measured by; None where no stage needs them."""

    tokenizer: Tokenizer
    fingerprint: str  # one word for all data; a checkpoint that was made with another is refused
    description: str  # for the log
    sft: SFTData | None = None
    # Makes pairs to learn from and held-out pairs. The built-in task samples their answers from the policy.
    pairs: Callable[[PairSampler], tuple[Pairs, Pairs]] | None = None
    prompts: Prompts | None = None  # to answer in reinforcement learning
    heldout: Prompts | None = None  # to validate on
    gold: Callable[[Sequence[Example], Sequence[str]], Grades] | None = None  # a measure that only measures
    chat: bool = False  # whether the model is given conversations, or plain text
    prompt_end: str = ""  # the end of each plain prompt, which a typed line lacks
