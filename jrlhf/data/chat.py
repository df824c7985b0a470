"""Renders conversations as text with a model's chat template."""

import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from jrlhf.data.template import SECONDS
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Message
from jrlhf.errors import UserError
from jrlhf.models.hf.files import parse_json
from jrlhf.run.child import Worker

_REASONING = ("reasoning_content", "thinking", "reasoning")
# Appended to a message that is to be continued, to find its end in the rendered text. The blank after it shows whether
# the template strips messages.
_MARK = "\ue000\ue001\ue000"
# Parameters of `apply_chat_template` that say what to render, and how, so that no row may set them.
_FIXED = frozenset(
    "conversation messages chat_template add_generation_prompt continue_final_message tokenize padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs "
    "sanitize_control_tokens".split()
)
_day: ContextVar[str | None] = ContextVar("day", default=None)  # the day that templates write; None: today, in UTC


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    continue_final: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Returns the text of a conversation, as the model's chat template writes it.

    add_generation_prompt: the text ends with the tokens that precede an answer.
    continue_final: the text ends inside the last message, which the model is to continue.
    variables: the row's own variables of the template (`template_variables`). With "tools", the JSON schemas of
        functions that are offered to the model, the tokenizer's template for tools is used if it has one.
    """
    tools = variables.get("tools")
    offered = tools is not None and tokenizer.tool_template is not None
    template = tokenizer.tool_template if offered else tokenizer.chat_template
    if template is None:
        raise UserError(
            f"{tokenizer.called} has no chat template, but the data are conversations: add chat_template.jinja to it, "
            "or give plain-text prompts with data.chat=false"
        )
    if not messages:
        raise UserError("a conversation without messages cannot be rendered: remove it")
    plain = [_plain(message) for message in messages]
    if continue_final:
        plain[-1] |= {"content": _marked(plain[-1].get("content"))}
    own = {"messages": plain, "tools": None if tools is None else [dict(tool) for tool in tools]}
    own |= {"add_generation_prompt": add_generation_prompt}
    text = _render(template, {**tokenizer.special_tokens, "documents": None, **variables, **own})
    for part in (part for message in plain if isinstance(message.get("content"), list) for part in message["content"]):
        if str(part) in text:  # the list itself, as Python writes it
            raise UserError("the chat template cannot read a message of several parts: write its content as one text")
    if not continue_final:
        return text
    head, mark, tail = text.rpartition(_MARK)
    if not mark:
        raise UserError("the chat template does not show the last message, so it cannot be continued")
    return head if tail.startswith(" ") else head.rstrip()


def template_variables(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables that a row gives to the chat template.

    They are its `tools`, a list of JSON schemas; all entries of `chat_template_kwargs`, as in TRL; and
    `enable_thinking`, as in verl. Columns of tables may have them as JSON.
    """
    tools = _parsed(columns.get("tools"), "tools", "a list of objects")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise UserError("the tools are no list of objects: repair the row")
    switches = _parsed(columns.get("chat_template_kwargs"), "chat_template_kwargs", "an object") or {}
    if not isinstance(switches, Mapping):
        raise UserError(f"chat_template_kwargs is of type {type(switches).__name__}, not an object: repair the row")
    if fixed := sorted(_FIXED & switches.keys()):
        raise UserError(f"chat_template_kwargs sets {fixed[0]}, which is no variable of a template: remove it there")
    thinking = columns.get("enable_thinking")
    if not isinstance(thinking, bool | None):
        raise UserError(f"enable_thinking is {thinking!r}, neither true nor false: repair the row")
    own = {} if thinking is None else {"enable_thinking": thinking}
    own |= {} if tools is None else {"tools": tools}
    return own | {key: value for key, value in switches.items() if value is not None}  # tables fill with nulls


def _parsed(value: Any, column: str, form: str) -> Any:
    """Returns the value of a column; text in it is JSON."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UserError(f"{column} is not {form} in JSON ({error}): repair the row") from error


def _marked(content: Any) -> Any:
    """Returns a message's content with the mark at the end of its text."""
    if isinstance(content, str):
        return f"{content}{_MARK} "
    if not content:
        raise UserError("the last message has no text that could be continued: end with one that has")
    return [*content[:-1], content[-1] | {"text": _marked(content[-1]["text"])}]


def _plain(message: Message) -> dict[str, Any]:
    """Returns the message for a template: keys that have a value, and the reasoning under all usual names. `weight`
    says only whether the message is learned."""
    message = {key: value for key, value in message.items() if value is not None and key != "weight"}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Renderer:
    """Renders templates in a separate process, which ends with this one and after a failure."""

    def __init__(self):
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def __call__(self, source: str, variables: Mapping[str, Any]) -> str:
        request = pickle.dumps((source, variables, _day.get()))
        with self._lock:
            worker = self._worker or Worker("jrlhf.data.template", os.environ, lambda output: None)
            answer = worker.request(request, SECONDS)
            self._worker = None if "failure" in answer else worker
        if "text" in answer:
            return answer["text"]
        raise UserError(f"the chat template {answer.get('bad') or 'does not end well: ' + answer['detail']}")


_render = _Renderer()


@contextmanager
def dated(day: str) -> Iterator[None]:
    """Makes templates that this thread renders in the block write this day (2026-11-27), in place of the present one.

    A run renders all its templates in the thread that trains, so runs in several threads do not share a day.
    """
    token = _day.set(day)
    try:
        yield
    finally:
        _day.reset(token)
