"""A stand-in for the Hugging Face hub on this machine: what `huggingface_hub` needs to read and write repositories."""

import base64
import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN, USER, ORGANISATION = "hf_writes", "someone", "lab"
SILENT = "never an answer"


@dataclass
class Repository:
    """branches: branch -> path -> bytes. commits: how many there were. gated: a licence must be accepted first."""

    private: bool = False
    gated: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: int = 0

    def files(self, revision: str) -> dict[str, bytes] | None:
        by_sha = {sha(files): files for files in self.branches.values()}
        return self.branches.get(revision, by_sha.get(revision))


@dataclass
class Hub:
    """What the server holds. failures: (method, start of a path) -> the next answers, each a status (200 is no failure,
    0 drops the connection, a negative status is answered after all was done), (status, reason), or a text: the page of
    a proxy; SILENT never answers. requests: how often each was asked for. between: files that someone else commits
    just before the next commit."""

    repositories: dict[str, Repository] = field(default_factory=dict)  # "models/USER/NAME"
    objects: dict[str, bytes] = field(default_factory=dict)  # large files, by their SHA-256
    failures: dict[tuple[str, str], list[int | str | tuple[int, str]]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    between: dict[str, bytes] = field(default_factory=dict)
    address: str = ""
    closed: threading.Event = field(default_factory=threading.Event)

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Variables of a process that uses this hub, and keeps its cache in `home`."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        inherited |= {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return inherited | ({} if token is None else {"HF_TOKEN": token})

    def add(self, name: str, directory: Path, **options: Any) -> None:
        files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        self.repositories[name] = Repository(branches={"main": files}, **options)


def sha(files: dict[str, bytes]) -> str:
    return hashlib.sha1(b"".join(name.encode() + content for name, content in sorted(files.items()))).hexdigest()


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".png"))


def _hashes(name: str, content: bytes) -> dict[str, Any]:
    """The git hash of what is in the repository: the file, or the pointer to a large one."""
    pointer = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    blob = repr(pointer).encode() if _is_large(name) else content
    oid = hashlib.sha1(f"blob {len(blob)}\0".encode() + blob).hexdigest()
    return {"oid": oid} | ({"lfs": pointer} if _is_large(name) else {})


