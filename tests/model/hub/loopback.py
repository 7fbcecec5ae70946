"""A hub on this machine with the routes of the real one, for the hub's own library."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.waiting import PATIENCE_S

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Repo:
    """Files by their paths; those of at least 1,000 bytes are kept in the large-file store.

    ``announced`` changes what is told of a file: size, sha256, and git's blob; ``sent`` what
    arrives. ``is_gated`` asks for a token. ``has_bare_names``: only its tree tells sizes and
    checksums. ``revisions`` are others by the names of their branches; a commit of its own tells
    each.
    """

    files: dict[str, bytes]
    announced: dict[str, dict[str, Any]] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)
    is_gated: bool = False
    has_bare_names: bool = False
    commit: str = COMMIT
    revisions: dict[str, Repo] = field(default_factory=dict)

    def at(self, revision: str | None) -> Repo | None:
        """Return what a branch or a commit holds."""
        if revision in (None, "main", self.commit):
            return self
        others = self.revisions | {one.commit: one for one in self.revisions.values()}
        return others.get(str(revision))

    def told(self, name: str) -> dict[str, Any]:
        data = self.files.get(name, b"")
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        facts = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "blobId": blob}
        return facts | self.announced.get(name, {})


class Hub:
    """Repositories by name, the faults that a test asks for, and what was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.token = "hf_secret"
        self.cuts: list[int] = []  # bytes after which the coming downloads are cut
        self.is_endless = False  # answers have no length, and go on for long after the file
        self.holds: threading.Event | None = None  # what connections wait for before they close
        self.ranges: list[tuple[str, str]] = []  # file and Range header of each download
        self.asked: list[str] = []
        self.logins: dict[str, str | None] = {}  # the Authorization of each path's last request
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append(f"{request.command} {path}")
        self.logins[path] = request.headers.get("authorization")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            if repo := self._allowed(request, match[1], match[2]):
                self._json(request, _info(match[1], repo))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            if repo := self._allowed(request, match[1], match[2]):
                self._json(request, _tree(repo))
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if repo := self._allowed(request, match[1], match[2]):
                self._resolve(request, match[1], repo, match[3])
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            name, _, commit = match[1].partition("@")
            repo = self.repos[name].at(commit or None)
            assert repo is not None
            self._send(request, match[2], repo.files[match[2]])
        else:
            self._fail(request, 404, "NotFound", path)

    def _allowed(
        self, request: http.server.BaseHTTPRequestHandler, name: str, revision: str | None
    ) -> Repo | None:
        repo = self.repos.get(name)
        login = request.headers.get("authorization", "")
        if repo is None:
            self._fail(request, 404 if login else 401, "RepoNotFound", "Repository not found")
        elif repo.is_gated and login != f"Bearer {self.token}":
            self._fail(request, 403 if login else 401, "GatedRepo", "Access is restricted")
            return None
        elif (found := repo.at(revision)) is None:
            self._fail(request, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return found
        return None

    def _resolve(
        self, request: http.server.BaseHTTPRequestHandler, name: str, repo: Repo, file: str
    ) -> None:
        if file not in repo.files:
            self._fail(request, 404, "EntryNotFound", file)
            return
        facts = repo.told(file)
        large = len(repo.files[file]) >= 1000
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{facts["sha256"][:40]}"'}
        if large:
            linked = {"X-Linked-Size": str(facts["size"]), "X-Linked-ETag": f'"{facts["sha256"]}"'}
            request.send_response(302)
            place = name if repo.commit == COMMIT else f"{name}@{repo.commit}"
            target = (
                f"{self.url.replace('127.0.0.1', 'localhost')}/cdn/{place}/{file}"  # another host
            )
            for key, value in (headers | linked | {"Location": target}).items():
                request.send_header(key, value)
            request.send_header("Content-Length", "0")
            request.end_headers()
        else:
            self._send(request, file, repo.sent.get(file, repo.files[file]), headers)

    def _send(
        self,
        request: http.server.BaseHTTPRequestHandler,
        file: str,
        data: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        wanted = request.headers.get("Range", "")
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin, end = int(first or 0), min(int(last or len(data)), len(data) - 1) + 1
        if request.command == "GET":
            self.ranges.append((file, wanted))
        request.send_response(206 if wanted else 200)
        if wanted:
            request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        if not self.is_endless:
            request.send_header("Content-Length", str(end - begin))
        for key, value in (headers or {}).items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET" and self.is_endless:
            with suppress(OSError):
                request.wfile.write(data[begin:end])
                for _ in range(64):
                    request.wfile.write(bytes(1 << 20))
        elif request.command == "GET":
            body = data[begin:end]
            is_large = len(data) >= 1000
            request.wfile.write(body[: self.cuts.pop(0)] if self.cuts and is_large else body)
            if self.holds and is_large:
                self.holds.wait(PATIENCE_S)

    def _json(self, request: http.server.BaseHTTPRequestHandler, value: Any) -> None:
        body = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _fail(
        self, request: http.server.BaseHTTPRequestHandler, status: int, code: str, why: str
    ) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("X-Error-Message", why)
        request.send_header("Content-Length", "0")
        request.end_headers()


def _info(name: str, repo: Repo) -> dict[str, Any]:
    siblings: list[dict[str, Any]] = []
    for file, data in repo.files.items():
        facts = repo.told(file)
        entry = {"rfilename": file, "size": facts["size"], "blobId": facts.pop("blobId")}
        if len(data) >= 1000:
            entry["lfs"] = facts | {"pointerSize": 130}
        siblings.append({"rfilename": file} if repo.has_bare_names else entry)
    return {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "tags": []}


def _tree(repo: Repo) -> list[dict[str, Any]]:
    """Return what the route of that name says: folders too, which are no files."""
    folders = {file.rpartition("/")[0] for file in repo.files} - {""}
    entries = [{"type": "directory", "path": path, "oid": "0", "size": 0} for path in folders]
    for file, data in repo.files.items():
        facts = repo.told(file)
        size, blob = facts["size"], facts["blobId"]
        entry = {"type": "file", "path": file, "size": size, "oid": blob}
        if len(data) >= 1000:
            entry["lfs"] = {"oid": facts["sha256"], "size": size, "pointerSize": 130}
        entries.append(entry)
    return entries


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub until the block ends."""
    hub = Hub()
    thread = threading.Thread(target=hub.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.http.shutdown()
        hub.http.server_close()
        thread.join()
