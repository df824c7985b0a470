"""Turns of a conversation as token ids that are only ever appended: the next prompt is all earlier ids, then new ones.

Rendering a conversation again may change its earlier ids: a sampled text has several tokenizations, Qwen 3's template
drops earlier thinking, and others move tools or a system message to the last turn. So only what follows an answer is
rendered, after a placeholder of the answer (the mechanism of TRL's tool suffixes and of the package `renderers`).
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Any

from jrlhf.data.chat import render_chat
from jrlhf.data.encode import Encoding, answer_gap, encode_continuation
from jrlhf.data.tokenizer import Tokenizer, ask
from jrlhf.data.types import Example, Message, without_gap
from jrlhf.errors import UserError
from jrlhf.models.hf.files import parse_json

# Stand in rendered texts for the answer, for a message's content, and between the halves of a control token's text.
_ANSWER, _CONTENT, _BREAK = (f"\ue000{letter}\ue000" for letter in "\ue002\ue003\ue004")
_RESPONSE = "<tool_response>", "</tool_response>"
_THINK = "<think>", "</think>"
_USER = {"role": "user", "content": "a"}


@dataclass(frozen=True)
class ChatFamily:
    """The form of the answers of models whose chat templates are alike.

    signs: texts of which all are in such a template.
    call: the texts around a tool call in JSON; the second is empty if a call ends with the answer.
    arguments: the key of a call's arguments; the other key is "name".
    listed: a call's JSON is a list of calls. bare: an answer that is the JSON of a call is one.
    thinks: answers begin with thinking, which the template drops from earlier turns.
    ends: tokens that end a turn besides the one that the template writes.
    id_length: the length that the template wants of `tool_call_id`; 0: any.
    """

    signs: tuple[str, ...] = ()
    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    arguments: str = "arguments"
    listed: bool = False
    bare: bool = False
    thinks: bool = False
    ends: tuple[str, ...] = ()
    id_length: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that structure an answer."""
        return tuple(filter(None, (*self.call, *(_THINK if self.thinks else ()))))


# The first one whose signs are in a template is its family. Templates without tool calls of their own have the plain
# form: Qwen's texts around a call, which are tokens only if the tokenizer has them.
FAMILIES: Mapping[str, ChatFamily] = MappingProxyType(
    {
        "llama3": ChatFamily(
            signs=("<|start_header_id|>", "tool_calls"),
            call=("<|python_tag|>", ""),
            arguments="parameters",
            bare=True,
            ends=("<|eom_id|>",),
        ),
        "mistral": ChatFamily(signs=("[INST]", "[TOOL_CALLS]"), call=("[TOOL_CALLS]", ""), listed=True, id_length=9),
        "gemma": ChatFamily(signs=("<start_of_turn>",)),
        "qwen3": ChatFamily(signs=("<|im_start|>", _THINK[1]), thinks=True),
        "chatml": ChatFamily(signs=("<|im_start|>",)),  # Qwen 2.5, SmolLM2
        "thinking": ChatFamily(signs=(_THINK[1],), thinks=True),
        "generic": ChatFamily(),
    }
)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. error: why it cannot be carried out; then name and arguments are empty."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None  # the model's own, if it writes one
    error: str | None = None