@contextmanager
def serving() -> Iterator[Hub]:
    """Serves a hub on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closed.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    late = 0  # the status in place of the next answer's
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        self.hub.requests[f"{method} {path}"] += 1
        for (verb, start), statuses in self.hub.failures.items():
            if verb != method or not path.startswith(start) or not statuses or (status := statuses.pop(0)) == 200:
                continue
            if isinstance(status, int) and status < 0:
                self.late = -status
                break
            self._fail(status)
            return
        for verb, pattern, name in _ROUTES:
            if method in verb.split() and (match := re.fullmatch(pattern, path)):
                getattr(self, name)(body, **match.groupdict())
                return
        self._send(404, {"error": f"no route {method} {path}"})

    def _fail(self, answer: int | str | tuple[int, str]) -> None:
        if answer == SILENT:
            self.hub.closed.wait()
        if answer in (SILENT, 0):
            self.close_connection = True
            self.connection.close()
        elif isinstance(answer, str):
            self._send(200, data=answer.encode(), Content_Type="text/html")
        else:
            status, reason = answer if isinstance(answer, tuple) else (answer, "not now")
            self._send(status, {"error": reason})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, value: Any = None, data: bytes | None = None, **headers: str) -> None:
        if self.late:
            status, value, data, self.late = self.late, {"error": "too late"}, None, 0
        content = json.dumps(value).encode() if data is None else data
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    @property
    def _knows(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _readable(self, kind: str, repo: str) -> Repository | None:
        """The repository, or None after an answer that it is not there for the asker."""
        repository = self.hub.repositories.get(f"{kind}/{repo}")
        if repository is None or (repository.private and not self._knows):
            self._send(404 if self._knows else 401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        return repository

    def _writable(self, kind: str, repo: str) -> Repository | None:
        if not self._knows:
            self._send(401, {"error": "Invalid username or password."})
            return None
        if repo.split("/")[0] not in (USER, ORGANISATION):
            self._send(403, {"error": "Forbidden: pass a token with write permission"})
            return None
        return self._readable(kind, repo)

    def whoami(self, body: bytes) -> None:
        if self._knows:
            self._send(200, {"name": USER, "type": "user", "orgs": [{"name": ORGANISATION}]})
        else:
            self._send(401, {"error": "Invalid username or password."})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        key, url = f"models/{repo}", {"url": f"{self.hub.address}/{repo}"}
        if not self._knows or repo.split("/")[0] not in (USER, ORGANISATION):
            self._send(403 if self._knows else 401, {"error": "You don't have the rights to create a model there"})
        elif key in self.hub.repositories:
            self._send(409, {"error": "You already created this model repo", **url})
        else:
            self.hub.repositories[key] = Repository(asked.get("visibility") == "private" or bool(asked.get("private")))
            self._send(200, url)

    def validate(self, body: bytes) -> None:
        self._send(200, {"errors": [], "warnings": []})

    def branch(self, body: bytes, kind: str, repo: str, revision: str) -> None:
        if repository := self._writable(kind, repo):
            there = revision in repository.branches
            repository.branches.setdefault(revision, dict(repository.branches["main"]))
            self._send(409 if there else 200, {})

    def preupload(self, body: bytes, kind: str, repo: str, revision: str) -> None:
        if self._writable(kind, repo):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if _is_large(name) else "regular" for name in names}
            files = [{"path": name, "uploadMode": modes[name], "shouldIgnore": False, "oid": None} for name in names]
            self._send(200, {"files": files})

    def batch(self, body: bytes, repo: str) -> None:
        if self._writable("models", repo):
            objects = []
            for asked in json.loads(body)["objects"]:
                upload = {"upload": {"href": f"{self.hub.address}/objects/{asked['oid']}"}}
                objects.append(asked | ({} if asked["oid"] in self.hub.objects else {"actions": upload}))
            self._send(200, {"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() == oid:
            self.hub.objects[oid] = body
        self._send(200 if oid in self.hub.objects else 400, {})

    def commit(self, body: bytes, kind: str, repo: str, revision: str) -> None:
        if repository := self._writable(kind, repo):
            files = repository.branches[revision]
            operations = [json.loads(line) for line in body.splitlines()]
            files |= self.hub.between
            self.hub.between = {}
            if operations[0]["value"].get("parentCommit", sha(files)) != sha(files):
                self._send(412, {"error": "A commit has happened since. Please refresh and try again."})
                return
            for operation in operations:
                value = operation["value"]
                if operation["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    files[value["path"]] = self.hub.objects[value["oid"]]
                elif operation["key"] == "deletedFile":
                    del files[value["path"]]
            repository.commits += 1
            url = f"{self.hub.address}/{repo}/commit/{sha(files)}"
            self._send(200, {"commitUrl": url, "commitOid": sha(files), "success": True})

    def info(self, body: bytes, kind: str, repo: str, revision: str | None = None) -> None:
        if repository := self._readable(kind, repo):
            files = repository.files(revision or "main")
            if files is None:
                self._send(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
                return
            siblings = [{"rfilename": name} for name in files]
            described = {"id": repo, "sha": sha(files), "private": repository.private, "siblings": siblings}
            self._send(200, described | {"tags": [], "gated": "auto" if repository.gated else False})

    def tree(self, body: bytes, kind: str, repo: str, revision: str, folder: str | None = None) -> None:
        if repository := self._readable(kind, repo):
            if folder is not None:
                self._send(404, {"error": f"{folder} does not exist"}, X_Error_Code="EntryNotFound")
                return
            files = repository.files(revision) or {}
            rows = [{"type": "file", "path": n, "size": len(c), **_hashes(n, c)} for n, c in files.items()]
            self._send(200, rows)

    def resolve(self, body: bytes, repo: str, revision: str, file: str, kind: str | None = None) -> None:
        repository = self._readable(kind or "models", repo)
        if repository is None:
            return
        files = repository.files(revision) or {}
        if repository.gated:
            self._send(403 if self._knows else 401, {"error": f"{repo} is restricted"}, X_Error_Code="GatedRepo")
        elif file not in files:
            self._send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
        else:
            etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
            self._send(200, data=files[file], ETag=etag, X_Repo_Commit=sha(files))


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_API = rf"/api/(?P<kind>models|datasets)/{_REPO}"
_ROUTES = (
    ("GET", "/api/whoami-v2", "whoami"),
    ("POST", "/api/repos/create", "create"),
    ("POST", "/api/validate-yaml", "validate"),
    ("POST", rf"{_API}/branch/(?P<revision>.+)", "branch"),
    ("POST", rf"{_API}/preupload/(?P<revision>.+)", "preupload"),
    ("POST", rf"{_API}/commit/(?P<revision>.+)", "commit"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", "/objects/(?P<oid>[0-9a-f]+)", "put"),
    ("GET", rf"{_API}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", "tree"),
    ("GET", rf"{_API}(/revision/(?P<revision>[^/]+))?", "info"),
    ("GET HEAD", rf"/((?P<kind>datasets)/)?{_REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "resolve"),
)
