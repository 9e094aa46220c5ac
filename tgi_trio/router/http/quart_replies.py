"""Replies of ours on their way through Quart, whose views and error handlers return responses."""

from __future__ import annotations

from typing import Any

from quart import Response
from quart.wrappers.response import ResponseBody

from tgi_trio.router.http.call import Reply


class ReplyResponse(Response):
    """Carries a Reply through Quart, to whoever calls `unwrap_reply`."""

    reply: Reply


def wrap_reply(reply: Reply) -> Response:
    """Return a response for Quart that is the reply."""
    response = ReplyResponse(b"", status=reply.status)
    response.reply = reply
    return response


async def unwrap_reply(response: Any) -> Reply:
    """Return the Reply inside a response, or made from one of Quart's own."""
    if isinstance(response, ReplyResponse):
        return response.reply
    body = b""
    if isinstance(response, Response) and isinstance(response.response, ResponseBody):
        body = await response.get_data(as_text=False)
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.headers.items()
        if name.lower() not in ("content-length", "content-type")
    ]
    content_type = (response.content_type or "").encode("latin-1") if body else b""
    return Reply(body, response.status_code, content_type, headers)
