"""A Hub on this machine: the few endpoints that huggingface_hub's client uses to create, fill and read a repository.

What it receives is kept in memory, byte for byte, commit after commit. `Fault`s make it fail as the real one may.
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

from tests.scenarios.other_processes import LONGEST_WAIT_SECONDS

GOOD_TOKEN = "hf_" + "x1Ab" * 8
USER = "someone"
MAIN = "main"


@dataclass
class Fault:
    """What goes wrong with requests.

    Parameters:
        route: requests whose "METHOD /path" matches this regular expression.
        status: the answer's status; None answers as usual.
        times: requests it happens to; None is all of them.
        after: requests of that route that are answered before it begins.
        cuts: read a part of the request, and cut the connection.
        body: of the answer.
        until: answers wait for this event.
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
    """One commit, with all files as they are after it."""

    oid: str
    message: str
    files: dict[str, bytes]


@dataclass
class Repository:
    """One repository: its branches, each a list of commits from the oldest on."""

    branches: dict[str, list[Commit]]
    asked_visibility: str | None = None

    def files(self, branch: str = MAIN) -> dict[str, bytes]:
        """The files of a branch by path."""
        return self.branches[branch][-1].files

    def messages(self, branch: str = MAIN) -> list[str]:
        """Messages of the commits that were pushed to a branch, the oldest first."""
        return [commit.message for commit in self.branches[branch][1:]]


@dataclass
class Request:
    """What was asked, for tests to look at."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Hub:
    """The state of the server; `serving` makes one.

    Attributes:
        requests: all of them, in order, faults included.
        faults: what goes wrong; may be changed at any time.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.tokens = {GOOD_TOKEN: USER}
        self.lock = threading.RLock()
        self.endpoint = ""

    def repository(self, name: str = "run") -> Repository:
        """One of the user's repositories."""
        return self.repositories[f"{USER}/{name}"]

    def requested(self, route: str) -> list[Request]:
        """Requests whose "METHOD /path" matches."""
        return [one for one in self.requests if re.search(route, f"{one.method} {one.path}")]

    def fault_for(self, method: str, path: str) -> Fault | None:
        """The fault that happens to this request, counted."""
        with self.lock:
            for fault in self.faults:
                if not re.search(fault.route, f"{method} {path}"):
                    continue
                fault.happened += 1
                last = None if fault.times is None else fault.after + fault.times
                if fault.happened > fault.after and (last is None or fault.happened <= last):
                    return fault
        return None


class Answer(Exception):
    """Ends the handling of a request with an answer."""

    def __init__(
        self, status: int, body: Any = None, headers: dict[str, str] | None = None, code: str | None = None
    ) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, dict(headers or {})
        if code is not None:
            self.headers["X-Error-Code"] = code
            self.headers["X-Error-Message"] = f"{code} as this Hub says it"


class Handler(BaseHTTPRequestHandler):
    """Answers requests; `routes` says which."""

    protocol_version = "HTTP/1.1"
    # Against the delay between an answer's head and its body.
    wbufsize = -1
    hub: Hub

    def handle_any(self) -> None:
        method, path = self.command, unquote(urlsplit(self.path).path)
        fault = self.hub.fault_for(method, path)
        if fault is not None and fault.cuts:
            self.hub.requests.append(Request(method, path, dict(self.headers), b""))
            self.rfile.read1(16)
            # No orderly end: the other side sees the connection reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RD)
            self.connection.close()
            return
        body = self.read_body()
        self.hub.requests.append(Request(method, path, dict(self.headers), body))
        if fault is not None and fault.until is not None:
            fault.until.wait(LONGEST_WAIT_SECONDS)
        try:
            if fault is not None and fault.status is not None:
                raise Answer(fault.status, fault.body)
            for route, answer in ROUTES:
                found = re.fullmatch(route, f"{method} {path}")
                if found:
                    with self.hub.lock:
                        answer(self, found.groupdict(), body)
                    raise AssertionError(f"{route} gave no answer")
            raise Answer(404, {"error": f"no such route: {method} {path}"})
        except Answer as given:
            self.answer(given)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = handle_any

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, given: Answer) -> None:
        content = given.body if isinstance(given.body, bytes) else json.dumps(given.body or {}).encode()
        self.send_response(given.status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), **given.headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        """Nothing is shown."""

    # ---- What requests have in common ----

    def user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise Answer(401, {"error": "Invalid credentials in Authorization header"}, headers=INVALID_CREDENTIALS)
        return self.hub.tokens.get(token)

    def writer(self, repository: str) -> str:
        user = self.user()
        if user is None:
            raise Answer(401, {"error": "Invalid username or password."}, headers=INVALID_CREDENTIALS)
        if repository.partition("/")[0] != user:
            raise Answer(403, {"error": f"{user} may not write to {repository}"})
        return user

    def found(self, name: str) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None:
            raise Answer(404, {"error": "Repository not found"}, code="RepoNotFound")
        return repository

    def commits(self, name: str, revision: str) -> list[Commit]:
        branches = self.found(name).branches
        if revision in branches:
            return branches[revision]
        for commits in branches.values():
            for place, commit in enumerate(commits):
                if commit.oid == revision:
                    return commits[: place + 1]
        raise Answer(404, {"error": f"Invalid rev id: {revision}"}, code="RevisionNotFound")


