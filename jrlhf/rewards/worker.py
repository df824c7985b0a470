"""The worker process of a reward function: receives calls, answers in plain numbers. Standard library only.

The wire is a socket whose other end only the parent holds: frames of 4 bytes of length and a body. Calls come as
pickles (a dataset's columns may hold anything, and the parent is trusted); answers go as JSON, so that the parent never
unpickles anything that the function made.

    parent: {spec, options, start_deadline, deadline}   worker: {"ready": what the parent must know} | {"bad": text}
    parent: {arguments, lengths, seed}                  worker: {"results"} | {"failure", "detail"} | {"bad": text}
    parent: None                                        worker: leaves, running its exit handlers

`arguments` are those of one call, or a list of them for a function of single samples. A result is a number, a list of
numbers (a score a token), {"score", "extras"}, or {"failure": kind, "detail": text}; a failure in place of the results
is one of all samples. "bad" is a UserError that the function raised: bad input, which stops the run.
"""

import asyncio
import contextlib
import faulthandler
import hashlib
import inspect
import itertools
import json
import math
import os
import pickle
import random
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jrlhf.errors import UserError
from jrlhf.rewards.user_code import explain, load

LENGTH = struct.Struct(">I")
GIVEN = {  # what we pass by ourselves, by the call's style; all else is a column
    "trl": ("prompts", "completions", "completion_ids", "log_extra", "log_metric"),
    "verl": ("solution_str",),
}
HOOKS = ("log_extra", "log_metric")  # TRL's: further numbers to log


def main(descriptor: int) -> None:
    """Serves the parent at the other end of the socket `descriptor` until it says goodbye or is gone."""
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    _keep_to_parent(channel)
    stderr = os.dup(2)  # the function may replace its own
    faulthandler.enable(stderr)
    setup = pickle.loads(_receive(channel))
    with asyncio.Runner() as loop:
        try:
            with _limit(setup["start_deadline"], stderr):
                function = _prepare(setup["spec"], setup["options"])
        except UserError as error:
            _send(channel, {"bad": str(error)})
            return
        _send(channel, {"ready": function.facts})
        while True:
            body = _receive(channel)
            with _limit(setup["deadline"], stderr):
                answer = _serve(function, loop, body, setup["deadline"])
            if answer is None:
                return
            _send(channel, answer)


def _serve(function: "Function", loop: asyncio.Runner, body: bytes, deadline: float) -> dict[str, Any] | None:
    """The answer to a call; None to a goodbye. Whatever the function raises, sys.exit included, is an answer."""
    try:
        call = pickle.loads(body)
        return None if call is None else _answer(function, loop, call, deadline)
    except UserError as error:
        return {"bad": str(error)}
    except BaseException as error:
        return _failure("exception", explain(error))


def _keep_to_parent(channel: socket.socket) -> None:
    """Lives exactly as long as the parent wants.

    Ctrl-C and a scheduler's SIGTERM reach many processes at once, but only the parent knows when to stop: they do
    nothing here. (Handlers, not SIG_IGN, so that programs that the function starts are not deaf to them.) The parent
    stops this process by SIGKILL, and should it be killed itself, then a thread here sees its end of the socket close
    and ends the process group. A call that holds the interpreter lock keeps that thread from running; `_limit` ends
    such a call at its deadline.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)

    def in_forked_child() -> None:
        channel.close()  # or the parent would not see this process end while the child lives
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    def watch() -> None:
        hangup = select.poll()
        hangup.register(channel, 0)  # POLLHUP and POLLERR are always reported
        hangup.poll()
        os.killpg(0, signal.SIGKILL)

    for number in numbers:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=in_forked_child)
    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _limit(seconds: float, stderr: int) -> Iterator[None]:
    """Prints the stack and leaves after so many seconds. A thread of C's: it needs no interpreter lock."""
    owner = os.getpid()
    faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    try:
        yield
    finally:
        if os.getpid() != owner:
            os._exit(1)  # a child that the function forked and let return: it must not answer too
        faulthandler.cancel_dump_traceback_later()


# The function


@dataclass(frozen=True)
class Function:
    """The function with its options, and what the parent must know to call it."""

    call: Callable[..., Any]
    hooks: tuple[str, ...]
    facts: dict[str, Any]


def _prepare(spec: str, options: Mapping[str, Any]) -> Function:
    found = load(spec, f"reward function {spec!r}")
    function = found.function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward function {spec!r} has no signature to read: wrap it in a def") from error
    parameters = signature.parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind == p.VAR_KEYWORD for p in parameters)
    style = "verl" if "solution_str" in named else "trl" if "completions" in named else None
    if style is None or any(p.kind == p.POSITIONAL_ONLY for p in parameters):
        raise UserError(
            f"reward function {spec!r} has the signature {signature}: it must take (prompts, completions, **columns) "
            "or (data_source, solution_str, ground_truth, extra_info), by name"
        )
    for option in options:
        if option in GIVEN[style]:
            raise UserError(f"options.{option} of reward function {spec!r}: the program gives it, remove the option")
        if option not in named and not open_ended:
            raise UserError(f"options.{option}: reward function {spec!r} has the parameters {', '.join(named)}")
    columns = [p for p in named.values() if p.name not in GIVEN[style] and p.name not in options]
    facts = {
        "style": style,
        "async": any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))),  # noqa: B004
        "names": list(named),
        "open_ended": open_ended,
        "columns": [p.name for p in columns],
        "required": [p.name for p in columns if p.default is p.empty],
        "file": found.file,
        "sha256": found.sha256,
    }
    hooks = tuple(h for h in HOOKS if style == "trl" and h not in options and (open_ended or h in named))
    return Function(partial(function, **options), hooks, facts)


