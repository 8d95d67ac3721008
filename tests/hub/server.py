"""A local Hub with the endpoints that huggingface_hub's client needs to create, fill and read a repository.

Its commits are stored in memory. `Fault`s make it fail like the real Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.scenarios.other_processes import MAX_WAIT_SECONDS

GOOD_TOKEN = "hf_" + "x1Ab" * 8
USER = "someone"
MAIN = "main"


@dataclass
class Fault:
    """A failure of requests.

    Parameters:
        route: regular expression for the "METHOD /path" of these requests.
        status: status of the response; None handles the request.
        times: number of failures; None is unlimited.
        after: number of successful requests before.
        cuts: read a part of the request and reset the connection.
        body: body of the response.
        until: delay responses until this event.
    """

    route: str
    status: int | None = None
    times: int | None = None
    after: int = 0
    cuts: bool = False
    body: dict[str, Any] = field(default_factory=dict)
    until: threading.Event | None = None
    happened: int = 0


@dataclass
class Commit:
    """A commit with all files after it."""

    oid: str
    message: str
    files: dict[str, bytes]


@dataclass
class Repository:
    """A repository: its branches, each a list of commits from the oldest on."""

    branches: dict[str, list[Commit]]
    requested_visibility: str | None = None

    def files(self, branch: str = MAIN) -> dict[str, bytes]:
        """Return the files of a branch by path."""
        return self.branches[branch][-1].files

    def messages(self, branch: str = MAIN) -> list[str]:
        """Return the messages of the commits that were pushed to a branch, the oldest first."""
        return [commit.message for commit in self.branches[branch][1:]]


@dataclass
class Request:
    """A request that the server has received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Hub:
    """The state of the server that `serving` starts.

    Attributes:
        requests: all requests in order, with failed requests.
        faults: may be changed at any time.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.tokens = {GOOD_TOKEN: USER}
        self.lock = threading.RLock()
        self.endpoint = ""

    def repository(self, name: str = "run") -> Repository:
        """Return a repository of the user."""
        return self.repositories[f"{USER}/{name}"]

    def requested(self, route: str) -> list[Request]:
        """Return the requests whose "METHOD /path" matches."""
        return [request for request in self.requests if re.search(route, f"{request.method} {request.path}")]

    def fault_for(self, method: str, path: str) -> Fault | None:
        """Return the fault for this request, and count it."""
        with self.lock:
            for fault in self.faults:
                if not re.search(fault.route, f"{method} {path}"):
                    continue
                fault.happened += 1
                last = None if fault.times is None else fault.after + fault.times
                if fault.happened > fault.after and (last is None or fault.happened <= last):
                    return fault
        return None


class Response(Exception):
    """Raised to end the handling of a request with a response."""

    def __init__(
        self, status: int, body: Any = None, headers: dict[str, str] | None = None, code: str | None = None
    ) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, dict(headers or {})
        if code is not None:
            self.headers["X-Error-Code"] = code
            self.headers["X-Error-Message"] = f"{code} as this Hub says it"


class Handler(BaseHTTPRequestHandler):
    """The handler of the requests in `ROUTES`."""

    protocol_version = "HTTP/1.1"
    # Avoid a delay between a response's head and its body.
    wbufsize = -1
    hub: Hub

    def handle_any(self) -> None:
        method, path = self.command, unquote(urlsplit(self.path).path)
        fault = self.hub.fault_for(method, path)
        if fault is not None and fault.cuts:
            self.hub.requests.append(Request(method, path, dict(self.headers), b""))
            self.rfile.read1(16)
            # The client receives a connection reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RD)
            self.connection.close()
            return
        body = self.receive_body()
        self.hub.requests.append(Request(method, path, dict(self.headers), body))
        if fault is not None and fault.until is not None:
            fault.until.wait(MAX_WAIT_SECONDS)
        try:
            if fault is not None and fault.status is not None:
                raise Response(fault.status, fault.body)
            for route, handle in ROUTES:
                match = re.fullmatch(route, f"{method} {path}")
                if match:
                    with self.hub.lock:
                        handle(self, match.groupdict(), body)
                    raise AssertionError(f"{route} has no response")
            raise Response(404, {"error": f"no such route: {method} {path}"})
        except Response as response:
            self.send(response)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = handle_any

    def receive_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def send(self, response: Response) -> None:
        content = response.body if isinstance(response.body, bytes) else json.dumps(response.body or {}).encode()
        self.send_response(response.status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), **response.headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        """Log nothing."""

    # ---- Checks of requests ----

    def user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise Response(401, {"error": "Invalid credentials in Authorization header"}, headers=INVALID_CREDENTIALS)
        return self.hub.tokens.get(token)

    def writer(self, repository: str) -> str:
        user = self.user()
        if user is None:
            raise Response(401, {"error": "Invalid username or password."}, headers=INVALID_CREDENTIALS)
        if repository.partition("/")[0] != user:
            raise Response(403, {"error": f"{user} may not write to {repository}"})
        return user

    def get_repository(self, name: str) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None:
            raise Response(404, {"error": "Repository not found"}, code="RepoNotFound")
        return repository

    def commits(self, name: str, revision: str) -> list[Commit]:
        branches = self.get_repository(name).branches
        if revision in branches:
            return branches[revision]
        for commits in branches.values():
            for index, commit in enumerate(commits):
                if commit.oid == revision:
                    return commits[: index + 1]
        raise Response(404, {"error": f"Invalid rev id: {revision}"}, code="RevisionNotFound")


INVALID_CREDENTIALS = {"X-Error-Message": "Invalid credentials in Authorization header"}


def get_oid(content: bytes) -> str:
    """Return the git object id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def create_repository(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """Create a repository with the Hub's initial commit."""
    settings = json.loads(body)
    user = handler.user()
    name = f"{settings.get('organization') or user}/{settings['name']}"
    url = {"url": f"{handler.hub.endpoint}/{name}", "name": name, "id": name}
    handler.writer(name)
    if name in handler.hub.repositories:
        raise Response(409, {"error": "You already created this model repo", **url})
    # Earlier clients send `private`.
    visibility = settings.get("visibility") or {True: "private", False: "public"}.get(settings.get("private"))
    first = Commit("0" * 39 + "1", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
    handler.hub.repositories[name] = Repository({MAIN: [first]}, visibility)
    raise Response(200, url)


def validate_card(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """Accept any metadata."""
    raise Response(200, {"errors": [], "warnings": []})


def prepare_upload(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """Return the upload mode and the present object id of each file."""
    handler.writer(names["name"])
    present = handler.commits(names["name"], names["revision"])[-1].files
    files = [
        {
            "path": file["path"],
            "uploadMode": "regular",
            "shouldIgnore": False,
            "oid": get_oid(present[file["path"]]) if file["path"] in present else None,
        }
        for file in json.loads(body)["files"]
    ]
    raise Response(200, {"files": files})


def make_commit(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """Apply the lines of a commit."""
    handler.writer(names["name"])
    commits = handler.commits(names["name"], names["revision"])
    files, message = dict(commits[-1].files), ""
    for line in body.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "header":
            message = value["summary"]
        elif entry["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "deletedFile":
            del files[value["path"]]
        else:
            raise Response(400, {"error": f"unknown operation {entry['key']}"})
    number = sum(map(len, handler.get_repository(names["name"]).branches.values())) + 1
    commits.append(Commit(f"{number:040x}", message, files))
    url = f"{handler.hub.endpoint}/{names['name']}/commit/{commits[-1].oid}"
    raise Response(200, {"success": True, "commitOid": commits[-1].oid, "commitUrl": url, "pullRequestUrl": None})


def make_branch(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """Create a branch from an existing branch."""
    handler.writer(names["name"])
    branches = handler.get_repository(names["name"]).branches
    if names["branch"] in branches:
        raise Response(409, {"error": "Reference already exists"})
    start = json.loads(body or b"{}").get("startingPoint", MAIN)
    branches[names["branch"]] = list(handler.commits(names["name"], start))
    raise Response(200)


def repository_info(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """Return the facts of a repository at a revision."""
    commit = handler.commits(names["name"], names.get("revision") or MAIN)[-1]
    raise Response(
        200,
        {
            "_id": "1",
            "id": names["name"],
            "modelId": names["name"],
            "sha": commit.oid,
            "siblings": [{"rfilename": path} for path in sorted(commit.files)],
        },
    )


def list_tree(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """Return the files of a revision."""
    files = handler.commits(names["name"], names["revision"])[-1].files
    raise Response(
        200,
        [
            {"type": "file", "path": path, "size": len(content), "oid": get_oid(content)}
            for path, content in sorted(files.items())
        ],
    )


def download(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """Return the content of a file."""
    commit = handler.commits(names["name"], names["revision"])[-1]
    content = commit.files.get(names["path"])
    if content is None:
        raise Response(404, {"error": "Entry not found"}, code="EntryNotFound")
    headers = {"ETag": f'"{get_oid(content)}"', "X-Repo-Commit": commit.oid, "Content-Type": "application/octet-stream"}
    raise Response(200, content, headers)


NAME = r"(?P<name>[^/]+/[^/]+)"
ROUTES: list[tuple[str, Callable[[Handler, dict[str, str], bytes], None]]] = [
    (r"POST /api/repos/create", create_repository),
    (r"POST /api/validate-yaml", validate_card),
    (rf"POST /api/models/{NAME}/preupload/(?P<revision>.+)", prepare_upload),
    (rf"POST /api/models/{NAME}/commit/(?P<revision>.+)", make_commit),
    (rf"POST /api/models/{NAME}/branch/(?P<branch>.+)", make_branch),
    (rf"GET /api/models/{NAME}/tree/(?P<revision>.+)", list_tree),
    (rf"GET /api/models/{NAME}/revision/(?P<revision>.+)", repository_info),
    (rf"GET /api/models/{NAME}", repository_info),
    (rf"(GET|HEAD) /{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", download),
]


@contextmanager
def serving() -> Iterator[Hub]:
    """Run a server on a free local port during the block."""
    hub = Hub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        for fault in hub.faults:
            if fault.until is not None:
                fault.until.set()
        server.shutdown()
        server.server_close()
        thread.join()
