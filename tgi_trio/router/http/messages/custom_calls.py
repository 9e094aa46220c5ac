"""Converts calls of custom tools for clients: their JSON arguments become a text."""

from __future__ import annotations

from collections.abc import Collection

from tgi_trio.router.delta import CallDelta, Delta
from tgi_trio.router.text.tools.custom import read_input


class CustomInputs:
    """Turns the arguments of one answer's custom tools into texts.

    Arguments are held back until the call has ended, as only then they are complete JSON.
    """

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the custom tools."""
        self._names = names
        self._custom: set[int] = set()  # indexes of calls of custom tools
        self._open: int | None = None  # the call whose arguments are held back
        self._arguments = ""

    def custom(self, call: CallDelta) -> bool:
        """Return whether a call is of a custom tool."""
        return call.index in self._custom

    def take(self, delta: Delta) -> Delta:
        """Return a delta in which calls of custom tools have their name first, then all text."""
        if not self._names or not delta.calls:
            return delta
        calls: list[CallDelta] = []
        for news in delta.calls:
            if news.index != self._open:
                self._close(calls)
            if news.name in self._names:
                self._open = news.index
                self._custom.add(news.index)
                calls.append(CallDelta(news.index, news.id, news.name))
            if news.index == self._open:
                self._arguments += news.arguments
            else:
                calls.append(news)
        return Delta(delta.content, calls, delta.thought)

    def end(self, delta: Delta) -> Delta:
        """As `take`, for the last delta; with the text that was held back."""
        last = self.take(delta)
        if self._open is None:
            return last
        calls = list(last.calls)
        self._close(calls)
        return Delta(last.content, calls, last.thought)

    def _close(self, calls: list[CallDelta]) -> None:
        """Add the text of the call that has ended, if any, to `calls`."""
        if self._open is None:
            return
        text = read_input(self._arguments)
        if calls and calls[-1].index == self._open:
            calls[-1].arguments = text
        else:
            calls.append(CallDelta(self._open, arguments=text))
        self._open, self._arguments = None, ""