INVALID_CREDENTIALS = {"X-Error-Message": "Invalid credentials in Authorization header"}


def oid_of(content: bytes) -> str:
    """What git calls a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def create_repository(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """A new repository, with the one commit that the Hub makes itself."""
    asked = json.loads(body)
    user = handler.user()
    name = f"{asked.get('organization') or user}/{asked['name']}"
    url = {"url": f"{handler.hub.endpoint}/{name}", "name": name, "id": name}
    handler.writer(name)
    if name in handler.hub.repositories:
        raise Answer(409, {"error": "You already created this model repo", **url})
    # Earlier clients name it otherwise.
    visibility = asked.get("visibility") or {True: "private", False: "public"}.get(asked.get("private"))
    first = Commit("0" * 39 + "1", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
    handler.hub.repositories[name] = Repository({MAIN: [first]}, visibility)
    raise Answer(200, url)


def validate_card(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """Whatever the metadata are, they are fine."""
    raise Answer(200, {"errors": [], "warnings": []})


def prepare_upload(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """Which way each file goes, and what is there already."""
    handler.writer(names["name"])
    there = handler.commits(names["name"], names["revision"])[-1].files
    answers = [
        {
            "path": asked["path"],
            "uploadMode": "regular",
            "shouldIgnore": False,
            "oid": oid_of(there[asked["path"]]) if asked["path"] in there else None,
        }
        for asked in json.loads(body)["files"]
    ]
    raise Answer(200, {"files": answers})


def make_commit(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """The lines of a commit, carried out in order."""
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
            raise Answer(400, {"error": f"unknown operation {entry['key']}"})
    number = sum(len(one) for one in handler.found(names["name"]).branches.values()) + 1
    commits.append(Commit(f"{number:040x}", message, files))
    url = f"{handler.hub.endpoint}/{names['name']}/commit/{commits[-1].oid}"
    raise Answer(200, {"success": True, "commitOid": commits[-1].oid, "commitUrl": url, "pullRequestUrl": None})


def make_branch(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """A branch that begins where another one stands."""
    handler.writer(names["name"])
    branches = handler.found(names["name"]).branches
    if names["branch"] in branches:
        raise Answer(409, {"error": "Reference already exists"})
    start = json.loads(body or b"{}").get("startingPoint", MAIN)
    branches[names["branch"]] = list(handler.commits(names["name"], start))
    raise Answer(200)


def repository_info(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """What is known of a repository at a revision."""
    commit = handler.commits(names["name"], names.get("revision") or MAIN)[-1]
    raise Answer(
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
    """The files of a revision."""
    files = handler.commits(names["name"], names["revision"])[-1].files
    raise Answer(
        200,
        [
            {"type": "file", "path": path, "size": len(content), "oid": oid_of(content)}
            for path, content in sorted(files.items())
        ],
    )


def download(handler: Handler, names: dict[str, str], body: bytes) -> None:
    """One file's content."""
    commit = handler.commits(names["name"], names["revision"])[-1]
    content = commit.files.get(names["path"])
    if content is None:
        raise Answer(404, {"error": "Entry not found"}, code="EntryNotFound")
    headers = {"ETag": f'"{oid_of(content)}"', "X-Repo-Commit": commit.oid, "Content-Type": "application/octet-stream"}
    raise Answer(200, content, headers)


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
    """A server that runs for the length of the block, on a free port of this machine."""
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
