"""The built-in task `docstrings`, to write a function's summary line from its signature: token ids and rubric."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from jrlhf.config.schema import Config, DocstringsData
from jrlhf.data.task import Grades, SFTData, Task
from jrlhf.data.types import Example, Prompts, Sequences
from jrlhf.errors import UserError, user_errors
from jrlhf.run.files import digest_of
from jrlhf.tasks import sequences
from jrlhf.tasks.docstrings.annotator import Annotator
from jrlhf.tasks.docstrings.corpus import load_corpus
from jrlhf.tasks.docstrings.renaming import rename, renaming_words
from jrlhf.tasks.docstrings.rubric import Rubric
from jrlhf.tasks.docstrings.vocabulary import Split, encode_examples, encode_split, fits, train_tokenizer

PROMPT_END = "\n"  # ends each prompt; a typed line lacks it


def load_task(config: Config) -> Task:
    """Reads the corpus, trains the tokenizer on its train part, and encodes both parts."""
    data = config.data
    assert isinstance(data, DocstringsData)
    with user_errors():
        corpus = load_corpus()
        tokenizer = train_tokenizer((e.prompt + e.summary for e in corpus.train), config.model.vocab_size)
    train, heldout = (encode_split(tokenizer, part, data) for part in (corpus.train, corpus.heldout))
    for name, split in (("train", train), ("held-out", heldout)):
        if len(split.examples) < 2:
            raise UserError(
                f"data.max_prompt={data.max_prompt} and data.max_response={data.max_response} leave "
                f"{len(split.examples)} {name} examples and drop {split.dropped}: raise them"
            )
    rubric, vocabulary = Rubric.from_corpus(corpus.train), renaming_words(train.examples)

    def renamed(rows: np.ndarray, step: int) -> Sequences:
        """Returns the examples' token ids. In a part of them common words are replaced, by new ones at each step.

        An example that would become too long keeps its own words.
        """
        rng, chosen = np.random.default_rng((config.seed, step)), [train.examples[row] for row in rows]
        changed = [rename(example, vocabulary, rng) if rng.random() < data.renaming else example for example in chosen]
        return sequences(
            texts if fits(*texts, data) else (train.prompts[row], train.responses[row])
            for texts, row in zip(encode_examples(tokenizer, changed), rows, strict=True)
        )

    texts = [example.prompt + example.summary for example in (*train.examples, *heldout.examples)]
    return Task(
        tokenizer=tokenizer,
        fingerprint=digest_of([tokenizer.to_json(), *texts]),  # another Python may have other docstrings
        description=(
            f"{len(train.examples)} examples to learn from, {len(heldout.examples)} held out "
            f"({train.dropped + heldout.dropped} longer ones left out)"
        ),
        sft=SFTData(
            count=len(train.examples),
            batch=renamed,
            heldout=sequences(zip(heldout.prompts, heldout.responses, strict=True)),
        ),
        pairs=Annotator(data, config.seed, tokenizer, rubric, train, heldout).collect,
        prompts=_prompts(train),
        heldout=_prompts(heldout),
        gold=partial(_gold, rubric),
        prompt_end=PROMPT_END,
    )


def _prompts(split: Split) -> Prompts:
    rows = tuple(Example(e.prompt, e.summary, columns={"signature": e.signature}) for e in split.examples)
    return Prompts(split.prompts, tuple(e.prompt for e in split.examples), examples=rows, filtered=split.dropped)


def _gold(rubric: Rubric, examples: Sequence[Example], texts: Sequence[str]) -> Grades:
    """Returns the rubric's scores of the answers."""
    both = [(e.columns["signature"], text.strip()) for e, text in zip(examples, texts, strict=True)]
    items = [rubric.items(signature, text) for signature, text in both]
    return Grades(
        scores=np.array([rubric.score(signature, text) for signature, text in both]),
        items={name: np.array([marks[name] for marks in items]) for name in items[0]},
    )
