"""The page at /ui: chat, completion and a live dashboard, served from files of the package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.wire.headers import Header

_TYPES: Final = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
}
_FILES: Final = (
    "page.css",
    "page.js",
    "chat.js",
    "answer.js",
    "example_tools.js",
    "generating.js",
    "attachments.js",
    "server.js",
    "chances.js",
    "dashboard.js",
)

# Nothing from other servers is run or loaded; a model's text is never markup.
_POLICY: Final[list[Header]] = [
    (
        b"content-security-policy",
        b"default-src 'self'; img-src data:; media-src data:; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-cache"),
]


@cache
def _content(name: str) -> bytes:
    return files("tgi_trio.router.http").joinpath("ui", name).read_bytes()


def _route(path: str, name: str) -> Route:
    async def handler(call: Call) -> Reply:
        kind = _TYPES[name.rpartition(".")[2]]
        return Reply(_content(name), content_type=kind, headers=list(_POLICY))

    return Route("GET", path, handler, protected=False)


ROUTES = (_route("/ui", "index.html"), *(_route(f"/ui/{name}", name) for name in _FILES))
