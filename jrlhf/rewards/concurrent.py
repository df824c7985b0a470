"""`ConcurrentWorker`: the process of a reward function, as its parent sees it."""

import contextlib
import itertools
import json
import select
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from jrlhf.run.child import GRACE, Worker, receive, send

STALL = 3600.0  # seconds in which the rest of an answer must come
NUMBER = struct.Struct(">Q")  # of a request, before its body


class ConcurrentWorker(Worker):
    """A `Worker` that may work at several requests, from any threads, and answers them in any order.

    Requests have numbers, which the answers repeat: {"number", ...}. A worker that hangs or ends fails all of them.
    """

    def __init__(self, module: str, environment: Mapping[str, str], log: Callable[[bytes], None]):
        super().__init__(module, environment, log)
        self._sending, self._numbers = threading.Lock(), itertools.count()
        self._waiting = dict[int, Future[Mapping[str, Any]]]()
        self._gone = threading.Event()
        self._answers = self._channel.dup()  # which shares O_NONBLOCK, that every timeout sets
        self._answers.settimeout(STALL)
        threading.Thread(target=self._receive, daemon=True).start()

    def ended(self, seconds: float = 0.0) -> bool:
        return self._gone.wait(max(seconds, 0.0))

    def request(self, body: bytes, seconds: float) -> Mapping[str, Any]:
        deadline, number = time.monotonic() + seconds, next(self._numbers)
        answer = self._waiting[number] = Future[Mapping[str, Any]]()
        try:
            if self._gone.is_set():  # asked after the number was added, and set before all numbers fail
                raise ConnectionError
            with self._sending, contextlib.suppress(BrokenPipeError):
                self._channel.settimeout(seconds + GRACE)
                send(self._channel, NUMBER.pack(number) + body)
            return answer.result(max(0.0, deadline + GRACE - time.monotonic()))
        except OSError:  # a timeout, or the channel's end
            return self._death(seconds, late=time.monotonic() >= deadline)
        except (OverflowError, ValueError) as error:
            self.kill()
            return {"failure": "crash", "detail": str(error)}
        finally:
            self._waiting.pop(number, None)

    def dismiss(self) -> None:
        with contextlib.suppress(OSError), self._sending:
            self._channel.settimeout(0)
            send(self._channel, NUMBER.pack(next(self._numbers)))

    def _receive(self) -> None:
        """Hands out answers, in a thread, until the channel ends."""
        reason: Exception = ValueError("wrote into the channel of its answers")
        (arrival := select.poll()).register(self._answers, select.POLLIN)
        try:
            while True:
                arrival.poll()
                answer = json.loads(receive(self._answers, longest=self.longest))
                if (waiting := self._waiting.get(answer["number"])) is not None:  # else it was given up
                    waiting.set_result(answer)
        except (OSError, OverflowError) as error:
            reason = error
        except (ValueError, KeyError, TypeError):
            pass  # no answer of ours
        self._answers.close()
        self._gone.set()
        for waiting in [*self._waiting.values()]:
            if not waiting.done():
                waiting.set_exception(reason)
