"""The built-in task `arithmetic` as token ids: each character is a token."""

from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from jrlhf.config.schema import ArithmeticData, Config
from jrlhf.data.task import SFTData, Task
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example, Prompts, Sequences
from jrlhf.errors import UserError
from jrlhf.run.files import digest_of
from jrlhf.tasks import sequences
from jrlhf.tasks.arithmetic.problems import Terms, draw_problems, question, worked_answer, written

PAD, EOS, CHARACTERS = "<pad>", "<eos>", "0123456789+="
MOST_TOKENS = 2 * 10**7  # all sums are written before a run begins, in half a minute


def make_tokenizer() -> Tokenizer:
    """Makes the vocabulary: `<pad>` = 0, `<eos>` = 1, then the ten digits, + and =."""
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *CHARACTERS))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PAD, EOS])
    return Tokenizer(backend, eos_ids=(vocabulary[EOS],), pad_id=vocabulary[PAD])


def load_task(config: Config) -> Task:
    """Draws the sums of `config.data` with the run's seed. No held-out sum is trained on, in any order of its numbers.
    Examples have the column `answer`, the sum in the form of answers, for reward functions.
    """
    data = config.data
    assert isinstance(data, ArithmeticData)
    tokenizer, units_first = make_tokenizer(), data.units_first
    _check_sizes(config.model.vocab_size, data, tokenizer)
    sizes = {"terms": data.terms, "digits": data.digits, "seed": config.seed}
    try:
        learned, heldout = draw_problems(data.problems, data.heldout_rows, **sizes)
    except ValueError as error:
        raise UserError(
            f"data.problems={data.problems} with data.heldout_rows={data.heldout_rows}: {error}; lower them, "
            "or raise data.digits or data.terms"
        ) from error
    shown = learned[: data.demonstrations]

    def answered(sums: Sequence[Terms], forgotten: float, step: int) -> Sequences:
        """Joins question, answer and end to one text; all tokens after the question are learned."""
        rng = np.random.default_rng((config.seed, step))
        questions = tokenizer.encode_batch([question(terms) for terms in sums])
        texts = [worked_answer(terms, forgotten, rng, units_first=units_first) for terms in sums]
        answers = tokenizer.encode_batch(texts)
        return sequences((tuple(q), (*a, tokenizer.eos_id)) for q, a in zip(questions, answers, strict=True))

    def prompts(sums: Sequence[Terms]) -> Prompts:
        texts = tuple(question(terms) for terms in sums)
        completions = (worked_answer(terms, units_first=units_first) for terms in sums)
        columns = ({"answer": written(sum(terms), units_first)} for terms in sums)
        rows = zip(texts, completions, columns, strict=True)
        examples = tuple(Example(prompt, completion, columns=answer) for prompt, completion, answer in rows)
        return Prompts(ids=tuple(map(tuple, tokenizer.encode_batch(texts))), texts=texts, examples=examples)

    right = answered((*learned, *heldout), 0.0, 0)
    prompt, response = right.prompt_lengths[0], max(map(len, right.ids)) - right.prompt_lengths[0]
    if prompt > data.max_prompt or response > data.max_response:
        raise UserError(
            f"data.max_prompt={data.max_prompt} and data.max_response={data.max_response} are too short for sums of "
            f"{prompt} tokens and answers of {response}: raise them"
        )
    texts = [" ".join(map(question, part)) for part in (learned, heldout, shown)]
    return Task(
        tokenizer=tokenizer,
        fingerprint=digest_of([tokenizer.to_json(), f"{data.forgotten} {units_first}", *texts]),
        description=(
            f"{len(learned)} sums to learn from, {len(shown)} of them with worked answers, {len(heldout)} held out"
        ),
        sft=SFTData(
            count=len(shown),
            batch=lambda rows, step: answered([shown[row] for row in rows], data.forgotten, step),
            heldout=answered(heldout, data.forgotten, 0),
        ),
        prompts=prompts(learned),
        heldout=prompts(heldout),
    )


def _check_sizes(vocab_size: int, data: ArithmeticData, tokenizer: Tokenizer) -> None:
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size} is too small: data.source=arithmetic has {tokenizer.vocab_size} tokens, "
            "raise it"
        )
    # The lengths of a question, of the shortest answer and of its end.
    tokens = data.terms * (data.digits + 1) + (data.digits + 1) * data.terms * (data.terms - 1) // 2
    if (data.problems + data.heldout_rows) * tokens > MOST_TOKENS:
        raise UserError(
            f"data.problems={data.problems} with data.heldout_rows={data.heldout_rows} are sums of data.terms="
            f"{data.terms}, {tokens} tokens each, and at most {MOST_TOKENS} tokens are written in all: lower them"
        )