def _answer(function: Function, loop: asyncio.Runner, call: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    _seed(call["seed"])
    arguments, lengths = call["arguments"], call["lengths"]
    if isinstance(arguments, list):
        return {"results": loop.run(_together(function.call, arguments, lengths, deadline))}
    logged: dict[str, list[Any]] = {}
    hooks = {
        "log_extra": lambda column, values: logged.update({str(column): list(values)}),
        "log_metric": lambda name, value: logged.update({str(name): [value] * len(lengths)}),
    }
    values = function.call(**arguments, **{name: hooks[name] for name in function.hooks})
    if inspect.isawaitable(values):
        values = loop.run(_finish(values))
    if function.facts["style"] == "verl":
        return {"results": [_result(values, lengths[0])]}
    values = _listed(values, len(lengths))
    if isinstance(values, dict):
        return values
    results = [_result(value, length) for value, length in zip(values, lengths, strict=True)]
    extras = [{name: x[row] for name, x in logged.items() if row < len(x)} for row in range(len(lengths))]
    return {"results": [_with_extras(*pair) for pair in zip(results, map(_extras, extras), strict=True)]}


async def _together(call: Callable, arguments: list[Mapping], lengths: Sequence[int], deadline: float) -> list[Any]:
    """The results of a coroutine function of single samples: all run at once, each one's failure is its own."""
    seconds = 0.9 * deadline  # before the process's deadline, which would take all of them

    async def one(arguments: Mapping[str, Any], length: int) -> Any:
        timeout = asyncio.timeout(seconds)
        try:
            async with timeout:
                return _result(await call(**arguments), length)
        except UserError:
            raise
        except BaseException as error:
            if timeout.expired():
                return _failure("hang", f"no answer within {seconds:g} s")
            return _failure("exception", explain(error))

    return await asyncio.gather(*(one(*pair) for pair in zip(arguments, lengths, strict=True)))


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def _seed(seed: str) -> None:
    """The random state that a call starts from: a function of the run's seed, the step and the sample alone."""
    random.seed(seed)
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(number)


# From what it returned to plain numbers


def _listed(values: Any, count: int) -> list[Any] | dict[str, str]:
    """The values as a list of `count`, or the failure of all of them."""
    if hasattr(values, "tolist"):
        values = values.tolist()  # arrays and tensors
    if isinstance(values, (str, bytes, Mapping, set, frozenset)) or not hasattr(values, "__iter__"):
        return _failure("type", f"returned {_show(values)}, not a list of {count} scores")
    listed = list(itertools.islice(values, count + 1))
    if len(listed) != count:
        found = f"more than {count}" if len(listed) > count else str(len(listed))
        return _failure("length", f"returned {found} scores for {count} samples")
    return listed


def _result(value: Any, length: int) -> Any:
    """A sample's score, or its scores token by token, or why there is none."""
    if isinstance(value, Mapping):
        if "score" not in value:
            return _failure("type", f"returned {_show(value)}, which has no 'score'")
        return _with_extras(_result(value["score"], length), _extras({k: v for k, v in value.items() if k != "score"}))
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        if len(value) != length:
            return _failure("length", f"returned {len(value)} scores for a response of {length} tokens")
        scores = [_score(x) for x in value]
        return next((score for score in scores if isinstance(score, dict)), scores)
    return _score(value)


def _score(value: Any) -> float | dict[str, str]:
    if value is None:
        return _failure("none", "returned None")
    number = _number(value)
    if number is None:
        return _failure("type", f"returned {_show(value)}, not a number")
    if math.isnan(number):
        return _failure("nan", "returned NaN")
    if math.isinf(number):
        return _failure("infinite", f"returned {_show(value)}")
    return number


def _number(value: Any) -> float | None:
    """A number of Python's, NumPy's or a tensor's; booleans are 0 and 1. None for all else."""
    if not isinstance(value, (bool, int, float)) and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def _extras(values: Mapping[Any, Any]) -> dict[str, float]:
    """Those of the values that are finite numbers."""
    numbers = {str(name): _number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}


def _with_extras(result: Any, extras: Mapping[str, float]) -> Any:
    if not extras or (isinstance(result, dict) and "failure" in result):
        return result
    if isinstance(result, dict):
        return {"score": result["score"], "extras": result["extras"] | extras}
    return {"score": result, "extras": extras}


def _failure(kind: str, detail: str) -> dict[str, str]:
    return {"failure": kind, "detail": detail}


def _show(value: Any) -> str:
    """A short text of anything."""
    try:
        text = repr(value)
    except Exception:
        text = "something that cannot be printed"
    return f"{type(value).__name__} {text[:100]}"


# The wire


def _send(channel: socket.socket, message: Any) -> None:
    body = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(body)) + body)


def _receive(channel: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_exactly(channel, LENGTH.size))
    return _exactly(channel, length)


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = channel.recv(min(count, 1 << 20))
        if not part:
            os.killpg(0, signal.SIGKILL)  # the parent is gone
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
