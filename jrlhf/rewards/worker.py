"""The worker process of a reward function: receives calls, answers in plain numbers. Standard library only.

The channel is a socket whose other end only the parent has. A frame is 4 bytes of length and a body. Requests are
pickles (a dataset's columns may contain anything, and the parent is trusted). Answers are JSON, so that the parent
never unpickles anything that the function made.

    parent: {spec, options, deadlines, shipped, client} worker: {"ready": facts about the function} | {"bad": text}
    parent: {arguments, lengths, seed, state}           worker: {"results"} | {"failure", "detail"} | {"bad": text}
    parent: nothing                                     worker: exits, running its exit handlers

Before each body is a number, which the answer repeats. A coroutine function gets calls before it has answered others.

`arguments` are those of one call, or a list with those of each call for a coroutine function of single samples. A
result is {"score", "extras"}, with one number, one number per token, or None, or {"failure": kind, "detail": text}. A
failure in place of the results concerns all samples. "bad" is a UserError that the function raised; it stops the run.
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
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from jrlhf.errors import UserError
from jrlhf.rewards.concurrent import NUMBER
from jrlhf.rewards.failure import Failure
from jrlhf.rewards.user_code import UserCode, explain, load, received
from jrlhf.run.child import channel_to_parent, receive, send

TEXTS = {"trl": ("prompts", "completions", "completion_ids"), "verl": ("solution_str",)}  # by the style of the call
# Functions that log further numbers, and the progress of the run.
HOOKS = {"trl": ("log_extra", "log_metric", "trainer_state"), "verl": ()}
# Parameters that the program passes by itself; all others are columns.
GIVEN = {style: (*TEXTS[style], *HOOKS[style]) for style in TEXTS}
LARGEST = (2 - 2**-23) * 2.0**127  # the largest float32: training uses scores in float32


def main(descriptor: int) -> None:
    """Serves the parent at the other end of the socket `descriptor` until it sends None or is gone."""
    channel = channel_to_parent(descriptor)
    stderr = os.dup(2)  # the function may replace sys.stderr
    faulthandler.enable(stderr)
    with asyncio.Runner() as loop:
        try:
            number, body = _read(channel)
            setup = pickle.loads(body)
            with _limit(setup["start_deadline"], stderr):
                called = f"reward function {setup['spec']!r}"
                shipped = setup["shipped"]
                code = load(setup["spec"], called) if shipped is None else received(shipped, called)
                function = _prepare(code, called, setup["options"], setup["client"])
            _write(channel, number, {"ready": function.facts})
            if function.facts["asynchronous"]:
                loop.run(_serve_together(function, channel, setup["deadline"], stderr))
                return
            while (call := _read(channel))[1]:
                number, body = call
                with _limit(setup["deadline"], stderr):
                    answer = _serve(function, loop, body, setup["deadline"])
                _write(channel, number, answer)
        except UserError as error:
            _write(channel, number, {"bad": str(error)})
        except ConnectionError:  # the parent is gone
            os.killpg(0, signal.SIGKILL)


def _read(channel: socket.socket) -> tuple[int, bytes]:
    frame = receive(channel)
    return NUMBER.unpack_from(frame)[0], frame[NUMBER.size :]


def _write(channel: socket.socket, number: int, answer: Mapping[str, Any]) -> None:
    send(channel, json.dumps({"number": number, **answer}).encode())


@contextlib.contextmanager
def _limit(seconds: float, stderr: int) -> Iterator[None]:
    """Prints the stack and exits after `seconds`. faulthandler's C thread does it: it needs no interpreter lock."""
    owner = os.getpid()
    faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    try:
        yield
    finally:
        if os.getpid() != owner:
            os._exit(1)  # a child process that the function forked and that returned here must not answer, too
        faulthandler.cancel_dump_traceback_later()


