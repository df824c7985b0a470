"""Requests to other machines: each has a deadline, and a user who waits is told what for."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

NOTICE = 3.0  # seconds without a first answer after which the waiting user is told
SILENCE = {"GET": 10.0, "HEAD": 10.0}  # seconds without a byte after which a request to the hub fails
_SILENCE_OF_CHANGES = 60.0  # the same for other methods: a commit of many files takes the hub some time
_HURRIED, _AGAIN = 1.0, 120.0  # such seconds of a hub that was silent in the last `_AGAIN` seconds
_silent = -_AGAIN  # the time of the last silence


def within(seconds: float, request: Callable[[], T], notice: Callable[[], object] = lambda: None) -> T:
    """Calls `request` in a thread; raises TimeoutError if it takes longer. Libraries do so for some calls only.

    notice: called once if there is no answer for a while.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    if not wait([answer], min(seconds, NOTICE)).done:
        notice()
        if not wait([answer], max(seconds - NOTICE, 0.0)).done:
            raise TimeoutError(f"no answer within {seconds:g} seconds")
    return answer.result()


@contextmanager
def hub_requests() -> Iterator[None]:
    """Gives all requests to the Hugging Face hub in the block a deadline, which most of its functions do not have.

    A transfer may take as long as it needs; it fails when no byte has come or gone for a while. The user is told once
    if the first answer takes long. After a silence nothing is asked again, and the library uses what is in its cache;
    in later blocks requests then wait only shortly.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    global _silent
    session, first, hurried = get_session(), iter([True]), time.monotonic() - _silent < _AGAIN
    asked: list[tuple[float, float]] = []  # time and deadline of the newest request, if it has no body and no answer
    sentence = f"waiting for the hub at {constants.ENDPOINT} to answer"
    notice = threading.Timer(NOTICE, print, (sentence,), {"file": sys.stderr, "flush": True})
    notice.daemon = True

    def ask(request: Any) -> None:
        for then, seconds in asked:
            if time.monotonic() - then >= seconds:
                raise OfflineModeIsEnabled(f"{constants.ENDPOINT} gave no answer within {seconds:g} seconds")
        seconds = SILENCE.get(request.method, _SILENCE_OF_CHANGES)
        seconds = min(seconds, _HURRIED) if hurried else seconds
        given = request.extensions.get("timeout", {})
        limits = {part: min(given.get(part) or seconds, seconds) for part in ("connect", "read", "write", "pool")}
        request.extensions["timeout"] = limits
        counts = request.method in SILENCE and limits["read"] == seconds  # not of a smaller deadline of its own
        asked[:] = [(time.monotonic(), seconds)] if counts else []
        if next(first, False):
            notice.start()

    def answer(_: Any) -> None:
        asked.clear()
        notice.cancel()

    hooks = session.event_hooks
    session.event_hooks = {"request": [*hooks["request"], ask], "response": [*hooks["response"], answer]}
    try:
        yield
    finally:
        session.event_hooks = hooks
        notice.cancel()
        _silent = time.monotonic() if asked else -_AGAIN
