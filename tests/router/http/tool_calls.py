"""Calls of tools in answers of chats, whole and in pieces."""

from __future__ import annotations

from msgspec import UNSET

from tgi_trio.router.http.messages import replies


def called(message: replies.OutputMessage) -> list[tuple[str, str]]:
    """Return what a message calls, and with what: arguments, or the text of a custom tool."""
    return [made(call) for call in message.tool_calls or []]


def made(call: replies.OutputToolCall) -> tuple[str, str]:
    if call.type == "custom":
        assert call.custom is not UNSET and call.function is UNSET
        return call.custom.name, call.custom.input
    assert call.function is not UNSET and call.custom is UNSET
    return call.function.name, call.function.arguments


def piece(call: replies.ToolCallDelta) -> tuple[str, str]:
    """Return the name that a piece of a call brings, if any, and what it adds to its arguments."""
    if call.custom is not UNSET:
        assert call.function is UNSET
        return call.custom.name or "", call.custom.input
    assert call.function is not UNSET
    return call.function.name or "", call.function.arguments
