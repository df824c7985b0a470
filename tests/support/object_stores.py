"""Servers that speak the protocols of S3 and of Google Cloud Storage, and that fail as they are told."""

import json
import re
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Fault = Callable[[str, str], str | None]  # method, path -> "503", "hang" or None


class Faults:
    """What a server does to a request instead of answering it; `choose` may be replaced while it runs."""

    def __init__(self) -> None:
        self.choose: Fault = lambda method, path: None
        self.requests = list[str]()

    def __call__(self, method: str, path: str) -> bool:
        """Tests whether a request is to be answered with 503; sleeps where it is to hang."""
        self.requests.append(f"{method} {path}")
        fault = self.choose(method, path)
        if fault == "hang":
            time.sleep(60)
        return fault is not None


@contextmanager
def s3(faults: Faults) -> Iterator[dict[str, str]]:
    """Runs moto's S3 in this process; yields the environment of its clients. It has an empty bucket `bucket`."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from moto.s3.models import s3_backends
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *arguments: Any) -> None:
            pass

    application = DomainDispatcherApplication(create_backend_app)

    def faulty(environment: dict[str, Any], start_response: Any) -> Any:
        if faults(environment["REQUEST_METHOD"], environment["PATH_INFO"]):
            body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            start_response("503 Slow Down", [("Content-Length", str(len(body)))])
            return [body]
        return application(environment, start_response)

    server = make_server("127.0.0.1", 0, faulty, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    s3_backends.reset()
    s3_backends["123456789012"]["aws"].create_bucket("bucket", "us-east-1")
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def gcs(faults: Faults, objects: dict[str, bytes]) -> Iterator[dict[str, str]]:
    """Runs a small part of Google's JSON protocol over `objects`, name -> content, of the bucket `bucket`."""
    sessions = dict[str, tuple[str, bytes]]()  # of uploads in several parts: name, what came so far
    lock = threading.Lock()

    def resource(name: str) -> dict[str, Any]:
        digest = b64encode(md5(objects[name]).digest()).decode()
        shared = {"kind": "storage#object", "bucket": "bucket", "generation": "1", "md5Hash": digest}
        return shared | {"name": name, "id": f"bucket/{name}/1", "size": str(len(objects[name]))}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, body: Any = b"", **headers: str) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def missing(self, what: str = "No such object") -> None:
            self.answer(404, {"error": {"code": 404, "message": what}})

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
            if faults(self.command, url.path):
                self.answer(503, {"error": {"code": 503, "message": "Backend Error"}})
                return
            match = re.fullmatch(r"(/upload|/download)?/storage/v1/b/([^/]+)(/o)?(?:/(.*))?", url.path)
            if match is None or match[2] != "bucket":
                self.missing("The specified bucket does not exist.")
                return
            with lock:
                self.route(match[1], unquote(match[4] or ""), query, body, is_bucket=match[3] is None)

        def route(self, kind: str | None, name: str, query: dict[str, str], body: bytes, *, is_bucket: bool) -> None:
            if kind == "/upload" and "upload_id" in query:
                self.go_on(query, body)
            elif kind == "/upload":
                self.begin(query, body)
            elif is_bucket:
                self.answer(200, {"kind": "storage#bucket", "name": "bucket", "location": "US"})
            elif name == "":
                self.list(query)
            elif name not in objects:
                self.missing()
            elif self.command == "DELETE":
                del objects[name]
                self.answer(204)
            elif query.get("alt") == "media":
                self.answer(200, objects[name], **{"Content-Type": "application/octet-stream"})
            else:
                self.answer(200, resource(name), **{"Content-Type": "application/json"})

        def list(self, query: dict[str, str]) -> None:
            prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
            names = sorted(name for name in objects if name.startswith(prefix))
            cut = {name: name[len(prefix) :].partition(delimiter)[0::2] if delimiter else (name, "") for name in names}
            below = sorted({f"{prefix}{head}{delimiter}" for head, tail in cut.values() if tail})
            items = [resource(name) for name, (_, tail) in cut.items() if not tail]
            answer = {"kind": "storage#objects", "items": items, "prefixes": below}
            self.answer(200, answer, **{"Content-Type": "application/json"})

        def begin(self, query: dict[str, str], body: bytes) -> None:
            if query["uploadType"] == "resumable":
                number = str(len(sessions) + len(objects) + time.monotonic_ns())
                sessions[number] = json.loads(body or b"{}").get("name") or query["name"], b""
                place = f"http://{self.headers['Host']}/upload/storage/v1/b/bucket/o?upload_id={number}"
                self.answer(200, **{"Location": place})
                return
            boundary = re.search(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])
            assert boundary is not None
            _, metadata, content, *_ = body.split(b"--" + boundary[1].encode())
            name = json.loads(metadata.partition(b"\n\n")[2] or metadata.partition(b"\r\n\r\n")[2])["name"]
            separator = b"\r\n\r\n" if b"\r\n\r\n" in content[:200] else b"\n\n"
            end = b"\r\n" if separator == b"\r\n\r\n" else b"\n"
            self.write(name, content.partition(separator)[2].removesuffix(end), query)

        def go_on(self, query: dict[str, str], part: bytes) -> None:
            name, data = sessions[query["upload_id"]]
            data += part
            if self.headers["Content-Range"].endswith("/*"):
                sessions[query["upload_id"]] = name, data
                self.answer(308, **{"Range": f"bytes=0-{len(data) - 1}"})
            else:
                self.write(name, data, query)

        def write(self, name: str, data: bytes, query: dict[str, str]) -> None:
            if query.get("ifGenerationMatch") == "0" and name in objects:
                self.answer(412, {"error": {"code": 412, "message": "conditionNotMet: Precondition Failed"}})
                return
            objects[name] = data
            self.answer(200, resource(name), **{"Content-Type": "application/json"})

        def handle(self) -> None:
            with suppress(ConnectionError):  # the client was killed, or it gave up
                super().handle()

        def log_message(self, format: str, *args: Any) -> None:
            pass

        do_GET = do_POST = do_PUT = do_DELETE = handle_request

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.server_port}",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which speaks gRPC, too
            "FSSPEC_GCS_TOKEN": "anon",
            "FSSPEC_GS_TOKEN": "anon",
        }
    finally:
        server.shutdown()
        server.server_close()
