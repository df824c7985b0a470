"""Makes preference pairs: samples of the policy and real lines, ranked by an annotator that makes some mistakes.

The annotator is a known rubric (`rubric.py`), so that the quality of the learned reward can be measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from jrlhf.config.schema import DocstringsData
from jrlhf.data.order import Order
from jrlhf.data.task import PairSampler
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Ids, Pairs
from jrlhf.errors import UserError
from jrlhf.tasks.docstrings.corpus import DocumentedFunction
from jrlhf.tasks.docstrings.rubric import Rubric
from jrlhf.tasks.docstrings.vocabulary import Split


class Pair(NamedTuple):
    """One comparison."""

    prompt: str
    chosen: str
    rejected: str
    flipped: bool  # the annotator made a mistake: by the rubric, `rejected` is the better one
    gap: float  # difference of the two scores


@dataclass(frozen=True)
class Annotator:
    """Makes preference pairs of a policy's answers: pairs to train on, and held-out pairs."""

    data: DocstringsData
    seed: int
    tokenizer: Tokenizer
    rubric: Rubric
    train: Split
    heldout: Split

    def collect(self, sampler: PairSampler) -> tuple[Pairs, Pairs]:
        """Returns pairs to train on, some with the wrong label, and held-out pairs in the rubric's own order."""
        section = self.data.annotator
        train = self._pairs(sampler, self.train, section.prompts, "preferences", section.label_flip, section.margin)
        # Held-out pairs keep all but exact ties: the accuracy is measured with and without the close ones.
        heldout = self._pairs(sampler, self.heldout, section.heldout_prompts, "heldout preferences", 0.0, 0.0)
        assert heldout.clear is not None
        if not len(train) or not heldout.clear.any():
            raise UserError(
                f"data.annotator.margin={section.margin:g} leaves {len(train)} pairs to learn from and {len(heldout)} "
                "to measure with: lower it, or raise data.annotator.prompts and data.annotator.heldout_prompts"
            )
        return train, heldout

    def _pairs(
        self, sampler: PairSampler, split: Split, prompts: int, purpose: str, flip: float, margin: float
    ) -> Pairs:
        """Ranks samples and real lines for `prompts` shuffled prompts of a split; drops pairs that are too long."""
        section, rng = self.data.annotator, sampler.rng(purpose)
        rows = Order(len(split.examples), min(prompts, len(split.examples)), self.seed).draw(0)
        examples, prompt_ids = [split.examples[row] for row in rows], [split.prompts[row] for row in rows]
        ids_of = {example.prompt: ids for example, ids in zip(examples, prompt_ids, strict=True)}
        texts: list[list[str]] = [[] for _ in examples]
        sampled: dict[tuple[str, str], Ids] = {}
        for responses in sampler.responses(prompt_ids, section.samples_per_prompt, purpose):
            for example, answers, response in zip(examples, texts, responses, strict=True):
                answers.append(response.text.strip())
                sampled.setdefault((example.prompt, answers[-1]), response.ids)
        candidates = with_real_lines(examples, texts, rng, foreign=section.foreign_lines)
        signatures = [example.signature for example in examples]
        pairs = build_pairs(signatures, candidates, self.rubric, rng, flip=flip, margin=margin)

        def encode(prompt: str, text: str) -> Ids:
            # A sampled answer keeps its tokens: its text may be tokenized in another way.
            return sampled.get((prompt, text)) or (*self.tokenizer.encode(text), self.tokenizer.eos_id)

        encoded = [(pair, encode(pair.prompt, pair.chosen), encode(pair.prompt, pair.rejected)) for pair in pairs]
        fitting = [
            (ids_of[pair.prompt] + chosen, ids_of[pair.prompt] + rejected, len(ids_of[pair.prompt]), pair.gap)
            for pair, chosen, rejected in encoded
            if max(len(chosen), len(rejected)) <= self.data.max_response
        ]
        chosen, rejected, lengths, gaps = zip(*fitting, strict=True) if fitting else ((), (), (), ())
        rows = [{key: value for key, value in pair._asdict().items() if key != "gap"} for pair in pairs]
        return Pairs(chosen, rejected, lengths, clear=np.array(gaps) > section.margin, rows=rows)


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
    """Ranks the candidates of each signature against each other, as InstructGPT did (Ouyang et al. 2022, section 3.4).

    If a signature has more pairs than `per_prompt`, pairs are chosen evenly from the smallest to the largest difference
    in score: from distant pairs the reward model learns coarse features, from close ones fine features.

    candidates: the responses to each signature; repeated ones count once.
    rng: gives one random number per pair.
    flip: probability of the wrong label; 0: the rubric's own order.
    margin: scores that differ by at most this are a tie, which makes no pair.
    """
    pairs: list[Pair] = []
    for signature, responses in zip(signatures, candidates, strict=True):
        scored = [(rubric.score(signature, response), response) for response in dict.fromkeys(responses)]
        compared = [(abs(first[0] - second[0]), first, second) for first, second in combinations(scored, 2)]
        # Scores are sums of the same items in floating point; equal ones may differ in the last bits.
        compared = [comparison for comparison in compared if comparison[0] > max(margin, 1e-9)]
        compared.sort(key=lambda comparison: comparison[0])
        if len(compared) > per_prompt:
            compared = [compared[round(position)] for position in np.linspace(0, len(compared) - 1, per_prompt)]
        for gap, first, second in compared:
            better, worse = (first[1], second[1]) if first[0] > second[0] else (second[1], first[1])
            flipped = bool(rng.random() < flip)
            chosen, rejected = (worse, better) if flipped else (better, worse)
            pairs.append(Pair(signature + "\n", chosen, rejected, flipped, gap))
    return pairs


def with_real_lines(
    examples: Sequence[DocumentedFunction],
    samples: Sequence[Sequence[str]],
    rng: np.random.Generator,
    *,
    foreign: int = 1,
) -> list[list[str]]:
    """Returns each example's candidates: a model's samples, the real line, and `foreign` real lines of other functions.

    A foreign line is as well written as the real one but about something else. Such pairs differ only in content, so
    the reward model learns to read the signature.
    """
    candidates = []
    for row, (example, drawn) in enumerate(zip(examples, samples, strict=True)):
        # An offset of 1..n-1 can never come back to the example itself.
        others = [(row + int(offset)) % len(examples) for offset in rng.integers(1, len(examples), size=foreign)]
        candidates.append([*drawn, example.summary, *(examples[other].summary for other in others)])
    return candidates
