"""A stand-in for an OpenAI-compatible chat endpoint on this machine, with answers of the test's choice."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "judge-7b"
DROPPED, SILENT = "the connection is dropped", "never an answer"


def completion(text: str | None, finish: str = "stop", model: str | None = MODEL, **message: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return {"object": "chat.completion", "choices": [choice]} | ({} if model is None else {"model": model})


@dataclass
class Endpoint:
    """What the server does. answer: (body of the request) -> an answer; script: the next answers, before it. An answer
    is a text, the body of a completion as a dict, (status, headers, text), DROPPED or SILENT. key: without it in the
    request the status is 401. requests: the bodies so far. most: the highest number of requests at a time."""

    answer: Callable[[dict[str, Any]], Any] = lambda body: "Score: 7"
    script: list[Any] = field(default_factory=list)
    models: list[str] = field(default_factory=lambda: [MODEL])
    listing: Any = None  # an answer to /models in place of the list
    key: str | None = None
    seconds: float = 0.0  # of an answer
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    most: int = 0
    active: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: threading.Event = field(default_factory=threading.Event)


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 512

    def handle_error(self, *_: Any) -> None: ...  # a client that went away


@contextmanager
def serving(**settings: Any) -> Iterator[Endpoint]:
    endpoint = Endpoint(**settings)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            listed = {"object": "list", "data": [{"id": name} for name in endpoint.models]}
            self.reply(listed if endpoint.listing is None else endpoint.listing)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with endpoint.lock:
                endpoint.requests.append(body)
                endpoint.active += 1
                endpoint.most = max(endpoint.most, endpoint.active)
                answer = endpoint.script.pop(0) if endpoint.script else None
            time.sleep(endpoint.seconds)
            answer = endpoint.answer(body) if answer is None else answer
            with endpoint.lock:
                endpoint.active -= 1  # before the client knows
            self.reply(completion(answer) if isinstance(answer, str) and answer not in (DROPPED, SILENT) else answer)

        def reply(self, answer: Any) -> None:
            given = self.headers.get("Authorization", "")
            if endpoint.key is not None and given != f"Bearer {endpoint.key}":
                answer = (401, {}, f"wrong key in {given!r}")
            if answer == SILENT:
                endpoint.closed.wait(30)
            if answer in (SILENT, DROPPED):
                self.close_connection = True
                return
            status, headers, text = (200, {}, json.dumps(answer)) if isinstance(answer, dict) else answer
            self.send_response(status)
            for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None: ...

    with Server(("127.0.0.1", 0), Handler) as server:
        endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield endpoint
        finally:
            endpoint.closed.set()
            server.shutdown()
            thread.join()