class InProcess:
    """A `Worker` without a process: calls the function here. It cannot end a call, and a crash ends the program."""

    _calling = threading.Lock()  # calls seed the random state, of which a process has only one

    def __init__(self, code: UserCode, *process: Any):
        self._code, self._function = code, None
        self._loop = asyncio.Runner()  # one for all calls: a function's locks and clients are bound to a loop

    def request(self, body: bytes, seconds: float) -> Mapping[str, Any]:
        """Returns the answer to a request, without a deadline."""
        try:
            if self._function is None:
                setup = pickle.loads(body)
                called = f"reward function {setup['spec']!r}"
                self._function = _prepare(self._code, called, setup["options"], setup["client"])
                return {"ready": self._function.facts}
            with self._calling:
                return _serve(self._function, self._loop, body, math.inf)
        except UserError as error:
            return {"bad": str(error)}

    def ended(self, seconds: float = 0.0) -> bool:
        return False

    def dismiss(self) -> None: ...

    def interrupt(self) -> None: ...

    def kill(self) -> None:
        def close() -> None:
            client, self._function = self._function and self._function.client, None
            if client is not None:
                self._loop.run(client.close())
            self._loop.close()

        closing = threading.Thread(target=close)  # this thread may run a loop
        closing.start()
        closing.join()


class Function(NamedTuple):
    """The function with its options bound, the `HOOKS` that it takes, facts for the parent, and its `ChatClient`."""

    call: Callable[..., Any]
    hooks: tuple[str, ...]
    facts: dict[str, Any]
    client: Any


def _prepare(
    code: UserCode, called: str, options: Mapping[str, Any], client: Mapping[str, Any] | None = None
) -> Function:
    """client: the arguments of the function's `ChatClient`; None: it has none."""
    function, file, sha256, modules = code
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"{called} has no signature to read: wrap it in a def") from error
    parameters = signature.parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind == p.VAR_KEYWORD for p in parameters)
    style = "verl" if "solution_str" in named else "trl" if "completions" in named else None
    if style is None or any(p.kind == p.POSITIONAL_ONLY for p in parameters):
        raise UserError(
            f"{called} has the signature {signature}: it must take (prompts, completions, **columns) or (data_source, "
            "solution_str, ground_truth, extra_info), by name"
        )
    asynchronous = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    given = GIVEN[style]
    if client is not None:
        given += ("client",)
        if "client" not in named and not open_ended:
            raise UserError(f"{called} has no parameter client: add it, or leave the section client out")
        if not asynchronous:
            raise UserError(f"{called} must be an `async def` to await its client: make it one")
    for option in options:
        if option in given:
            raise UserError(f"options.{option} of {called}: the program gives it, remove the option")
        if option not in named and not open_ended:
            raise UserError(f"options.{option}: {called} has the parameters {', '.join(named)}")
    # A dataset's column called `wrong` is no option of a built-in function.
    ours = getattr(function, "__module__", None) == "jrlhf.rewards.builtin"
    columns = [p for p in named.values() if p.name not in given and p.name not in options]
    columns = [p for p in columns if not (ours and p.kind == p.KEYWORD_ONLY)]
    facts = {
        "style": style,
        "asynchronous": asynchronous,
        "texts": [name for name in TEXTS[style] if open_ended or name in named],
        "open_ended": open_ended,
        "columns": [p.name for p in columns],
        "required": [p.name for p in columns if p.default is p.empty],
        "file": file,
        "sha256": sha256,
        "modules": modules,
    }
    hooks = tuple(name for name in HOOKS[style] if open_ended or name in named)
    if client is None:
        return Function(partial(function, **options), hooks, facts, None)
    from jrlhf.rewards.client import ChatClient

    chat = ChatClient(**client)
    return Function(partial(function, **options, client=chat), hooks, facts, chat)


