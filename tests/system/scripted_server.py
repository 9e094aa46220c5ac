"""A chat server that says what a test says, piece by piece, with the page at /ui.

What a client does between two pieces of an answer cannot be seen with a real server: here an event
is sent when the test sends it.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

FILES = files("tgi_trio.router.http").joinpath("ui")
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PATIENCE = 120.0  # seconds for the page to ask, and for the test to go on


class Script:
    """Requests as they come, and the events that answer them."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._asked: queue.Queue[dict[str, Any]] = queue.Queue()
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.away = False  # nothing is told of the model: the connection breaks off

    def note(self, body: dict[str, Any]) -> None:
        """Take a request's body."""
        self._asked.put(body)

    def asked(self) -> dict[str, Any]:
        """Return the body of the next request, once it is there."""
        return self._asked.get(timeout=_PATIENCE)

    def say(self, **delta: Any) -> None:
        """Send one delta of the answer under way."""
        self.events.put({"choices": [{"index": 0, "delta": delta}]})

    def call(self, index: int, *, id: str | None = None, **function: str) -> None:
        """Send news of one call."""
        news = {"index": index, "function": function} | ({"id": id} if id else {})
        self.say(tool_calls=[news])

    def end(self) -> None:
        """End the answer under way."""
        self.events.put(None)


@contextmanager
def scripted_server() -> Iterator[Script]:
    """Serve the page's files and a chat that follows the script, until the block is left."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    script = Script(server.server_address[1])
    server.RequestHandlerClass = type("Handler", (_Handler,), {"script": script})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield script
    finally:
        script.end()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    script: Script

    def do_GET(self) -> None:
        name = self.path.removeprefix("/ui").strip("/") or "index.html"
        if self.path == "/info" and self.script.away:
            self.close_connection = True
        elif self.path == "/info":
            self._send(b'{"model_id": "script"}', "application/json")
        elif FILES.joinpath(name).is_file():
            self._send(FILES.joinpath(name).read_bytes(), _TYPES[name.rpartition(".")[2]])
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        self.script.note(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        while (event := self.script.events.get(timeout=_PATIENCE)) is not None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Be silent."""
