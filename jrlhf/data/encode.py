"""Encodes examples as token ids: prompts, sequences for supervised learning, and pairs of answers."""

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from jrlhf.data.chat import render_chat, template_variables
from jrlhf.data.read import Dataset
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Conversation, Example, Ids, Pairs, Prompts, Sequences, Text
from jrlhf.errors import UserError

Overlong = Literal["error", "filter", "truncate_left"]


class _Overlong(Exception):
    """A row is too long. Who encodes all rows counts them."""

    def __init__(self, sentence: str, tokens: int):
        super().__init__(sentence)
        self.tokens = tokens


@dataclass(frozen=True)
class Encoding:
    """Rules for encoding examples as token ids.

    overlong: what happens to a row that is too long. "error": it is refused; "filter": it is left out; "truncate_left":
        the beginning of its prompt, or of a whole conversation or text, is cut, except the token that begins each text.
    chat: plain text becomes the user's turn of a conversation.
    system: a system message for every conversation that has none.
    """

    tokenizer: Tokenizer
    overlong: Overlong = "error"
    chat: bool = False
    system: str | None = None

    def prompts(self, data: Dataset | Sequence[Example], max_prompt: int) -> Prompts:
        """Prompts of at most `max_prompt` tokens: the rendered conversation up to the answer, or the plain text.

        A conversation that ends with the assistant's words is continued there. For a dataset of whole conversations
        ("messages") the last answer is left out.
        """
        whole = isinstance(data, Dataset) and data.shape == "messages"

        def encode(example: Example, counts: Counter[str]) -> tuple[Ids, str, Example] | None:
            example = _without_answer(example) if whole else example
            text, ids = self.prompt(example)
            if not ids:
                raise UserError("the prompt is empty: remove the row")
            fitting = self._fit(ids, 0, max_prompt, counts)
            return None if fitting is None else (fitting, text, example)

        (ids, texts, examples), counts = self._encoded(data, encode, max_prompt)
        return Prompts(ids, texts, examples=examples, **counts)

    def sequences(self, data: Dataset | Sequence[Example], max_length: int) -> Sequences:
        """Returns sequences of at most `max_length` tokens to imitate.

        The tokens to learn are: the completion and its end, if there is one; in a conversation without a completion,
        every assistant turn and its end; in a text, everything and its end.

        A prompt has exactly the tokens of `prompts`. An answer ends with an end-of-text token: the template's, after
        which everything is dropped, or else the tokenizer's. "truncate_left" never cuts a completion.
        """

        def encode(example: Example, counts: Counter[str]) -> tuple[Ids, tuple[bool, ...], int, Example] | None:
            end: Ids = ()
            if example.chosen is not None:
                raise UserError("it has two answers to compare: name the dataset in data.preferences.path")
            if example.completion is None:
                ids, learn = self._turns(example)
            elif example.prompt == "":
                ids = _ended(self.tokenizer, self.tokenizer.encode_prompt(str(example.completion)))
                learn = (False,) + (True,) * (len(ids) - 1)
            else:
                ids, (end,) = self._with_answers(example, example.completion)
                learn = (False,) * len(ids) + (True,) * len(end)
            begin = self._fit(ids, len(end), max_length, counts)
            if begin is None:
                return None
            row = begin + end
            learn = (False, *learn[len(learn) - len(row) + 1 :])  # cut where the row was
            if not any(learn):
                raise UserError("there is nothing to learn: remove the row, or add the assistant's answer")
            return row, learn, learn.index(True), example

        (ids, learn, lengths, examples), counts = self._encoded(data, encode, max_length)
        return Sequences(ids, learn, lengths, examples=examples, **counts)

    def pairs(self, data: Dataset | Sequence[Example], max_length: int) -> Pairs:
        """Returns pairs of whole sequences, each of at most `max_length` tokens, of which the first is preferred.

        Rows whose two answers have the same tokens are left out, because nothing can be learned from them.
        """

        def encode(example: Example, counts: Counter[str]) -> tuple[Ids, Ids, int, Example] | None:
            if example.chosen is None or example.rejected is None:
                raise UserError("there are no two answers to compare: add chosen and rejected, or remove the row")
            prompt, (chosen, rejected) = self._with_answers(example, example.chosen, example.rejected)
            if chosen == rejected:
                counts["same"] += 1
                return None
            begin = self._fit(prompt, max(len(chosen), len(rejected)), max_length, counts)
            return None if begin is None else (begin + chosen, begin + rejected, len(begin), example)

        (chosen, rejected, lengths, examples), counts = self._encoded(data, encode, max_length)
        return Pairs(chosen, rejected, lengths, examples=examples, **counts)

    def _encoded(
        self, data: Dataset | Sequence[Example], encode: Callable[[Example, Counter[str]], tuple | None], limit: int
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the columns of the encoded rows, and the numbers of rows that were left out or cut.

        The numbers have the names of fields of `EncodedRows` and `Pairs`.
        """
        whole = isinstance(data, Dataset)
        places = data.places if whole else [f"row {row}" for row in range(1, len(data) + 1)]
        rows, counts, long, first = [], Counter[str](), list[int](), ""
        prefix = self.tokenizer.prefix_ids
        for place, example in zip(places, data.examples if whole else data, strict=True):
            try:
                row = encode(self._as_conversation(self._with_prompt(example)), counts)
            except _Overlong as error:
                row, first = None, first or f"{place}: {error}"
                long.append(error.tokens)
            except UserError as error:
                raise UserError(f"{place}: {error}") from error
            if row is not None:
                rows.append(row)
                counts["twice"] += len(prefix) > 0 and row[0][: 2 * len(prefix)] == 2 * prefix
        if long:
            raise UserError(
                f"{first}; {len(long)} of {len(places)} rows are too long, the longest has {max(long)} tokens"
            )
        if not rows:
            keys = "data.max_prompt or, for texts to learn, data.max_response"
            longer = f"{counts['filtered']} are longer than {limit} tokens, raise {keys}"
            equal = f"{counts['same']} have two equal answers, give other answers"
            reasons = [longer] * (counts["filtered"] > 0 or not counts["same"]) + [equal] * (counts["same"] > 0)
            raise UserError(f"no row is left: {'; '.join(reasons)}")
        return zip(*rows, strict=True), counts

    def with_prompts(self, data: Dataset) -> Dataset:
        """Returns the dataset with a prompt in each pair of texts that has none, but begins alike.

        The prompt is this beginning, up to the last border of tokens that the tokenizations of both texts share, and
        at which the prompt alone has the same tokens.
        """
        return replace(data, examples=tuple(map(self._with_prompt, data.examples)))

    def _with_prompt(self, example: Example) -> Example:
        chosen, rejected = example.chosen, example.rejected
        if example.prompt or not (isinstance(chosen, str) and isinstance(rejected, str)):
            return example
        (ids, ends), (others, _) = (self.tokenizer.encode_with_ends(text) for text in (chosen, rejected))
        for border in range(len(os.path.commonprefix([ids, others])), 0, -1):
            prompt = chosen[: ends[border - 1]]
            if rejected.startswith(prompt) and self.tokenizer.encode(prompt) == ids[:border]:
                answers = chosen[len(prompt) :], rejected[len(prompt) :]
                return replace(example, prompt=prompt, chosen=answers[0], rejected=answers[1])
        return example

    def _as_conversation(self, example: Example) -> Example:
        """Returns the example as a conversation, with its system message, if one of its texts is a conversation or
        `chat` is set; otherwise unchanged."""
        answers = {name: getattr(example, name) for name in ("completion", "chosen", "rejected")}
        if not self.chat and not any(isinstance(text, tuple) for text in (example.prompt, *answers.values())):
            if self.system is not None:
                raise UserError(
                    "a system message is given for plain text: make that a conversation (data.chat), or leave the "
                    "message out"
                )
            return example
        prompt = _conversation(example.prompt, "user")
        if self.system is not None and prompt[0]["role"] not in ("system", "developer"):
            prompt = ({"role": "system", "content": self.system}, *prompt)
        turns = {name: None if text is None else _conversation(text, "assistant") for name, text in answers.items()}
        return replace(example, prompt=prompt, **turns)

    def _fit(self, prompt: Ids, answer: int, max_length: int, counts: Counter[str]) -> Ids | None:
        """Returns the prompt, cut at its beginning if it and `answer` more tokens do not fit; None: drop the row."""
        room = max_length - answer
        if len(prompt) <= room:
            return prompt
        if self.overlong == "filter":
            counts["filtered"] += 1
            return None
        parts = f"{len(prompt)} tokens" + (f" of prompt and {answer} of answer" if answer else "")
        if self.overlong == "error":
            sentence = (
                f"{parts} are too many for at most {max_length}: raise the limit, or set overlong to filter (leave "
                "such rows out) or truncate_left (cut their beginnings off)"
            )
            raise _Overlong(sentence, len(prompt) + answer)
        if room < 1:
            raise UserError(
                f"{parts} are too many for at most {max_length}, even without the prompt: raise the limit, or use "
                "filter"
            )
        counts["truncated"] += 1
        begin = prompt[:1] if prompt[0] == self.tokenizer.bos_id and room > 1 else ()
        return begin + prompt[len(prompt) - room + len(begin) :]

    # One example -> token ids.

    def _rendered(self, example: Example, messages: Conversation, **options: bool) -> str:
        return render_chat(self.tokenizer, messages, variables=template_variables(example.columns), **options)

    def prompt(self, example: Example) -> tuple[str, Ids]:
        """Returns the text and the token ids of a prompt. A template writes the begin-of-text token itself."""
        if isinstance(example.prompt, str):
            return example.prompt, tuple(self.tokenizer.encode_prompt(example.prompt))
        own = example.prompt[-1]["role"] == "assistant"
        text = self._rendered(example, example.prompt, continue_final=own, add_generation_prompt=not own)
        return text, tuple(self.tokenizer.encode(text))

    def _with_answers(self, example: Example, *answers: Text) -> tuple[Ids, list[Ids]]:
        """Returns the token ids of the prompt, as in generation, and of the answers that follow it, with their ends."""
        tokenizer, (prompt, begun) = self.tokenizer, self.prompt(example)

        def encode(answer: Text) -> Sequence[int]:
            if isinstance(answer, str):
                return encode_continuation(tokenizer, prompt, begun[len(tokenizer.prefix_ids) :], answer)
            whole = self._rendered(example, (*_conversation(example.prompt, "user"), *answer))
            # Text of a template after the end, like a line break, is dropped, because a model never generates it.
            return _up_to_end(tokenizer, encode_continuation(tokenizer, prompt, begun, _rest(whole, prompt)))

        return begun, [_ended(tokenizer, encode(answer)) for answer in answers]

    def _turns(self, example: Example) -> tuple[Ids, tuple[bool, ...]]:
        """Returns (ids, learn) of a whole conversation, up to the end of its last assistant turn.

        A turn begins where the rendered text of the messages before it, with a generation prompt, ends. It ends with
        its first end-of-text token, or where a template without one ends it. A turn of weight 0 is not learned.
        """
        messages, eos_ids = example.prompt, self.tokenizer.eos_ids
        if isinstance(messages, str):
            raise UserError("there is nothing to learn: a prompt without an answer")
        whole = self._rendered(example, messages)
        ids, ends = self.tokenizer.encode_with_ends(whole)
        learn, weight, stop = [False] * len(ids), 0, 0
        for turn in (turn for turn, message in enumerate(messages) if message["role"] == "assistant"):
            start = bisect_right(ends, self._begin(example, messages, turn, whole))
            until = self._rendered(example, messages[: turn + 1])
            # Some templates render a turn differently when others follow; then its end-of-text token marks its end.
            limit = bisect_right(ends, len(until)) if whole.startswith(until) else None
            stop = next((n + 1 for n in range(start, limit or len(ids)) if ids[n] in eos_ids), limit)
            if stop is None:
                raise UserError(
                    "the chat template ends an assistant turn with no end-of-text token: name its end in eos"
                )
            weight = messages[turn].get("weight", 1)
            learn[start:stop] = [weight == 1] * (stop - start)
        ended = _ended(self.tokenizer, ids[:stop]) if stop else ()
        return ended, tuple(learn[:stop]) + (weight == 1,) * (len(ended) - stop)

    def _begin(self, example: Example, messages: Conversation, turn: int, whole: str) -> int:
        """Returns the number of characters of the rendered conversation before the words of an assistant turn.

        No template renders an empty conversation, and some write a system message of their own before the first turn.
        So a first turn begins where the header of answers ends, or with its content if the template has no header.
        """
        if turn:
            before = self._rendered(example, messages[:turn], add_generation_prompt=True)
            _rest(whole, before)
            return len(before)
        asked = ({"role": "user", "content": "."},)
        header = _rest(self._rendered(example, asked, add_generation_prompt=True), self._rendered(example, asked))
        bare = {**messages[0], "content": "", "tool_calls": None}
        empty = self._rendered(example, (bare,), continue_final=True)
        _rest(whole, empty)
        # The header's last blanks may be missing from `empty`, if the template strips contents.
        at = whole.rfind(header, 0, len(empty) + len(header)) if header else -1
        return len(empty) if at < 0 else at + len(header)


def _without_answer(example: Example) -> Example:
    """Returns the example of a whole conversation without the assistant's last words, which answer its prompt."""
    if not isinstance(example.prompt, tuple) or example.prompt[-1]["role"] != "assistant":
        return example
    before = example.prompt[:-1]
    if all(turn["role"] == "system" for turn in before):
        raise UserError("the conversation has nothing before its answer: remove the row")
    return replace(example, prompt=before)


def encode_continuation(tokenizer: Tokenizer, before: str, begun: Sequence[int], text: str) -> list[int]:
    """Returns token ids of a text that follows `before`, whose tokens `begun` stay unchanged.

    They are the tokens after `begun` in the concatenation of both texts. If a token would contain parts of both, they
    are those of the text alone, without the blank with which SentencePiece-like vocabularies begin.
    """

    def beginnings() -> Iterator[tuple[str, list[int]]]:
        yield before, list(begun)
        if tokenizer.encode("\na") != tokenizer.encode("\n") + tokenizer.encode("a"):  # ids depend on the position
            yield from ((first, tokenizer.encode(first)) for first in ("\n", "a", "."))

    for first, ids in beginnings():
        both = tokenizer.encode(first + text)
        if both[: len(ids)] == ids:
            return both[len(ids) :]
    return tokenizer.encode(text)


def encode_answered(
    tokenizer: Tokenizer,
    prompt: Text,
    answer: Text,
    *,
    variables: Mapping[str, Any] = MappingProxyType({}),
    finished: bool = True,
    cut: bool = False,
) -> Ids:
    """Returns the token ids of a prompt with an answer, for a reward model.

    With a chat template: the whole conversation as `apply_chat_template` renders it; a plain text is the user's turn.
    Without one: the two texts one after the other, and an end-of-text token.

    variables: those of the prompt's row (`template_variables`), for the template.
    finished: whether the answer is complete; otherwise the sequence ends with the answer's last token.
    cut: the sequence ends with its last end-of-text token, without what a template writes after it, such as a line
        break, as in `Encoding.pairs` and in samples.
    """
    if tokenizer.chat_template is None and isinstance(prompt, str) and isinstance(answer, str):
        ids = tokenizer.encode_prompt(prompt + answer)
        return _ended(tokenizer, ids) if finished else tuple(ids)
    messages = (*_conversation(prompt, "user"), *_conversation(answer, "assistant"))
    ids = tokenizer.encode(render_chat(tokenizer, messages, continue_final=not finished, variables=variables))
    return tuple(_up_to_end(tokenizer, ids) if finished and cut else ids)


def answer_gap(tokenizer: Tokenizer) -> str:
    """Returns the white space that begins each answer in a conversation, because the chat template or the tokenizer
    puts it there. It is no part of the message: a template that gets it in a message writes it twice."""
    talk = Example(prompt=({"role": "user", "content": "a"},))
    try:
        begun, (ids,) = Encoding(tokenizer)._with_answers(talk, ({"role": "assistant", "content": "b"},))
    except UserError:  # the template refuses this conversation, or writes prompts in another way once answered
        return ""
    text = tokenizer.continuation(begun, ids)
    return text[: len(text) - len(text.lstrip())]


def _conversation(text: Text, role: str) -> Conversation:
    return ({"role": role, "content": text},) if isinstance(text, str) else text


def _rest(whole: str, prompt: str) -> str:
    if not whole.startswith(prompt):
        raise UserError(
            f"the chat template writes the prompt in another way once its answer follows: {prompt[-40:]!r} does not "
            f"come before the answer in {whole[-80:]!r}; take a template that only adds to what it wrote"
        )
    return whole[len(prompt) :]


def _ended(tokenizer: Tokenizer, ids: Sequence[int]) -> Ids:
    return tuple(ids) if ids and ids[-1] in tokenizer.eos_ids else (*ids, tokenizer.eos_id)


def _up_to_end(tokenizer: Tokenizer, ids: Sequence[int]) -> Sequence[int]:
    """Returns the ids up to the last end-of-text token; all ids if there is none."""
    last = max((place for place, token in enumerate(ids) if token in tokenizer.eos_ids), default=len(ids) - 1)
    return ids[: last + 1]
