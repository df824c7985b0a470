"""`Task`: the data of a run, independent of their source."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example, Ids, Pairs, Prompts, Response, Sequences


class PairSampler(Protocol):
    """The interface with which a task makes preference pairs: answers of the run's policy, and random numbers."""

    def responses(self, prompts: Sequence[Ids], count: int, purpose: str) -> list[list[Response]]:
        """Returns `count` rounds, each with one response to every prompt. Equal purposes give equal responses."""
        ...

    def rng(self, purpose: str) -> np.random.Generator:
        """Returns a generator that depends on the run's seed and the purpose alone."""
        ...


@dataclass(frozen=True)
class SFTData:
    """Texts to imitate."""

    count: int  # number of training rows
    # (rows, step) -> their token ids and the tokens to learn. Rows may depend on the step.
    batch: Callable[[np.ndarray, int], Sequences]
    heldout: Sequences  # texts for evaluation only; may be empty


@dataclass(frozen=True)
class Grades:
    """Scores of answers by a gold measure, which training never sees; and their parts by name."""

    scores: np.ndarray
    items: dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """The data for training and evaluation of a run. Fields are None if no stage needs them."""

    tokenizer: Tokenizer
    fingerprint: str  # a digest of all data; a checkpoint with another one is refused
    description: str  # for the log
    sft: SFTData | None = None
    # Makes pairs to learn from and held-out pairs. The built-in task samples their answers from the policy.
    pairs: Callable[[PairSampler], tuple[Pairs, Pairs]] | None = None
    prompts: Prompts | None = None  # for reinforcement learning
    heldout: Prompts | None = None  # for validation
    gold: Callable[[Sequence[Example], Sequence[str]], Grades] | None = None  # a measure for evaluation only
    chat: bool = False  # True: the model gets conversations; False: plain text
    prompt_end: str = ""  # the white space at the end of every plain prompt, which a typed line lacks
