"""A hub imitated by a small HTTP server, by the real one's rules; HF_ENDPOINT leads to it."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves made-up repositories by the hub's rules; `requests` keeps (path, token)."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.stopped = threading.Event()
        self.requests: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        token = self.headers.get("Authorization")
        path = self.path.split("?")[0].removeprefix("/api/models").removeprefix("/")
        self.server.requests.append((path, token))
        owner, name, *rest = path.split("/")
        repository = f"{owner}/{name}"
        files = self.server.repositories.get(repository)
        if owner == "broken":
            self._error(500, "ServerError")
        elif owner == "silent":
            self.server.stopped.wait()  # says nothing until it ends
            self.close_connection = True
        elif owner == "garbage":
            self._answer(200, b"<html>Please log in</html>", {})
        elif owner.startswith("status-"):
            self._error(int(owner.removeprefix("status-")), "")
        elif owner == "cut" and name == "off":
            self.close_connection = True
        elif files is None:
            self._error(401, "RepoNotFound")
        elif owner == "gated" and token != "Bearer secret":
            self._error(403, "GatedRepo")
        elif len(rest) > 1 and rest[0] == "revision" and rest[1] not in ("main", SHA):
            self._error(404, "RevisionNotFound")
        elif rest[:1] == ["resolve"]:
            self._file(files.get("/".join(rest[2:])))
        elif rest[:1] == ["tree"]:
            self._json([
                {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                for path, data in files.items()
            ])  # fmt: skip
        else:
            siblings = [{"rfilename": path} for path in files]
            if owner == "slow" and not rest:
                self.server.stopped.wait()  # says nothing until it ends
            tag = {"pipeline_tag": "text2text-generation"} if owner == "some" else {}
            self._json({"id": repository, "sha": SHA, "siblings": siblings, **tag})

    def _file(self, data: bytes | None) -> None:
        if data is None:
            self._error(404, "EntryNotFound")
        else:
            self._answer(200, data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": SHA})

    def _json(self, content: object) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def running_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    """Serve repositories (name -> file -> content) for the length of the block."""
    with FakeHub(repositories) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.stopped.set()
            server.shutdown()
            thread.join()
