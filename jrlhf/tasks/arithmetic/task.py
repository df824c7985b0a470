"""The built-in task `arithmetic` as token ids: a character is a token."""

import hashlib
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from jrlhf.config.schema import ArithmeticData, Config
from jrlhf.data.encode import Ids, Prompts, Sequences
from jrlhf.data.task import SFTData, Task
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example
from jrlhf.errors import UserError
from jrlhf.tasks.arithmetic.problems import Terms, draw_problems, question, worked_answer, written

PAD, EOS, CHARACTERS = "<pad>", "<eos>", "0123456789+="


def make_tokenizer() -> Tokenizer:
    """`<pad>` = 0, `<eos>` = 1, then the ten digits, + and =."""
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *CHARACTERS))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PAD, EOS])
    return Tokenizer(backend, eos_ids=(vocabulary[EOS],), pad_id=vocabulary[PAD])


def load_task(config: Config) -> Task:
    """Draws the sums of `config.data` with the run's seed. None that is held out is learnt from, in any order of
    its numbers. Examples have the column `answer`, the sum as answers write it, for reward functions.

    Raises:
        UserError: there are fewer such sums, or they do not fit the model or the limits on lengths.
    """
    data = config.data
    assert isinstance(data, ArithmeticData)
    tokenizer = make_tokenizer()
    if config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is too small: data.source=arithmetic has "
            f"{tokenizer.vocab_size} tokens, raise it"
        )
    try:
        learnt, heldout = draw_problems(
            data.problems, data.heldout_rows, terms=data.terms, digits=data.digits, seed=config.seed
        )
    except ValueError as error:
        raise UserError(
            f"data.problems={data.problems} with data.heldout_rows={data.heldout_rows}: {error}; lower them, "
            "or raise data.digits or data.terms"
        ) from error
    shown = learnt[: data.demonstrations]
    right = _sequences(tokenizer, (*learnt, *heldout), data.units_first)
    _check_lengths(data, right.ids, right.prompt_lengths[0])

    def demonstrated(sums: Sequence[Terms], step: int) -> Sequences:
        rng = np.random.default_rng((config.seed, step))
        return _sequences(tokenizer, sums, data.units_first, data.forgotten, rng)

    return Task(
        tokenizer=tokenizer,
        fingerprint=_fingerprint(tokenizer, f"{data.forgotten} {data.units_first}", learnt, heldout, shown),
        description=(
            f"{len(learnt)} sums to learn from, {len(shown)} of them with worked answers, {len(heldout)} held out"
        ),
        sft=SFTData(
            count=len(shown),
            batch=lambda rows, step: demonstrated([shown[row] for row in rows], step),
            heldout=demonstrated(heldout, 0),
        ),
        prompts=_prompts(tokenizer, learnt, data.units_first),
        heldout=_prompts(tokenizer, heldout, data.units_first),
    )


def _example(terms: Terms, units_first: bool) -> Example:
    answer = {"answer": written(sum(terms), units_first)}
    return Example(question(terms), completion=worked_answer(terms, units_first=units_first), columns=answer)


def _prompts(tokenizer: Tokenizer, sums: Sequence[Terms], units_first: bool) -> Prompts:
    texts = [question(terms) for terms in sums]
    ids = tuple(tuple(row) for row in tokenizer.encode_batch(texts))
    return Prompts(ids=ids, texts=tuple(texts), examples=tuple(_example(terms, units_first) for terms in sums))


def _sequences(
    tokenizer: Tokenizer,
    sums: Sequence[Terms],
    units_first: bool,
    forgotten: float = 0.0,
    rng: np.random.Generator | None = None,
) -> Sequences:
    """Question, answer and end as one text, of which all behind the question is learnt."""
    questions = tokenizer.encode_batch([question(terms) for terms in sums])
    worked = tokenizer.encode_batch([worked_answer(terms, forgotten, rng, units_first=units_first) for terms in sums])
    answers = [[*answer, tokenizer.eos_id] for answer in worked]
    both = list(zip(questions, answers, strict=True))
    return Sequences(
        ids=tuple((*asked, *answer) for asked, answer in both),
        learn=tuple((False,) * len(asked) + (True,) * len(answer) for asked, answer in both),
        prompt_lengths=tuple(len(asked) for asked, _ in both),
    )


def _check_lengths(data: ArithmeticData, texts: Sequence[Ids], prompt: int) -> None:
    response = max(map(len, texts)) - prompt
    if prompt > data.max_prompt or response > data.max_response:
        raise UserError(
            f"data.max_prompt={data.max_prompt} and data.max_response={data.max_response} are too short for sums of "
            f"{prompt} tokens and answers of {response}: raise them"
        )


def _fingerprint(tokenizer: Tokenizer, settings: str, *parts: Sequence[Terms]) -> str:
    words = [tokenizer.to_json(), settings, *(" ".join(map(question, part)) for part in parts)]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
