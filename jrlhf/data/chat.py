"""Renders conversations as text with a model's chat template."""

import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jrlhf.data.template import SECONDS
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Message
from jrlhf.errors import UserError
from jrlhf.run.child import Worker

_REASONING = ("reasoning_content", "thinking", "reasoning")
# Appended to a message that is to be continued, to find its end in the rendered text. The blank after it shows whether
# the template strips messages.
_MARK = "\ue000\ue001\ue000"
_day: ContextVar[str | None] = ContextVar("day", default=None)  # the day that templates write; None: today, in UTC


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    continue_final: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Returns the text of a conversation, as the model's chat template writes it.

    add_generation_prompt: the text ends with the tokens that precede an answer.
    continue_final: the text ends inside the last message, which the model is to continue.
    tools: JSON schemas of functions that the template may offer to the model.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{tokenizer.called} has no chat template, but the data are conversations: add chat_template.jinja to it, "
            "or give plain-text prompts with data.chat=false"
        )
    if not messages:
        raise UserError("a conversation without messages cannot be rendered: remove it")
    plain = [_plain(message) for message in messages]
    if continue_final:
        if not isinstance(plain[-1].get("content"), str):
            raise UserError("the last message has no text that could be continued: end with one that has")
        plain[-1] |= {"content": f"{plain[-1]['content']}{_MARK} "}
    own = {"messages": plain, "tools": None if tools is None else [dict(tool) for tool in tools]}
    own |= {"add_generation_prompt": add_generation_prompt}
    text = _render(tokenizer.chat_template, {**tokenizer.special_tokens, **own})
    if not continue_final:
        return text
    head, mark, tail = text.rpartition(_MARK)
    if not mark:
        raise UserError("the chat template does not show the last message, so it cannot be continued")
    return head if tail.startswith(" ") else head.rstrip()


def _plain(message: Message) -> dict[str, Any]:
    """Returns the message for a template: keys that have a value, and the reasoning under all usual names."""
    message = {key: value for key, value in message.items() if value is not None}
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