def _serve(function: Function, loop: asyncio.Runner, body: bytes, deadline: float) -> dict[str, Any]:
    """Answers a call. Whatever the function raises, sys.exit included, becomes an answer."""
    if function.facts["asynchronous"]:
        return loop.run(_answer(function, body, deadline, lambda: True))
    try:
        call = pickle.loads(body)
        _seed(call["seed"])
        logged: dict[str, list[Any]] = {}
        values = _called(function, call, logged)
        if inspect.isawaitable(values):
            values = loop.run(_finish(values))
        return {"results": _results(function, call["lengths"], values, logged)}
    except UserError as error:
        return {"bad": str(error)}
    except BaseException as error:
        return _failure(error)


async def _serve_together(function: Function, channel: socket.socket, seconds: float, stderr: int) -> None:
    """Answers the calls of a coroutine function as they come, several at a time, until the parent ends them.

    Like `_limit`, it exits once a call takes `seconds`, which happens only where the function does not await: limits of
    single samples are shorter.
    """
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    limits, tasks, owner = dict[int, float](), set[asyncio.Task[None]](), os.getpid()

    def arm() -> None:
        faulthandler.cancel_dump_traceback_later()
        if limits:
            left = max(min(limits.values()) - time.monotonic(), 1e-3)
            faulthandler.dump_traceback_later(left, exit=True, file=stderr)

    async def answer(number: int, body: bytes) -> None:
        try:
            result = await _answer(function, body, seconds, lambda: len(limits) == 1)
        finally:
            if os.getpid() != owner:
                os._exit(1)  # a child process that the function forked and that returned here must not answer, too
            limits.pop(number)
            arm()
        _write(channel, number, result)

    def begin(number: int, body: bytes) -> None:
        if not body:
            over.set()
            return
        limits[number] = time.monotonic() + seconds
        arm()
        tasks.add(task := loop.create_task(answer(number, body)))
        task.add_done_callback(tasks.discard)

    def read() -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the parent is gone; or this loop, after the end
            body = b"."
            while body:
                number, body = _read(channel)
                loop.call_soon_threadsafe(begin, number, body)

    threading.Thread(target=read, daemon=True).start()
    await over.wait()


async def _answer(function: Function, body: bytes, deadline: float, is_alone: Callable[[], bool]) -> dict[str, Any]:
    """Answers a call of a coroutine function, as `_serve`. is_alone: whether no other call is at work."""
    try:
        call = pickle.loads(body)
        try:
            if isinstance(call["arguments"], list):
                return {"results": await _together(function.call, call, 0.9 * deadline)}
            _seed(call["seed"])
            logged: dict[str, list[Any]] = {}
            timeout = asyncio.timeout(0.9 * deadline)
            try:
                async with timeout:
                    values = await _called(function, call, logged)
            except TimeoutError:
                if timeout.expired():
                    raise Failure("hang", f"no answer within {0.9 * deadline:g} s") from None
                raise
            return {"results": _results(function, call["lengths"], values, logged)}
        finally:
            if is_alone() and function.client is not None:
                await function.client.settle()
    except UserError as error:
        return {"bad": str(error)}
    except BaseException as error:
        return _failure(error)


def _called(function: Function, call: Mapping[str, Any], logged: dict[str, list[Any]]) -> Any:
    """Calls the function with the arguments and the hooks of a call. logged: gets the numbers that it logs."""
    count = len(call["lengths"])
    hooks = {
        "log_extra": lambda column, values: logged.update({str(column): list(values)}),
        "log_metric": lambda name, value: logged.update({str(name): [value] * count}),
        "trainer_state": SimpleNamespace(**call["state"]),
    }
    return function.call(**call["arguments"], **{name: hooks[name] for name in function.hooks})


