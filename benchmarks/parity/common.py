"""What all sides of the parity ledger share. Runs in the peers' environments, too: the standard library only.

A side is a module that trains from `Job.base`, once for each seed, and writes for each the trained weights in Hugging
Face form and a `Trained`.
"""

import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROWS, SAMPLES, STEPS = 256, 8, 40  # responses of a step, and to each prompt of GRPO; updates
PROMPT, RESPONSE = 6, 4  # tokens: "37+48=", and three digits with the end
LEARNING_RATE, KL_COEF, CLIP = 3e-4, 0.02, 0.2
B1, B2, ADAM_EPS = 0.9, 0.999, 1e-8
GRPO_GRAD_NORM = 1.0  # TRL's PPO does not clip gradients: there nobody does
PPO_KL_COEF, GAE_LAMBDA, VALUE_CLIP = 0.05, 1.0, 0.2
PAD, EOS, CHARACTERS = 0, 1, "0123456789+="  # the characters' ids begin at 2


@dataclass(frozen=True)
class Job:
    """What one process does.

    directory: has `base/`, the supervised model with its tokenizer, and `ALGORITHM-prompts-SEED.json`, the questions
        of every step [STEPS, prompts], in the order in which they are to be asked.
    side: the folder for the results.
    replay: a file with the responses of every step, a line of token ids for each step. Our side writes what it draws
        to it, a peer learns from it in place of what it draws. None: everyone draws.
    """

    directory: str
    side: str
    algorithm: str
    seeds: Sequence[int]
    replay: str | None = None

    @property
    def base(self) -> Path:
        return Path(self.directory) / "base"

    def prompts(self, seed: int) -> list[list[str]]:
        return json.loads((Path(self.directory) / f"{self.algorithm}-prompts-{seed}.json").read_text())

    def model(self, seed: int) -> Path:
        """The folder of the trained weights."""
        return Path(self.directory) / self.side / f"{seed}"


@dataclass(frozen=True)
class Trained:
    """One run. curve: the mean reward of each step's responses. tokens: of responses with their ends, and prompts."""

    seed: int
    curve: Sequence[float]
    tokens: int


def answer(question: str) -> str:
    """Returns the right answer, written from the units on: "58" to "37+48="."""
    first, second = question.rstrip("=").split("+")
    return str(int(first) + int(second))[::-1]


def encode(question: str) -> list[int]:
    return [CHARACTERS.index(character) + 2 for character in question]


def own_tokens(ids: Sequence[int]) -> list[int]:
    """A response's tokens up to its end, which is one of them."""
    ids = list(ids)
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids


def reward(question: str, ids: Sequence[int]) -> float:
    """1 for a response whose text is the right answer, else 0. Pad and end have no text."""
    text = "".join(CHARACTERS[token - 2] for token in own_tokens(ids) if token not in (PAD, EOS))
    return float(text == answer(question))


class Watch:
    """Collects one run's rewards and tokens; `score` is called once a step."""

    def __init__(self) -> None:
        self.curve: list[float] = []
        self._tokens = 0

    def score(self, questions: Sequence[str], responses: Sequence[Sequence[int]]) -> list[float]:
        """The rewards of a step's responses, which may be padded behind their ends."""
        assert len(responses) == len(questions) == ROWS
        rewards = [reward(*pair) for pair in zip(questions, responses, strict=True)]
        self.curve.append(sum(rewards) / len(rewards))
        self._tokens += sum(PROMPT + len(own_tokens(response)) for response in responses)
        return rewards

    def result(self, seed: int) -> Trained:
        assert len(self.curve) == STEPS, f"{len(self.curve)} steps"
        return Trained(seed, self.curve, self._tokens)


def main(train: Callable[[Job, int], Trained], packages: Sequence[str]) -> None:
    """Trains with the seeds of the job that the command line says, and writes result.json into each one's folder."""
    job = Job(**json.loads(sys.argv[1]))
    versions = {name: importlib.metadata.version(name) for name in packages}
    for seed in job.seeds:
        trained = train(job, seed)
        (job.model(seed) / "result.json").write_text(json.dumps({**asdict(trained), "versions": versions}))
        print(f"{job.side} seed {seed}: {trained.curve[0]:.3f} -> {trained.curve[-1]:.3f}", flush=True)
