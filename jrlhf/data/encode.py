"""Examples to token ids: what generation begins with, what is learnt, which answers are compared."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from jrlhf.data.chat import encode_chat, render_chat
from jrlhf.data.read import Dataset
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Conversation, Example, Text
from jrlhf.errors import UserError

Ids = tuple[int, ...]
Overlong = Literal["error", "filter", "truncate_left"]


@dataclass(frozen=True)
class Prompts:
    """What generation begins with, row by row.

    ids, texts: token ids, and the text that they are of, as the chat template wrote it. A prompt that was cut off
        keeps its whole text here.
    examples: the rows' examples; their prompts are conversations where the model is given conversations.
    filtered, truncated: how many rows were left out, or lost their beginning, because they were too long.
    """

    ids: tuple[Ids, ...]
    texts: tuple[str, ...]
    examples: tuple[Example, ...]
    filtered: int = 0
    truncated: int = 0

    def describe(self) -> str:
        """One line for the log."""
        return _describe("prompts", [len(row) for row in self.ids], self.filtered, self.truncated)


@dataclass(frozen=True)
class Sequences:
    """What supervised learning sees, row by row.

    ids: token ids of whole sequences.
    learn: whether each token is learnt from those before it. Never the first one, which has none.
    prompt_lengths: tokens before the first that is learnt.
    filtered, truncated: as in `Prompts`.
    """

    ids: tuple[Ids, ...]
    learn: tuple[tuple[bool, ...], ...]
    prompt_lengths: tuple[int, ...]
    examples: tuple[Example, ...]
    filtered: int = 0
    truncated: int = 0

    def describe(self) -> str:
        """One line for the log."""
        line = _describe("sequences", [len(row) for row in self.ids], self.filtered, self.truncated)
        return f"{line}; {sum(map(sum, self.learn))} of {sum(map(len, self.learn))} tokens are learnt"


@dataclass(frozen=True)
class PreferencePairs:
    """Two answers to each prompt, the first of them preferred, as whole sequences.

    chosen, rejected: token ids, prompt included; the first `prompt_lengths` tokens of a row's two are the prompt.
    filtered, truncated: as in `Prompts`. same: rows left out because their two answers have the same tokens.
    """

    chosen: tuple[Ids, ...]
    rejected: tuple[Ids, ...]
    prompt_lengths: tuple[int, ...]
    examples: tuple[Example, ...]
    filtered: int = 0
    truncated: int = 0
    same: int = 0

    def describe(self) -> str:
        """One line for the log."""
        longest = [max(len(a), len(b)) for a, b in zip(self.chosen, self.rejected, strict=True)]
        line = _describe("pairs", longest, self.filtered, self.truncated)
        return line + (f"; {self.same} with two equal answers left out" if self.same else "")


def encode_prompts(
    data: Dataset | Sequence[Example],
    tokenizer: Tokenizer,
    *,
    max_prompt: int,
    overlong: Overlong = "error",
    chat: bool = False,
    system: str | None = None,
) -> Prompts:
    """What generation begins with: the rendered conversation up to the answer, or the plain text.

    A conversation that ends with the assistant's words is continued there; of a dataset of whole conversations
    ("messages") the last answer is left out.

    max_prompt: most tokens of a prompt.
    overlong: "error": a longer one is refused; "filter": left out; "truncate_left": its beginning is cut off, all but
        the token that begins every text.
    chat: plain text becomes the user's turn of a conversation.
    system: a system message for every conversation that has none.

    Raises:
        UserError: a row that cannot be rendered, is empty or too long, or none that is left.
    """
    whole = isinstance(data, Dataset) and data.shape == "messages"
    kept: list[tuple[Ids, str, Example]] = []
    filtered = truncated = 0
    for place, example in _examples(data, chat, system):
        with _naming(place):
            if whole and isinstance(example.prompt, tuple) and example.prompt[-1]["role"] == "assistant":
                example = replace(example, prompt=example.prompt[:-1])
            text = _prompt_text(tokenizer, example)
            ids = _prompt_ids(tokenizer, example.prompt, text)
            if not ids:
                raise UserError("the prompt is empty: remove the row")
            fitting = _fit(tokenizer, ids, 0, max_prompt, overlong)
        if fitting is None:
            filtered += 1
            continue
        truncated += len(fitting) < len(ids)
        kept.append((fitting, text, example))
    _some_left(kept, filtered, max_prompt)
    ids, texts, examples = zip(*kept, strict=True)
    return Prompts(ids, texts, examples, filtered, truncated)


def encode_sft(
    data: Dataset | Sequence[Example],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    overlong: Overlong = "error",
    chat: bool = False,
    system: str | None = None,
) -> Sequences:
    """Whole sequences to imitate. Learnt are: of a prompt and its completion, the completion and what ends it; of a
    conversation without a completion, every assistant turn and what ends it; of a text, everything and its end.

    A prompt has the very tokens that `encode_prompts` gives it. An answer ends with an end-of-text token: the
    template's, behind which nothing is kept, or else the tokenizer's.

    max_length: most tokens of a sequence.
    overlong: as in `encode_prompts`. "truncate_left" cuts the beginning of a prompt, or of a whole conversation or
        text; never a completion.

    Raises:
        UserError: a row that cannot be rendered, has nothing to learn or is too long, or none that is left.
    """
    kept: list[tuple[Ids, tuple[bool, ...], Example]] = []
    filtered = truncated = 0
    for place, example in _examples(data, chat, system):
        with _naming(place):
            if example.completion is None or example.prompt == "":
                ids, learn = _turns(tokenizer, example) if example.completion is None else _text(tokenizer, example)
                begin, end = _fit(tokenizer, ids, 0, max_length, overlong), ()
            else:
                begin, (end,) = _with_answers(tokenizer, example, example.completion)
                ids, learn = begin + end, (False,) * len(begin) + (True,) * len(end)
                begin = _fit(tokenizer, begin, len(end), max_length, overlong)
            if begin is not None:
                row = begin + end
                learn = (False, *learn[len(learn) - len(row) + 1 :])  # cut where the row was
                if not any(learn):
                    raise UserError("there is nothing to learn: remove the row, or add the assistant's answer")
        if begin is None:
            filtered += 1
            continue
        truncated += len(row) < len(ids)
        kept.append((row, learn, example))
    _some_left(kept, filtered, max_length)
    rows, learnt, examples = zip(*kept, strict=True)
    return Sequences(rows, learnt, tuple(learn.index(True) for learn in learnt), examples, filtered, truncated)


def encode_preferences(
    data: Dataset | Sequence[Example],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    overlong: Overlong = "error",
    chat: bool = False,
    system: str | None = None,
) -> PreferencePairs:
    """Pairs of whole sequences, prompt and answer, of which the first is preferred. Arguments as in `encode_sft`.

    Rows whose two answers have the same tokens say nothing and are left out, counted in `same`.

    Raises:
        UserError: a row that cannot be rendered, has no two answers or is too long, or none that is left.
    """
    kept: list[tuple[Ids, Ids, int, Example]] = []
    filtered = truncated = same = 0
    for place, example in _examples(data, chat, system):
        with _naming(place):
            if example.chosen is None or example.rejected is None:
                raise UserError("there are no two answers to compare: add chosen and rejected, or remove the row")
            prompt, (chosen, rejected) = _with_answers(tokenizer, example, example.chosen, example.rejected)
            if chosen == rejected:
                same += 1
                continue
            begin = _fit(tokenizer, prompt, max(len(chosen), len(rejected)), max_length, overlong)
        if begin is None:
            filtered += 1
            continue
        truncated += len(begin) < len(prompt)
        kept.append((begin + chosen, begin + rejected, len(begin), example))
    _some_left(kept, filtered, max_length)
    better, worse, lengths, examples = zip(*kept, strict=True)
    return PreferencePairs(better, worse, lengths, examples, filtered, truncated, same)


def encode_answered(
    tokenizer: Tokenizer,
    prompt: Text,
    answer: Text,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    finished: bool = True,
    cut: bool = False,
) -> Ids:
    """A prompt and an answer to it as one sequence, as a reward model reads it.

    With a chat template: the whole conversation as `apply_chat_template` gives it, a plain text being the user's turn.
    Without one: the two texts one after the other, and an end of text.

    tools: what the prompt's row offers (`tools_of`), which a template is told.
    finished: whether the answer came to its end; else the sequence ends with the answer's own last token.
    cut: the sequence ends with its last end-of-text token, not with what a template writes behind it, such as a line
        break. `encode_preferences` ends so, and what was sampled does.

    Raises:
        UserError: the template refuses the messages, or there is none and the prompt is a conversation.
    """
    if tokenizer.chat_template is None and isinstance(prompt, str) and isinstance(answer, str):
        ids = tokenizer.encode_prompt(prompt + answer)
        return _ended(tokenizer, ids) if finished else tuple(ids)
    messages = (*_conversation(prompt, "user"), *_conversation(answer, "assistant"))
    ids = encode_chat(tokenizer, messages, continue_final=not finished, tools=tools)
    if finished and cut:
        last = max((place for place, token in enumerate(ids) if token in tokenizer.eos_ids), default=len(ids) - 1)
        ids = ids[: last + 1]
    return tuple(ids)


# Examples as the model is to meet them.


def _examples(data: Dataset | Sequence[Example], chat: bool, system: str | None) -> Iterator[tuple[str, Example]]:
    """The examples, each with where it stands."""
    if isinstance(data, Dataset):
        numbered = zip(data.places, data.examples, strict=True)
    else:
        numbered = ((f"row {row}", example) for row, example in enumerate(data, start=1))
    for place, example in numbered:
        with _naming(place):
            met = _as_met(example, chat, system)
        yield place, met


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Says of an error where it is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def _as_met(example: Example, chat: bool, system: str | None) -> Example:
    """The example as a conversation, with its system message, where one of its texts is a conversation or `chat` asks
    for it; else as it is."""
    answers = {name: getattr(example, name) for name in ("completion", "chosen", "rejected")}
    if not chat and not any(isinstance(text, tuple) for text in (example.prompt, *answers.values())):
        if system is not None:
            raise UserError(
                "a system message is given for plain text: make that a conversation (data.chat), or leave the "
                "message out"
            )
        return example
    prompt = _conversation(example.prompt, "user")
    if system is not None and prompt[0]["role"] not in ("system", "developer"):
        prompt = ({"role": "system", "content": system}, *prompt)
    turns = {name: None if text is None else _conversation(text, "assistant") for name, text in answers.items()}
    return replace(example, prompt=prompt, **turns)


def _conversation(text: Text, role: str) -> Conversation:
    return ({"role": role, "content": text},) if isinstance(text, str) else text


# Examples -> token ids.


def _rendered(tokenizer: Tokenizer, example: Example, messages: Conversation, **options: bool) -> str:
    return render_chat(tokenizer, messages, tools=tools_of(example.columns), **options)


def tools_of(columns: Mapping[str, Any]) -> Any:
    """The JSON schemas in a row's column `tools`, written out or as JSON; None where it has none.

    Raises:
        UserError: text that is not JSON.
    """
    tools = columns.get("tools")
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools)  # a table's cell
    except ValueError as error:
        raise UserError(f"the tools are not a list in JSON ({error}): repair the row") from None


def _prompt_text(tokenizer: Tokenizer, example: Example) -> str:
    if isinstance(example.prompt, str):
        return example.prompt
    own = example.prompt[-1]["role"] == "assistant"
    return _rendered(tokenizer, example, example.prompt, continue_final=own, add_generation_prompt=not own)


def _prompt_ids(tokenizer: Tokenizer, prompt: Text, text: str) -> Ids:
    """A template writes the beginning of text itself."""
    return tuple(tokenizer.encode_prompt(text) if isinstance(prompt, str) else tokenizer.encode(text))


def _with_answers(tokenizer: Tokenizer, example: Example, *answers: Text) -> tuple[Ids, list[Ids]]:
    """The token ids of the prompt, as generation meets it, and of the answers that follow it, with their ends."""
    text = _prompt_text(tokenizer, example)
    ids = _prompt_ids(tokenizer, example.prompt, text)
    return ids, [_ended(tokenizer, _answer(tokenizer, example, text, ids, answer)) for answer in answers]


def _answer(tokenizer: Tokenizer, example: Example, prompt: str, begun: Ids, answer: Text) -> list[int]:
    if isinstance(answer, str):
        return tokenizer.encode_continuation(prompt, begun[len(tokenizer.prefix_ids) :], answer)
    whole = _rendered(tokenizer, example, (*_conversation(example.prompt, "user"), *answer))
    ids = tokenizer.encode_continuation(prompt, begun, _rest(whole, prompt))
    last = max((place for place, token in enumerate(ids) if token in tokenizer.eos_ids), default=len(ids) - 1)
    return ids[: last + 1]  # what a template writes behind the end, like a line break, no model gets to write


def _rest(whole: str, prompt: str) -> str:
    if not whole.startswith(prompt):
        raise UserError(
            f"the chat template writes the prompt in another way once its answer follows: {prompt[-40:]!r} does not "
            f"come before the answer in {whole[-80:]!r}; take a template that only adds to what it wrote"
        )
    return whole[len(prompt) :]


def _ended(tokenizer: Tokenizer, ids: Sequence[int]) -> Ids:
    return tuple(ids) if ids and ids[-1] in tokenizer.eos_ids else (*ids, tokenizer.eos_id)


def _text(tokenizer: Tokenizer, example: Example) -> tuple[Ids, tuple[bool, ...]]:
    """(ids, learn) of a text without a prompt."""
    assert isinstance(example.completion, str)
    ids = _ended(tokenizer, tokenizer.encode_prompt(example.completion))
    return ids, (False,) + (True,) * (len(ids) - 1)


def _turns(tokenizer: Tokenizer, example: Example) -> tuple[Ids, tuple[bool, ...]]:
    """(ids, learn) of a whole conversation, up to the end of its last assistant turn.

    A turn begins where the messages before it, rendered up to an answer, end. It ends with its first end-of-text token,
    or where a template without one ends it.
    """
    messages = example.prompt
    if isinstance(messages, str):
        raise UserError("there is nothing to learn: a prompt without an answer")
    whole = _rendered(tokenizer, example, messages)
    ids, ends = tokenizer.encode_with_ends(whole)
    learn = [False] * len(ids)
    stop = 0
    for turn in (turn for turn, message in enumerate(messages) if message["role"] == "assistant"):
        before = _rendered(tokenizer, example, messages[:turn], add_generation_prompt=True) if turn else ""
        _rest(whole, before)
        start = bisect_right(ends, len(before))
        until = _rendered(tokenizer, example, messages[: turn + 1])
        # Some templates write a turn differently when others follow it; then only its end-of-text token tells its end.
        limit = bisect_right(ends, len(until)) if whole.startswith(until) else None
        end = next((n + 1 for n in range(start, limit or len(ids)) if ids[n] in tokenizer.eos_ids), limit)
        if end is None:
            raise UserError("the chat template ends an assistant turn with no end-of-text token: name its end in eos")
        learn[start:end] = [True] * (end - start)
        stop = end
    ended = _ended(tokenizer, ids[:stop]) if stop else ()
    return ended, tuple(learn[:stop]) + (True,) * (len(ended) - stop)


# Lengths.


def _fit(tokenizer: Tokenizer, prompt: Ids, answer: int, max_length: int, overlong: Overlong) -> Ids | None:
    """The prompt, shortened if need be so that it and `answer` more tokens fit; None: the row is left out."""
    room = max_length - answer
    if len(prompt) <= room:
        return prompt
    if overlong == "filter":
        return None
    parts = f"{len(prompt)} tokens" + (f" of prompt and {answer} of answer" if answer else "")
    if overlong == "error":
        raise UserError(
            f"{parts} are too many for at most {max_length}: raise the limit, or set overlong to filter (leave such "
            "rows out) or truncate_left (cut their beginnings off)"
        )
    if room < 1:
        raise UserError(
            f"{parts} are too many for at most {max_length}, even without the prompt: raise the limit, or use filter"
        )
    begin = prompt[:1] if prompt[0] == tokenizer.bos_id and room > 1 else ()
    return begin + prompt[len(prompt) - room + len(begin) :]


def _some_left(kept: Sequence[Any], filtered: int, limit: int) -> None:
    if not kept:
        raise UserError(f"no row is left: {filtered} are longer than {limit} tokens; raise the limit")


def _describe(what: str, lengths: Sequence[int], filtered: int, truncated: int) -> str:
    line = f"{len(lengths)} {what} of {min(lengths)} to {max(lengths)} tokens (median {median(lengths):g})"
    line += f"; {filtered} too long and left out" if filtered else ""
    return line + (f"; {truncated} too long and cut off at the beginning" if truncated else "")
