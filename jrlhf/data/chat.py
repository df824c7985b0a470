"""Renders conversations as text by a model's own chat template, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Message
from jrlhf.errors import UserError

_REASONING = ("reasoning_content", "thinking", "reasoning")
# Written behind a message that is to be continued, to find its end in the rendered text. The blank behind it shows
# whether the template strips its messages.
_MARK = "\ue000\ue001\ue000"


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    continue_final: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Returns the text of a conversation, as the model's chat template writes it.

    add_generation_prompt: ends with what comes before an answer.
    continue_final: ends inside the last message, which the model is to continue.
    tools: JSON schemas of functions that the template may offer to the model.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{tokenizer.called} has no chat template, but the data are conversations: add chat_template.jinja to it, "
            "or give plain-text prompts"
        )
    if not messages:
        raise UserError("a conversation without messages cannot be rendered: remove it")
    if add_generation_prompt and continue_final:
        raise ValueError("add_generation_prompt begins an answer and continue_final goes on with one: choose one")
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


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> list[int]:
    """Returns the token ids of `render_chat`'s text. The template writes its special tokens itself; none are added."""
    return tokenizer.encode(render_chat(tokenizer, messages, **options))


def _plain(message: Message) -> dict[str, Any]:
    """Returns the message for a template: the keys that have a value, and its reasoning under every usual name."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _render(source: str, variables: Mapping[str, Any]) -> str:
    try:
        return _compiled(source).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno})") from error
    except jinja2.exceptions.SecurityError as error:
        raise UserError(f"the chat template tries to do what templates must not: {error}") from error
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template refuses the messages: {error.message}") from error
    except Exception as error:  # whatever an expression in a template may raise
        raise UserError(f"the chat template fails on the messages: {type(error).__name__}: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`: some templates mark the words of the assistant so."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter writes `<` as `\\u003c`, for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(source)
