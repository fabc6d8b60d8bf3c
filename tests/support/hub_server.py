"""A stand-in of the Hugging Face Hub's API on this machine, for the real client of huggingface_hub.

It keeps repositories, branches, files and commits in memory, knows tokens, and can be set to fail, or to hold requests
until a test lets them go. Only what a push and a download need is there; anything else is answered with 404.
Storage is that of Git LFS: :func:`pointed_at` switches the Xet protocol off.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_standInTokenOfTheTestUser01"
READER = "hf_standInTokenThatMayOnlyRead1"
USER = "tester"
ORGANIZATION = "laboratory"
_LFS_ABOVE = 2048  # bytes; smaller files travel in the commit


@dataclass(frozen=True)
class Commit:
    """What one commit did; ``added`` holds the content by path."""

    repository: str
    branch: str
    message: str
    added: dict[str, bytes]
    deleted: tuple[str, ...]


@dataclass
class Repository:
    """Files of each branch, by path."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(
        default_factory=lambda: {"main": {".gitattributes": b"*.safetensors filter=lfs\n"}}
    )


@dataclass
class _Failure:
    path: str
    status: int
    times: int


class HubServer:
    """The server; see the module. A context manager.

    Args:
        address: where it listens.

    Attributes:
        url: what ``HF_ENDPOINT`` would be.
        requests: ``"METHOD /path"`` of every request, in the order of arrival.
        bodies: text of every request's address, headers (without authorization) and body.
        commits: what was committed, in order.
        cut: called with every request; whether its connection ends before anything is done.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.bodies: list[bytes] = []
        self.commits: list[Commit] = []
        self.tokens = {TOKEN: True, READER: False}
        self.lock = threading.RLock()
        self.cut: Callable[[str], bool] = lambda request: False
        self._failures: list[_Failure] = []
        self._held: list[tuple[str, threading.Event, threading.Event]] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer((address, 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://{address}:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        for _, _, release in self._held:
            release.set()
        self._server.shutdown()
        self._server.server_close()

    def fail(self, path: str, status: int, times: int = 1) -> None:
        """Answer the next ``times`` requests whose ``METHOD /path`` contains ``path`` with ``status``."""
        self._failures.append(_Failure(path, status, times))

    def hold(self, path: str) -> tuple[threading.Event, threading.Event]:
        """Hold the next request whose ``METHOD /path`` contains ``path``: (it has arrived, set this to let it go)."""
        arrived, release = threading.Event(), threading.Event()
        self._held.append((path, arrived, release))
        return arrived, release

    def files(self, repository: str, branch: str = "main") -> dict[str, bytes]:
        """Path to content; without the file that every repository begins with."""
        found = dict(self.repositories[repository].branches[branch])
        found.pop(".gitattributes", None)
        return found

    def messages(self, branch: str | None = None) -> list[str]:
        """Messages of the commits, in order."""
        return [commit.message for commit in self.commits if branch in (None, commit.branch)]

    def everything(self) -> Iterator[bytes]:
        """All that ever arrived: addresses, bodies, objects."""
        yield from self.bodies
        yield from self.objects.values()

    # -- used by the handler -------------------------------------------------------------------------------------------

    def trouble(self, request: str) -> int | None:
        """The status of an ordered failure for this request."""
        with self.lock:
            for failure in self._failures:
                if failure.times > 0 and failure.path in request:
                    failure.times -= 1
                    return failure.status
        return None

    def wait_where_held(self, request: str) -> None:
        """Come back when a test lets this request go."""
        with self.lock:
            found = next((held for held in self._held if held[0] in request and not held[1].is_set()), None)
            if found is not None:
                found[1].set()
        if found is not None:
            found[2].wait(300)


@contextmanager
def pointed_at(url: str) -> Iterator[None]:
    """huggingface_hub talks to ``url``, online and without Xet. Its settings are read when it is imported: set here."""
    from huggingface_hub import constants

    files = url + "/{repo_id}/resolve/{revision}/{filename}"
    wanted = {
        **{"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": files},
        **{"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True},
    }
    before = {name: getattr(constants, name) for name in wanted}
    for name, value in wanted.items():
        setattr(constants, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(constants, name, value)


class _Refusal(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing on the error stream."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        address = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{method} {unquote(address.path)}"
        kept = {name: value for name, value in self.headers.items() if name.lower() != "authorization"}
        with self.hub.lock:
            self.hub.requests.append(request)
            self.hub.bodies.append(f"{self.path}\n{kept}\n".encode() + body)
        self.hub.wait_where_held(request)
        if self.hub.cut(request):
            self.close_connection = True
            return
        status, response, headers = 200, {}, {}
        try:
            trouble = self.hub.trouble(request)
            if trouble is not None:
                raise _Refusal(trouble, f"ordered {trouble}")
            with self.hub.lock:
                response = self._find(method, address.path)(body, parse_qs(address.query))
        except _Refusal as refusal:
            status, response = refusal.status, getattr(refusal, "answer", {"error": str(refusal)})
            headers = {"X-Error-Message": str(refusal), **({"X-Error-Code": refusal.code} if refusal.code else {})}
        text = response if isinstance(response, bytes) else json.dumps(response).encode()
        if isinstance(response, bytes):
            headers = {"ETag": f'"{_git_oid(response)}"', "X-Repo-Commit": "0" * 40}
        kind = "application/octet-stream" if isinstance(response, bytes) else "application/json"
        self.send_response(status)
        for name, value in {**headers, "Content-Type": kind, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        if method != "HEAD":
            self.wfile.write(text)

    def _find(self, method: str, path: str) -> Callable[[bytes, dict[str, list[str]]], Any]:
        for wanted, pattern, function in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and wanted == method.replace("HEAD", "GET"):
                parts = [unquote(part) for part in match.groups()]
                return lambda body, query: function(self, body, query, *parts)
        raise _Refusal(404, f"nothing at {method} {path}")

    def _writer(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.hub.tokens:
            raise _Refusal(401, "Invalid username or password.")
        if not self.hub.tokens[token]:
            raise _Refusal(403, "You don't have the rights to do that.")

    def _branch(self, repository: str, branch: str) -> dict[str, bytes]:
        found = self.hub.repositories.get(repository)
        if found is None:
            raise _Refusal(404, "Repository not found", "RepoNotFound")
        if branch not in found.branches:
            raise _Refusal(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        return found.branches[branch]

    # -- what the Hub does ---------------------------------------------------------------------------------------------

    def release_all(self, body: bytes, query: Any) -> Any:
        """For a test in another process: let all requests go that are held."""
        for _, _, release in self.hub._held:
            release.set()
        return {}

    def whoami(self, body: bytes, query: Any) -> Any:
        self._writer()
        return {"name": USER, "type": "user", "orgs": [{"name": ORGANIZATION}]}

    def create(self, body: bytes, query: Any) -> Any:
        self._writer()
        requested = json.loads(body)
        owner = requested.get("organization") or USER
        if owner not in (USER, ORGANIZATION):
            raise _Refusal(403, f"You don't have the rights to create a model under the namespace {owner!r}.")
        name = f"{owner}/{requested['name']}"
        response = {"url": f"{self.hub.url}/{name}", "name": name}
        if name in self.hub.repositories:
            refusal = _Refusal(409, "You already created this model repo")
            refusal.answer = response  # type: ignore[attr-defined]
            raise refusal
        self.hub.repositories[name] = Repository(requested.get("visibility") == "private")
        return response

    def branch(self, body: bytes, query: Any, repository: str, branch: str) -> Any:
        self._writer()
        start = self._branch(repository, "main")
        if branch in self.hub.repositories[repository].branches:
            raise _Refusal(409, "Reference already exists")
        self.hub.repositories[repository].branches[branch] = dict(start)
        return {}

    def info(self, body: bytes, query: Any, repository: str, branch: str = "main") -> Any:
        self._branch(repository, branch)
        return {"_id": "1", "id": repository, "sha": "0" * 40, "tags": ["license:mit"], "siblings": []}

    def tree(self, body: bytes, query: Any, repository: str, branch: str) -> Any:
        files = self._branch(repository, "main" if branch == "0" * 40 else branch)
        return [
            {"type": "file", "oid": _git_oid(data), "size": len(data), "path": path} for path, data in files.items()
        ]

    def resolve(self, body: bytes, query: Any, repository: str, revision: str, path: str) -> Any:
        files = self._branch(repository, "main" if revision == "0" * 40 else revision)
        if path not in files:
            raise _Refusal(404, f"no {path}", "EntryNotFound")
        return files[path]

    def preupload(self, body: bytes, query: Any, repository: str, branch: str) -> Any:
        self._writer()
        present = self._branch(repository, branch)
        response = []
        for requested in json.loads(body)["files"]:
            mode = "lfs" if requested["size"] > _LFS_ABOVE else "regular"
            data = present.get(requested["path"])
            oid = None if data is None else (hashlib.sha256(data).hexdigest() if mode == "lfs" else _git_oid(data))
            response.append({"path": requested["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": response}

    def batch(self, body: bytes, query: Any, repository: str) -> Any:
        self._writer()
        response = []
        for requested in json.loads(body)["objects"]:
            entry = {"oid": requested["oid"], "size": requested["size"]}
            if requested["oid"] not in self.hub.objects:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/storage/{requested['oid']}", "header": {}}}
            response.append(entry)
        return {"transfer": "basic", "objects": response}

    def store(self, body: bytes, query: Any, oid: str) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refusal(400, "the content is not what was announced")
        self.hub.objects[oid] = body
        return {}

    def validate(self, body: bytes, query: Any) -> Any:
        return {"errors": [], "warnings": []}

    def commit(self, body: bytes, query: Any, repository: str, branch: str) -> Any:
        self._writer()
        files = self._branch(repository, branch)
        lines = [json.loads(line) for line in body.splitlines()]
        added: dict[str, bytes] = {}
        deleted: list[str] = []
        message = ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                data = base64.b64decode(value["content"])
                self.hub.bodies.append(data)  # readable for a search
                added[value["path"]] = data
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise _Refusal(400, f"{value['path']} was not uploaded")
                added[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
                deleted.append(value["path"])
        files.update(added)
        self.hub.commits.append(Commit(repository, branch, message, added, tuple(deleted)))
        oid = hashlib.sha1(str(len(self.hub.commits)).encode()).hexdigest()
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repository}/commit/{oid}"}


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


_REPOSITORY = "([^/]+/[^/]+)"
_ROUTES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("GET", "/test/go", _Handler.release_all),
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("POST", f"/api/models/{_REPOSITORY}/branch/(.+)", _Handler.branch),
    ("GET", f"/api/models/{_REPOSITORY}", _Handler.info),
    ("GET", f"/api/models/{_REPOSITORY}/revision/(.+)", _Handler.info),
    ("GET", f"/api/models/{_REPOSITORY}/tree/([^/]+)", _Handler.tree),
    ("POST", f"/api/models/{_REPOSITORY}/preupload/(.+)", _Handler.preupload),
    ("POST", f"/{_REPOSITORY}\\.git/info/lfs/objects/batch", _Handler.batch),
    ("GET", f"/{_REPOSITORY}/resolve/([^/]+)/(.+)", _Handler.resolve),
    ("PUT", "/storage/([0-9a-f]+)", _Handler.store),
    ("POST", f"/api/models/{_REPOSITORY}/commit/(.+)", _Handler.commit),
)
