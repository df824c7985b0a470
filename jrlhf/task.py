"""The quickstart's task: write a function's summary line from its signature. Texts as token ids, and the rubric."""

import hashlib
from dataclasses import dataclass

from jrlhf.config import DataConfig
from jrlhf.docstrings import Example, load_corpus
from jrlhf.errors import UserError
from jrlhf.rubric import Rubric
from jrlhf.tokenizer import Tokenizer, TokenPairs, encode_pairs, train_tokenizer


@dataclass(frozen=True)
class Split:
    """Examples that fit, with their token ids row by row."""

    examples: tuple[Example, ...]
    tokens: TokenPairs
    dropped: int  # examples too long for max_prompt or max_response


@dataclass(frozen=True)
class Task:
    """What the stages learn from and are measured by."""

    tokenizer: Tokenizer
    rubric: Rubric
    train: Split
    heldout: Split

    def describe(self) -> str:
        """How many examples there are, and how many were left out."""
        dropped = self.train.dropped + self.heldout.dropped
        return (
            f"{len(self.train.examples)} examples to learn from, {len(self.heldout.examples)} held out "
            f"({dropped} longer ones left out)"
        )

    @property
    def fingerprint(self) -> str:
        """One word for all that models are trained on here: another Python may have other docstrings."""
        texts = [self.tokenizer.to_json()]
        texts += [e.prompt + e.summary for split in (self.train, self.heldout) for e in split.examples]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def load_task(data: DataConfig, vocab_size: int) -> Task:
    """Reads the corpus, trains the tokenizer on its train part, and encodes both parts.

    Raises:
        UserError: the corpus cannot be read, or the vocabulary does not suit it.
    """
    try:
        corpus = load_corpus()
        tokenizer = train_tokenizer((e.prompt + e.summary for e in corpus.train), vocab_size)
    except ValueError as error:
        raise UserError(str(error)) from error
    train, heldout = _encode(tokenizer, corpus.train, data), _encode(tokenizer, corpus.heldout, data)
    for name, split in (("train", train), ("held-out", heldout)):
        if len(split.examples) < 2:
            raise UserError(
                f"data.max_prompt={data.max_prompt} and data.max_response={data.max_response} leave "
                f"{len(split.examples)} {name} examples and drop {split.dropped}: raise them"
            )
    return Task(tokenizer, Rubric.from_corpus(corpus.train), train, heldout)


def _encode(tokenizer: Tokenizer, examples: tuple[Example, ...], data: DataConfig) -> Split:
    prompts, summaries = [e.prompt for e in examples], [e.summary for e in examples]
    tokens = encode_pairs(tokenizer, prompts, summaries, data.max_prompt, data.max_response)
    return Split(tuple(examples[row] for row in tokens.index), tokens, len(examples) - len(tokens.index))