@dataclass(frozen=True)
class Answer:
    """The parts of a sampled answer. thinking: None if there is none."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    thinking: str | None = None


def make_renderer(tokenizer: Tokenizer, family: str | None = None) -> "Renderer":
    """Returns a renderer for the tokenizer's chat template. family: a name of FAMILIES; None: that of the template.

    Raises UserError for a template with which turns cannot be appended: it ends answers with no end-of-text token,
    shows no user's message after an answer, or writes a turn in another way once others follow.
    """
    if family is not None and family not in FAMILIES:
        raise UserError(f"the template family {family!r} is none of {', '.join(FAMILIES)}")
    text = " ".join(tokenizer.templates)
    signs = {name: row.signs for name, row in FAMILIES.items()}
    name = family or next(name for name in signs if all(sign in text for sign in signs[name]))
    renderer = Renderer(tokenizer, FAMILIES[name])
    renderer.check()
    return renderer


@dataclass(frozen=True)
class Renderer:
    """Appends turns to the token ids of a conversation, and reads sampled answers. Made by `make_renderer`.

    Special tokens: `ids` is what `Encoding.prompts` gives, which reads a special token's text in a message as the
    token, like transformers. In `bridge`, a control token's text in a message becomes tokens of its letters: the text
    is cut inside, and the parts are encoded one by one. Control tokens are, as for `sanitize_control_tokens` of
    transformers, the special ones and those that the template or the family names; one of a single letter stays.
    `parse` finds the marks of an answer by their ids, and as text only if the tokenizer has no such token.
    """

    tokenizer: Tokenizer
    family: ChatFamily

    def ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Returns the ids of the first prompt, up to the answer. tools: JSON schemas for the template.

        A template that reads no tools shows none: then the messages have to describe them, and the form of calls.
        Raises UserError for tools if `parse` cannot read the form in which the template writes calls.
        """
        if tools and not self._reads_calls:
            raise UserError("the chat template writes calls of tools in a form that jrlhf does not read: offer none")
        columns = {} if tools is None else {"tools": [*tools]}
        return [*Encoding(self.tokenizer).prompt(Example(tuple(messages), columns=columns))[1]]

    def bridge(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Returns the ids to append to `ids`, which end with an answer, for the messages and the next answer's header.

        messages: of the roles user, tool and, where the template has it, system. With a template without tools, the
            results of tools are a user's turn, each as `<tool_response>`, its text and `</tool_response>`, on lines.

        They begin with the template's end of a turn if `ids` do not end with it, because the answer was cut off or
        ended with another end-of-text token. Raises UserError for other roles, and for what the template refuses.
        """
        added = self._encode(self._text_after(self._prepared(messages)))
        stop = self._stop(added)
        ended = len(ids) > 0 and ids[-1] in {added[stop - 1], *self._more_ends}
        return added[stop:] if ended else added

    def parse(self, ids: Sequence[int]) -> Answer:
        """Returns the parts of the sampled ids of one answer.

        White space around calls and thinking belongs to the template, and is left out. A call that is no valid JSON,
        has no name or arguments, or does not end is one with an `error`.
        """
        ids = [*ids[:-1], *(token for token in ids[-1:] if token not in {*self.tokenizer.eos_ids, *self._more_ends})]
        begin, end = self.family.call
        content, calls, thinking = list[str](), list[ToolCall](), list[str]()
        inside = self._begun_thinking
        pieces = self._pieces(ids)
        marks = [None, *(mark for mark, _ in pieces), None]
        for before, (mark, text), after in zip(marks, pieces, marks[2:], strict=False):
            if mark == _THINK[1]:  # without a beginning, the prompt had it
                thinking, content = (thinking, content) if inside else ([*thinking, *content], [])
                inside = False
                content.append(text)
            elif inside:
                thinking.append(mark + text)
            elif mark == _THINK[0]:
                inside = True
                thinking.append(text)
            elif mark == begin:
                calls += self._calls(text, complete=after == end or not end)
            else:
                content.append(text if before == begin else mark + text)  # an end without its beginning is text
        text = "".join(content)
        if self.family.bare and not calls and (calls := self._bare_calls(text.strip())):
            text = ""
        text = text.strip() if calls or thinking else text
        return Answer(text, tuple(calls), "".join(thinking).strip("\n") if thinking else None)

    def check(self) -> None:
        """Raises UserError if the template is none that turns can be appended to."""
        called = f"{self.tokenizer.called} has a chat template"
        if "user" not in self._roles:
            self._text_after([_USER])  # a refusal has its own words
            raise UserError(f"{called} that shows no user's message after an answer: sessions need one that does")
        text = self._text_after([{"role": "user", "content": _CONTENT}])
        self._stop(self._encode(text))
        asked, answer = {"role": "user", "content": _CONTENT}, {"role": "assistant", "content": _ANSWER}
        prompt = self._rendered([asked])
        before, *turns = self._rendered([asked, answer, asked, answer, asked]).split(_ANSWER)
        prefix = self.family.thinks or (before.startswith(prompt) and turns[0].startswith(text))
        if len(turns) != 2 or turns[1] != text or not prefix:
            raise UserError(f"{called} that writes a turn in another way once others follow, so none can be appended")

    # The text that follows an answer, and its ids.

    def _rendered(self, messages: Sequence[Message]) -> str:
        # A template of its own for tools is that of their results, too.
        tooled = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        variables = {"tools": list[Any]()} if tooled and self.tokenizer.tool_template is not None else {}
        return render_chat(self.tokenizer, messages, add_generation_prompt=True, variables=variables)

    def _text_after(self, messages: Sequence[Message]) -> str:
        """Returns the text that the template writes after an answer that the messages follow."""
        text = self._rendered([_USER, {"role": "assistant", "content": _ANSWER}, *messages])
        _, mark, after = text.partition(_ANSWER)
        if not mark:
            raise UserError("the chat template does not show an answer once messages follow, so none can be appended")
        return after

    def _encode(self, text: str) -> list[int]:
        parts, begun = text.split(_BREAK), self.tokenizer.encode("a")
        return [token for part in parts for token in encode_continuation(self.tokenizer, "a", begun, part)]

    def _stop(self, added: Sequence[int]) -> int:
        """Returns the number of ids up to the end of the answer's turn, before which only white space may be."""
        stop = next((place for place, token in enumerate(added, start=1) if token in self.tokenizer.eos_ids), 0)
        if not stop or self.tokenizer.continuation((), added[: stop - 1], special=True).strip():
            raise UserError("the chat template ends an answer with no end-of-text token: name its end in eos")
        return stop

    def _prepared(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages as the template reads them, with breaks in the texts of control tokens."""
        if not messages:
            raise UserError("no message follows the answer: give one or more")
        for message in messages:
            if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
                raise UserError(f"the message {message!r} has no role: give a mapping with role and content")
            self._check_parts(message.get("content"))
        prepared = list[Message]()
        for role, group in groupby(messages, lambda message: message.get("role")):
            turns = [{**self._guarded(self._with_fitting_id(message)), "role": role} for message in group]
            if role == "tool" and self._plain_results:
                prepared.append({"role": "user", "content": "\n".join(map(_plain_result, turns))})
            elif role not in self._roles:
                raise UserError(
                    f"the chat template shows no message of the role {role!r} after an answer: give another role"
                )
            else:
                prepared += turns
        return prepared

    def _with_fitting_id(self, message: Message) -> Message:
        length, given = self.family.id_length, message.get("tool_call_id")
        if given is not None and not isinstance(given, str):
            raise UserError(f"tool_call_id={given!r} must be a text")
        if not length or given is None or re.fullmatch(f"[A-Za-z0-9]{{{length}}}", given):
            return message
        return {**message, "tool_call_id": hashlib.sha256(given.encode()).hexdigest()[:length]}

    def _check_parts(self, content: Any) -> None:
        """Refuses parts of a content whose texts become a control token where a template joins them."""
        if isinstance(content, list | tuple):
            texts = [str(part.get("text") or "") for part in content if isinstance(part, Mapping)]
            for parts in (texts, [text.strip() for text in texts]):
                if len(self._parts("".join(parts))) > 1 + sum(len(self._parts(text)) - 1 for text in parts):
                    raise UserError("texts of a message's parts form a control token together: give them as one text")

    def _guarded(self, value: Any) -> Any:
        if isinstance(value, str):
            return _BREAK.join(self._parts(value))
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        return [*map(self._guarded, value)] if isinstance(value, list | tuple) else value

    def _parts(self, text: str) -> list[str]:
        """Returns parts of a text of which none has a control token: each one's text is cut in its middle.

        The tokenizer finds them. A search for their texts would miss what its normalizer turns into them.
        `encode_special_tokens` of tokenizers would not do: it keeps added tokens that are not special.
        """
        encoding = ask(self.tokenizer.called, self.tokenizer.backend.encode, text, add_special_tokens=False)
        spans = [span for token, span in zip(encoding.ids, encoding.offsets, strict=True) if token in self._control]
        cuts = [(begin + end) // 2 for begin, end in spans if end - begin > 1]
        parts = [text[begin:end] for begin, end in pairwise((0, *cuts, len(text)))]
        return [text] if not cuts else [part for whole in parts for part in self._parts(whole)]

    @cached_property
    def _control(self) -> frozenset[int]:
        backend = self.tokenizer.backend
        words = " ".join((*self.tokenizer.templates, *self.family.marks, *_RESPONSE))
        control = {
            token
            for token, added in backend.get_added_tokens_decoder().items()
            if added.special or (added.content in words and not added.content.isspace())
        }
        unknown = getattr(backend.model, "unk_token", None)  # the id of any unknown text
        return frozenset(control - {backend.token_to_id(unknown or "")} | {*self.tokenizer.eos_ids})

    @cached_property
    def _roles(self) -> frozenset[str]:
        """The roles of messages that the template shows after an answer."""

        def shown(role: str) -> bool:
            try:
                return _CONTENT in self._text_after([{"role": role, "content": _CONTENT, "tool_call_id": "a" * 9}])
            except UserError:
                return False

        return frozenset(filter(shown, ("user", "system", "tool")))

    @cached_property
    def _plain_results(self) -> bool:
        """Whether the template has no role of its own for results. Many would write any role as it is."""
        return not re.search(r"""["'](tool|ipython)["']""", " ".join(self.tokenizer.templates))

    @cached_property
    def _more_ends(self) -> frozenset[int]:
        ids = map(self.tokenizer.backend.token_to_id, self.family.ends)
        return frozenset(token for token in ids if token is not None)

    # The parts of an answer.

    @cached_property
    def _gap(self) -> str:
        return answer_gap(self.tokenizer)

    @cached_property
    def _begun_thinking(self) -> bool:
        return self.family.thinks and self._text_after([_USER]).rstrip().endswith(_THINK[0])

    def _pieces(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """Returns pairs of a mark and the text that follows it; the first mark is empty."""
        added = {token.content: id for id, token in self.tokenizer.backend.get_added_tokens_decoder().items()}
        marks = {added[mark]: mark for mark in self.family.marks if mark in added}
        texts = [re.escape(mark) for mark in self.family.marks if mark not in added]
        runs: list[tuple[str, list[int]]] = [("", [])]
        for token in ids:
            if token in marks:
                runs.append((marks[token], []))
            else:
                runs[-1][1].append(token)
        begun, pieces = self.tokenizer.encode("a"), list[tuple[str, str]]()
        for mark, run in runs:
            # Special tokens that have no place in an answer are its text: nothing is dropped from what was sampled.
            stray = any(token in self._control for token in run)
            text = self.tokenizer.decode(run, special=True) if stray else self.tokenizer.continuation(begun, run)
            text = text if mark else without_gap(text, self._gap)
            parts = re.split(f"({'|'.join(texts)})", text) if texts else [text]
            pieces += [(mark, parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]
        return pieces

    def _calls(self, text: str, *, complete: bool = True) -> list[ToolCall]:
        if not complete:
            return [ToolCall(error=f"the call does not end: {self.family.call[1]} is missing")]
        try:
            value = parse_json(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_distinct)
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except ValueError as error:
            return [ToolCall(error=f"the call is no valid JSON: {error}")]
        if self.family.listed and not isinstance(value, list):
            return [ToolCall(error="the call is no list of calls")]
        return [self._call(item) for item in (value if self.family.listed else [value])]

    def _call(self, value: Any) -> ToolCall:
        name, key = (value.get("name"), self.family.arguments) if isinstance(value, dict) else (None, "")
        if not (isinstance(name, str) and name):
            return ToolCall(error="the call is no object with a name")
        if not isinstance(value.get(key), dict):
            return ToolCall(error=f"the call has no object {key!r}")
        return ToolCall(name, value[key], value["id"] if isinstance(value.get("id"), str) else None)

    def _bare_calls(self, text: str) -> list[ToolCall]:
        """Returns the call that the whole text is. Another whole object with a name is an answer."""
        own = f'"{self.family.arguments}"' in text or not text.endswith("}")
        key = re.match(rf'\{{\s*"(name|type|{self.family.arguments})"\s*:', text)
        return self._calls(text) if own and key and '"name"' in text else []

    @cached_property
    def _reads_calls(self) -> bool:
        """Whether `parse` reads the calls that the template writes, if it writes any."""
        call = {"type": "function", "function": {"name": "probe", "arguments": {"a": "b"}}, "id": "a" * 9}
        try:
            text = self._rendered([_USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
        except UserError:
            return True
        ids = self._encode(text.removeprefix(self._rendered([_USER])))
        answer = ids[: next((place for place, token in enumerate(ids) if token in self.tokenizer.eos_ids), None)]
        calls = [(call.name, call.arguments) for call in self.parse(answer).calls]
        return "probe" not in text or calls == [("probe", {"a": "b"})]


def _plain_result(message: Message) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return f"{_RESPONSE[0]}\n{text}\n{_RESPONSE[1]}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is too large")
    return value


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(value := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return value
