"""The built-in task: write a function's summary line from its signature. Texts as token ids, and the rubric."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jrlhf.config.schema import Config, DataConfig, DocstringsData
from jrlhf.data.encode import Prompts, Sequences
from jrlhf.data.task import Grades, SFTData, Task
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example
from jrlhf.errors import UserError
from jrlhf.tasks.docstrings import corpus as docstrings
from jrlhf.tasks.docstrings.annotated import collect_pairs
from jrlhf.tasks.docstrings.corpus import load_corpus
from jrlhf.tasks.docstrings.renaming import rename, renaming_words
from jrlhf.tasks.docstrings.rubric import Rubric
from jrlhf.tasks.docstrings.vocabulary import TokenPairs, encode_pairs, train_tokenizer


@dataclass(frozen=True)
class Split:
    """Examples that fit, with their token ids row by row."""

    examples: tuple[docstrings.Example, ...]
    tokens: TokenPairs
    dropped: int  # examples too long for max_prompt or max_response


def load_task(config: Config) -> Task:
    """Reads the corpus, trains the tokenizer on its train part, and encodes both parts.

    Raises:
        UserError: the corpus cannot be read, or the vocabulary does not suit it.
    """
    data = config.data
    try:
        corpus = load_corpus()
        tokenizer = train_tokenizer((e.prompt + e.summary for e in corpus.train), config.model.vocab_size)
    except ValueError as error:
        raise UserError(str(error)) from error
    train, heldout = _encode(tokenizer, corpus.train, data), _encode(tokenizer, corpus.heldout, data)
    for name, split in (("train", train), ("held-out", heldout)):
        if len(split.examples) < 2:
            raise UserError(
                f"data.max_prompt={data.max_prompt} and data.max_response={data.max_response} leave "
                f"{len(split.examples)} {name} examples and drop {split.dropped}: raise them"
            )
    rubric = Rubric.from_corpus(corpus.train)
    vocabulary = renaming_words(train.examples)
    return Task(
        tokenizer=tokenizer,
        fingerprint=_fingerprint(tokenizer, train, heldout),
        description=(
            f"{len(train.examples)} examples to learn from, {len(heldout.examples)} held out "
            f"({train.dropped + heldout.dropped} longer ones left out)"
        ),
        sft=SFTData(
            count=len(train.examples),
            batch=partial(_renamed, config, tokenizer, train.examples, vocabulary),
            heldout=_sequences(heldout.tokens),
        ),
        pairs=partial(collect_pairs, rubric, train, heldout),
        prompts=_prompts(train),
        heldout=_prompts(heldout),
        gold=partial(_gold, rubric),
    )


def _encode(tokenizer: Tokenizer, examples: tuple[docstrings.Example, ...], data: DataConfig) -> Split:
    prompts, summaries = [e.prompt for e in examples], [e.summary for e in examples]
    tokens = encode_pairs(tokenizer, prompts, summaries, data.max_prompt, data.max_response)
    return Split(tuple(examples[row] for row in tokens.index), tokens, len(examples) - len(tokens.index))


def _fingerprint(tokenizer: Tokenizer, *splits: Split) -> str:
    """One word for all that models are trained on here: another Python may have other docstrings."""
    texts = [tokenizer.to_json()]
    texts += [e.prompt + e.summary for split in splits for e in split.examples]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _prompts(split: Split) -> Prompts:
    texts = tuple(example.prompt for example in split.examples)
    rows = tuple(
        Example(prompt=e.prompt, completion=e.summary, columns={"signature": e.signature}) for e in split.examples
    )
    return Prompts(ids=split.tokens.prompts, texts=texts, examples=rows, filtered=split.dropped, truncated=0)


def _sequences(pairs: TokenPairs) -> Sequences:
    """Prompt and response as one text, of which the response is learnt."""
    both = list(zip(pairs.prompts, pairs.responses, strict=True))
    return Sequences(
        ids=tuple(prompt + response for prompt, response in both),
        learn=tuple((False,) * len(prompt) + (True,) * len(response) for prompt, response in both),
        prompt_lengths=tuple(len(prompt) for prompt in pairs.prompts),
        examples=(),
    )


def _renamed(
    config: Config,
    tokenizer: Tokenizer,
    every: Sequence[docstrings.Example],
    vocabulary: Sequence[str],
    rows: np.ndarray,
    step: int,
) -> Sequences:
    """The examples' token ids. A share of them speak of other things than in the corpus, new ones each time.

    An example that would no longer fit keeps its own words.
    """
    data, examples = config.data, [every[row] for row in rows]
    assert isinstance(data, DocstringsData)
    rng = np.random.default_rng((config.seed, step))
    changed = [rename(example, vocabulary, rng) if rng.random() < data.renaming else example for example in examples]
    both = [*changed, *examples]
    pairs = encode_pairs(
        tokenizer, [e.prompt for e in both], [e.summary for e in both], data.max_prompt, data.max_response
    )
    place = {index: row for row, index in enumerate(pairs.index)}
    kept = [place.get(row, place[row + len(examples)]) for row in range(len(examples))]
    return _sequences(
        TokenPairs(
            index=tuple(range(len(kept))),
            prompts=tuple(pairs.prompts[row] for row in kept),
            responses=tuple(pairs.responses[row] for row in kept),
        )
    )


def _gold(rubric: Rubric, examples: Sequence[Example], texts: Sequence[str]) -> Grades:
    """The rubric's verdict on each answer."""
    both = [(e.columns["signature"], text.strip()) for e, text in zip(examples, texts, strict=True)]
    items = [rubric.items(signature, text) for signature, text in both]
    return Grades(
        scores=np.array([rubric.score(signature, text) for signature, text in both]),
        items={name: np.array([each[name] for each in items]) for name in items[0]},
    )
