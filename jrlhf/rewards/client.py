"""`ChatClient`: an OpenAI-compatible chat endpoint for reward functions, and `check_endpoint`, before a run.

Imported only where a config has `client`; needs the extra `judge`. Answers are stored beside the run's logs.
"""

import asyncio
import contextlib
import email.utils
import hashlib
import itertools
import json
import math
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrlhf.errors import UserError, printable
from jrlhf.rewards.failure import Failure

try:
    import httpx2 as httpx
except ImportError as error:
    raise UserError("a reward's client needs its extra: pip install 'jrlhf[judge]'") from error

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before the first retry, doubled for each next one up to the second
QUOTED = 200  # characters of an answer in a message


def check_endpoint(settings: Mapping[str, Any], called: str) -> str:
    """Returns the model to ask: the one of the settings, or else the only one that the endpoint lists.

    Asks for the list once. settings: the section `client` of a config. called: the reward, for messages.

    Raises UserError if the endpoint cannot be reached, refuses the key, or does not list the model.
    """
    place, model, name = f"client.url={settings['url']} of {called}", settings["model"], settings["key_env"]
    key = _key(name)
    if name is not None and not re.fullmatch("[!-~]+", key):  # what no header may have would be quoted in an error
        state = "has a blank or no ASCII in it" if key else "is not set"
        raise UserError(f"the environment variable that client.key_env of {called} names {state}: set it to the key")
    try:
        with httpx.Client(headers=_headers(key), timeout=settings["timeout"]) as client:
            answer = client.get(f"{settings['url']}/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = f"no answer within {settings['timeout']:g} s" if _is_late(error) else _explain(error)
        raise UserError(f"{place} cannot be reached ({reason}): start the server, or correct the address") from error
    if answer.status_code in (401, 403):
        remedy = "give the name of its variable as client.key_env" if name is None else "correct the variable's value"
        raise UserError(f"{place} refuses the key (status {answer.status_code}): {remedy}")
    if answer.status_code != 200:
        raise UserError(f"{place}/models answers with status {answer.status_code}: an address usually ends in /v1")
    try:
        listed = [str(entry["id"]) for entry in answer.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{place}/models lists no models: name an OpenAI-compatible endpoint") from error
    shown = ", ".join(listed[:10]) + ", ..." * (len(listed) > 10) or "none"
    if model is None and len(listed) != 1:
        raise UserError(f"{place} lists {len(listed)} models ({shown}): name one as client.model")
    if model is not None and model not in listed:
        raise UserError(f"client.model={model} of {called} is none of those that the endpoint lists: {shown}")
    return model or listed[0]


def _key(name: str | None) -> str:
    return os.environ.get(name, "").strip() if name else ""


def _headers(key: str) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


class ChatClient:
    """Asks a chat endpoint, from coroutines of one event loop.

    url: the address before /chat/completions. model: its model. key_env: the environment variable with the key, or
        None. concurrent: requests in flight at a time; others wait. timeout: seconds of one request. retries: further
        attempts after a failed connection, a timeout, and the statuses 429 and 5xx. temperature, max_tokens: of every
        request; None: the endpoint's. cache: the file of earlier answers; "": only in memory; None: answers are not
        reused.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key_env: str | None = None,
        concurrent: int = 64,
        timeout: float = 20.0,
        retries: int = 3,
        temperature: float | None = 0.0,
        max_tokens: int | None = 1024,
        cache: str | None = "",
    ):
        self._url, self._timeout, self._retries = url, timeout, retries
        options = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._options = {name: value for name, value in options.items() if value is not None}
        self._key = _key(key_env)
        limits = httpx.Limits(max_connections=concurrent, max_keepalive_connections=concurrent)
        self._http = httpx.AsyncClient(headers=_headers(self._key), timeout=None, limits=limits)
        self._slots = asyncio.Semaphore(concurrent)
        self._answers = None if cache is None else StoredAnswers(Path(cache) if cache else None)
        self._first = {} if self._answers is None else self._answers.first
        self._calls, self._numbers = dict[str, _Call](), itertools.count()  # requests in flight; keys without a cache
        self._random = random.Random()  # the global state is the function's, seeded for each call

    async def chat(self, messages: str | Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Returns the text of the answer. Equal requests in flight are sent once.

        messages: a conversation, or the text of a user's turn. options: further keys of the request, such as
        `max_tokens` or `seed`; None leaves a key of the config out.

        Raises Failure, of the kinds timeout, connection, rate_limit, server, refused, bad_json, empty, refusal, cut and
        model_changed.
        """
        body, key, model = self._request(messages, options)
        if self._answers is None:  # equal requests are meant to have answers of their own
            return await self._shared(str(next(self._numbers)), body, model)
        if (answer := self._answers.get(key)) is not None:
            return answer
        return await self._shared(key, body, model)

    def _request(self, messages: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[str, str, str]:
        """Returns the body of a request, its digest, and the model."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        given = {name: value for name, value in {**self._options, **options}.items() if value is not None}
        body = json.dumps({**given, "messages": messages}, sort_keys=True)
        return body, hashlib.sha256(f"{self._url} {body}".encode()).hexdigest(), given["model"]

    async def json(self, messages: str | Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Returns an answer that is a JSON object, which the endpoint is told to write.

        Raises Failure as `chat` does, and of the kind unparsable for an answer that is no JSON object.
        """
        options = {"response_format": {"type": "json_object"}, **options}
        text = await self.chat(messages, **options)
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(text), dict):
                return value
        if self._answers is not None:
            self._answers.forget(self._request(messages, options)[1])
        raise Failure("unparsable", f"the answer is no JSON object: {self._quoted(text)}")

    async def settle(self) -> None:
        """Ends the requests that a call has left in flight."""
        tasks = [call.task for call in self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Ends all requests and closes all connections."""
        await self.settle()
        await self._http.aclose()
        if self._answers is not None:
            self._answers.close()

    async def _shared(self, key: str, body: str, model: str) -> str:
        """Waits for the request of this key, which ends when nobody waits for it any more."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call(asyncio.ensure_future(self._store(key, body, model)))
        call.waiting += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.waiting -= 1
            if not call.waiting:
                self._calls.pop(key, None)
                call.task.cancel()
                await asyncio.wait([call.task])

    async def _store(self, key: str, body: str, model: str) -> str:
        text, answered = await self._ask(body, model)
        if self._answers is not None:
            self._answers.add(key, text, model, answered)
        return text

    async def _ask(self, body: str, model: str) -> tuple[str, str]:
        """Returns the answer's text and model, after as many attempts as it takes."""
        async with self._slots:
            for attempt in range(self._retries + 1):
                wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) * self._random.uniform(0.5, 1)
                try:
                    async with asyncio.timeout(self._timeout):
                        answer = await self._http.post(f"{self._url}/chat/completions", content=body.encode())
                except (TimeoutError, httpx.TimeoutException):
                    failure = Failure("timeout", f"{self._url} gave no answer within {self._timeout:g} s")
                except httpx.DecodingError as error:
                    raise Failure("bad_json", f"{self._url} gave an unreadable answer: {_explain(error)}") from None
                except httpx.HTTPError as error:
                    failure = Failure("connection", f"{self._url} cannot be reached: {_explain(error)}")
                else:
                    if answer.status_code == 200:
                        return self._read(answer, model)
                    failure = self._status(answer)
                    asked = _retry_after(answer.headers.get("Retry-After", ""))
                    wait = max(wait, asked)
                    if asked > self._timeout:
                        raise Failure(failure.kind, f"{failure.detail} (to be asked again in {asked:g} s)")
                if failure.kind == "refused" or attempt == self._retries:
                    raise failure
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _status(self, answer: httpx.Response) -> Failure:
        status = answer.status_code
        kind = "rate_limit" if status == 429 else "server" if status >= 500 else "refused"
        return Failure(kind, f"{self._url} answered with status {status}: {self._quoted(answer.text)}")

    def _read(self, answer: httpx.Response, model: str) -> tuple[str, str]:
        """Returns the text and the model of an answer with status 200, or raises why it is none."""
        try:
            body = json.loads(answer.content)
            choice = body["choices"][0]
            message, finish = choice["message"], choice.get("finish_reason")
            text, refusal = message.get("content") or "", message.get("refusal")
            answered = body.get("model") or model
            if not isinstance(text, str) or not isinstance(answered, str):
                raise TypeError
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise Failure("bad_json", f"{self._url} gave no chat completion: {self._quoted(answer.text)}") from None
        first = self._first.setdefault(model, answered)
        if answered != first:
            raise Failure("model_changed", f"{answered} answered, and {first} before")
        if refusal or finish == "content_filter":
            raise Failure("refusal", f"{answered} refused to answer: {self._quoted(refusal or text)}")
        if finish == "length":
            raise Failure(
                "cut", f"the answer reached max_tokens, raise client.max_tokens: {self._quoted(text[-QUOTED:])}"
            )
        if not text.strip():
            raise Failure("empty", f"{answered} gave an answer without text")
        return text, answered

    def _quoted(self, text: object) -> str:
        """Returns the begin of a text for a message. Some endpoints repeat the key."""
        shown = str(text).replace(self._key, "***") if self._key else str(text)
        return printable(" ".join(shown.split())[:QUOTED]) or "nothing"


class _Call:
    """A request in flight, and the number of those who wait for it."""

    def __init__(self, task: asyncio.Future[str]):
        self.task, self.waiting = task, 0


class StoredAnswers:
    """Answers by the digests of their requests, in memory and in a file of JSON lines that is read at the first use.

    Several processes may append to the file: each writes a whole line at once. A line that is no record, such as the
    half last one of a killed process, is ignored. file: None: only in memory. `first` has, for each model that was
    asked for, the one that answered first: endpoints serve others under the same name.
    """

    def __init__(self, file: Path | None):
        self._file, self._descriptor = file, -1
        self._texts, self.first, self._unread = dict[str, str](), dict[str, str](), file is not None

    def get(self, key: str) -> str | None:
        """Returns the text of an answer; None: there is none."""
        if self._unread:
            self._read()
        return self._texts.get(key)

    def add(self, key: str, text: str, asked: str, answered: str) -> None:
        """Stores an answer, with the model that was asked for and the one that answered. On a full disk it is only in
        memory."""
        self._texts[key] = text
        self._append({"key": key, "asked": asked, "answered": answered, "text": text})

    def forget(self, key: str) -> None:
        """Lets the next equal request be asked again."""
        if self._texts.pop(key, None) is not None:
            self._append({"key": key, "forgotten": True})

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                if self._descriptor < 0:
                    self._descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                # The first line end closes a half line of a process that was killed.
                os.write(self._descriptor, f"\n{json.dumps(record)}\n".encode())

    def close(self) -> None:
        """Closes the file. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> None:
        self._unread = False
        if self._file is not None and self._file.exists():
            with open(self._file, "rb") as lines:
                for line in lines:
                    with contextlib.suppress(ValueError, LookupError, TypeError):
                        record = json.loads(line)
                        if "forgotten" in record:
                            self._texts.pop(record["key"], None)
                            continue
                        self._texts[record["key"]] = str(record["text"])
                        self.first.setdefault(record["asked"], str(record["answered"]))


def _retry_after(text: str) -> float:
    """Returns the seconds that a header Retry-After asks for, which is a number or a date; 0 without one."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def _is_late(error: Exception) -> bool:
    return isinstance(error, httpx.TimeoutException)


def _explain(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