def _results(function: Function, lengths: Sequence[int], values: Any, logged: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Returns the result of each sample of a call."""
    if function.facts["style"] == "verl":
        return [_result(values, lengths[0])]
    values = _listed(values, len(lengths))
    extras = [{name: x[row] for name, x in logged.items() if row < len(x)} for row in range(len(lengths))]
    return [_result(*row) for row in zip(values, lengths, extras, strict=True)]


async def _together(function: Callable, call: Mapping[str, Any], seconds: float) -> list[Any]:
    """Runs a coroutine function of single samples on all samples at once. A failure concerns one sample.

    seconds: limit of one sample; below the deadline of the process, which would fail all of them.
    """
    seeds = iter([call["seed"]])  # for the first sample: the others begin directly after it, before other calls

    async def one(arguments: Mapping[str, Any], length: int) -> Any:
        for seed in seeds:
            _seed(seed)
        timeout = asyncio.timeout(seconds)
        try:
            async with timeout:
                return _result(await function(**arguments), length)
        except UserError:
            raise
        except BaseException as error:
            return _failure(Failure("hang", f"no answer within {seconds:g} s") if timeout.expired() else error)

    return await asyncio.gather(*map(one, call["arguments"], call["lengths"]))


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def _seed(seed: str) -> None:
    """Sets the random state of a call, which depends only on the run's seed, the step and the sample."""
    random.seed(seed)
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(number)


# Conversion of returned values to plain numbers


def _failure(error: BaseException) -> dict[str, str]:
    if isinstance(error, Failure):
        return {"failure": error.kind, "detail": error.detail}
    return {"failure": "exception", "detail": explain(error)}


def _listed(values: Any, count: int) -> list[Any]:
    """Returns the values of a batch as a list of `count`."""
    values = _unwrapped(values)
    if values is None:
        raise Failure("none", f"returned None, not a list of {count} scores: has it a return?")
    if isinstance(values, (str, bytes, Mapping, set, frozenset)) or not hasattr(values, "__iter__"):
        raise Failure("type", f"returned {_show(values)}, not a list of {count} scores")
    listed = list(itertools.islice(values, count + 1))
    if len(listed) != count:
        number = f"more than {count}" if len(listed) > count else str(len(listed))
        raise Failure("length", f"returned {number} scores for {count} samples")
    return listed


def _result(value: Any, length: int, extras: Mapping[Any, Any] | None = None) -> dict[str, Any]:
    """Returns a sample's score, or its scores token by token, with extra numbers; or why there is none."""
    numbers = _numbers(extras or {})
    try:
        if isinstance(value, Failure):  # of one sample of a batch, as gather(..., return_exceptions=True) returns it
            raise value
        while isinstance(value, Mapping):
            if "score" not in value:
                raise Failure("type", f"returned {_show(value)}, which has no 'score'")
            numbers = _numbers({k: v for k, v in value.items() if k != "score"}) | numbers
            value = value["score"]
        value = _unwrapped(value)
        if value is None:
            return {"score": None, "extras": numbers}
        if not isinstance(value, (list, tuple)):
            return {"score": _score(value), "extras": numbers}
        if len(value) != length:
            raise Failure("length", f"returned {len(value)} scores for a response of {length} tokens")
        scores = [_score(x) for x in value]
        _score(math.fsum(scores))  # the sum must be a valid score, too
        return {"score": scores, "extras": numbers}
    except Failure as failure:
        return _failure(failure)


def _score(value: Any) -> float:
    if value is None:
        raise Failure("none", "returned None")
    number = _number(value)
    if number is None:
        raise Failure("type", f"returned {_show(value)}, not a number")
    if math.isnan(number):
        raise Failure("nan", "returned NaN")
    if abs(number) > LARGEST:
        raise Failure("infinite", f"returned {_show(value)}, which float32 does not hold")
    return number


def _unwrapped(value: Any) -> Any:
    """Converts an array or a tensor to lists and numbers; returns everything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(value: Any) -> float | None:
    """Converts a number of Python, NumPy or a tensor to a float; booleans become 0 and 1. None: not a number."""
    value = _unwrapped(value)
    try:
        return float(value) if isinstance(value, (bool, int, float)) else None
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def _numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Returns the finite numbers among the values."""
    numbers = {str(name): _number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}


def _show(value: Any) -> str:
    """Returns a short text of anything."""
    try:
        text = repr(value)
    except Exception:
        text = "something that cannot be printed"
    return f"{type(value).__name__} {text[:100]}"
