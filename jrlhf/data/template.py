"""The process that renders chat templates, which are untrusted programs and may use much time and memory.

    parent: a pickle of (source, variables, day)     worker: {"text"} | {"bad": what is wrong}

Jinja's sandbox refuses access to anything outside of the template; the process limits time and memory.
"""

import contextlib
import json
import pickle
import resource
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jrlhf.run.child import channel_to_parent, receive, send

SECONDS = 20.0  # limit for one text, which usually takes milliseconds, and for the process's start
MEMORY = 1 << 30  # memory limit of the process in bytes
LONGEST = 1 << 25  # maximum number of characters of a text


def main(descriptor: int) -> None:
    """Answers the parent at the other end of the socket `descriptor`."""
    channel = channel_to_parent(descriptor)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with contextlib.suppress(ConnectionError):
        while True:
            answer = _render(*pickle.loads(receive(channel)))
            send(channel, json.dumps(answer).encode())


def _render(source: str, variables: Mapping[str, Any], day: str | None) -> dict[str, str]:
    """Answers a request. day: the date that the template writes, in ISO's form; None: the present time, in UTC."""
    now = datetime.now(UTC) if day is None else datetime.fromisoformat(day)
    try:
        text = _compiled(source).render({**variables, "strftime_now": lambda form: now.strftime(form)})
        return {"text": text} if len(text) <= LONGEST else {"bad": f"writes more than {LONGEST} characters"}
    except jinja2.TemplateSyntaxError as error:
        return {"bad": f"is not valid Jinja: {error.message} (line {error.lineno})"}
    except jinja2.exceptions.SecurityError as error:
        return {"bad": f"tries to do what templates must not: {error}"}
    except jinja2.TemplateError as error:
        return {"bad": f"refuses the messages: {error.message}"}
    except MemoryError:
        return {"bad": f"takes more than {MEMORY >> 30} GiB of memory"}
    except Exception as error:  # an expression in a template may raise anything
        return {"bad": f"fails on the messages: {type(error).__name__}: {error}"}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`, with which some templates mark the assistant's words."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Replaces Jinja's own filter, which writes `<` as `\\u003c` for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)
