"""Responses that are computed in the background: whether or not their clients wait.

No task belongs to one. The engine's task calls `deliver` in each of its steps, as it does for
streams. What the generation holds (its permit, its stream, an adapter) is handed over by the
request that asked for it, and is let go with the last token, or where the response is cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import trio

from tgi_trio.errors import ValidationError
from tgi_trio.router.http.account import access
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.dialects.responses import replies
from tgi_trio.router.http.dialects.responses.answer import ResponseEvents
from tgi_trio.router.http.dialects.responses.callers import read_caller
from tgi_trio.router.http.dialects.responses.history import History, keep_response
from tgi_trio.router.http.engine_api import TokenStreamApi
from tgi_trio.router.http.event_log import EventLog
from tgi_trio.router.http.generation import explain, record_request, submit, with_receipt
from tgi_trio.router.http.messages.problems import Problem, Refused
from tgi_trio.router.http.response_store import StoredTurn
from tgi_trio.router.request import Outcome, Request, Token
from tgi_trio.router.telemetry.request_stats import RequestStats

_TOO_LARGE: Final = Problem(
    500,
    "the events of this response are larger than all that may be kept (--response-store-bytes)",
    "generation",
)


class BackgroundResponse:
    """One of them, from the moment on at which it is queued."""

    _events: ResponseEvents  # this and the next are set by `start`
    _stream: TokenStreamApi

    def __init__(self, call: Call, id: str, history: History, *, recorded: bool) -> None:
        """`history`: written, see `write_given`; `recorded`: whether its events are read.

        Raises Refused if a front wants to resume it, which is only done to streams of requests.
        """
        if call.front is not None and call.front.emitted:
            why = "`x-tgi-emitted` is not for `background`: what a lost replica computed is lost"
            raise Refused(400, why, "resume")
        self.id = id
        self.caller = read_caller(call)
        self.turn = StoredTurn(history.before, history.written.listed, b"[]")
        self.log = EventLog() if recorded else None
        self._call = call
        self._history = history
        self._resources = ExitStack()
        self._reserved = 0  # bytes of the store
        self._ended: tuple[bytes, Sequence[replies.OutputItem]] | None = None

    def keep(self, body: bytes, output: Sequence[replies.OutputItem]) -> None:
        """Take note of the response that has ended, and its items."""
        self._ended = body, output

    def start(self, events: ResponseEvents, request: Request) -> None:
        """Queue the request; from now on nothing depends on the call that asked for it.

        Raises Overloaded, and ValidationError where there is no room to keep it.
        """
        call, self._events = self._call, events
        queued = events.queue()
        logged = 0 if self.log is None else self.log.add(queued)
        if not self._reserve(len(self.turn.given) + logged):
            raise ValidationError(
                "`background` needs room for what is asked and what is answered: it is more than "
                "all that may be kept (--response-store-bytes)"
            )
        try:
            self._stream = submit(call, request)
        except BaseException:
            call.responses.release(self._reserved)
            raise
        self._resources = call.resources.pop_all()
        call.responses.running[self.id] = self
        self._stream.attach(self.deliver)

    def deliver(self, tokens: list[Token], end: Outcome | BaseException | None) -> None:
        """Write down what one step brings; never raises."""
        if self._ended is not None:
            return
        try:
            if isinstance(end, BaseException):
                self._fail(tokens, explain(self._call, end))
            elif end is None:
                self._write(self._events.step(tokens))
            else:
                request_stats = record_request(self._call, self._stream.timings, end)
                self._write(with_receipt(self._events.end(tokens, end), request_stats))
                self._close("ended")
        except Exception as defect:  # ours: it may end this response, but not the engine's step
            self._fail([], explain(self._call, defect))

    def show(self) -> bytes:
        """Return the response as it is now; of its items those that are done."""
        return self._events.show() if self._ended is None else self._ended[0]

    def cancel(self) -> bytes:
        """End it now; what is there of it is kept, and returned."""
        body = self._events.show("cancelled")
        self.keep(body, self._events.output)
        self._close("cancelled")
        return body

    def drop(self) -> None:
        """End it now, and keep nothing."""
        self._let_go("deleted")

    def _write(self, events: bytes) -> None:
        """Keep events, if they are read; a response that outgrows the store fails."""
        if self.log is not None and events and not self._reserve(self.log.add(events)):
            log, self.log = self.log, None
            log.end()
            self._fail([], _TOO_LARGE)

    def _reserve(self, size: int) -> bool:
        found = self._call.responses.reserve(size)
        self._reserved += size if found else 0
        return found

    def _fail(self, tokens: list[Token], problem: Problem) -> None:
        if self.log is not None:
            self.log.add(self._events.error(tokens, problem))
        self.keep(self._events.write_failed(problem), self._events.output)
        self._close("failed")

    def _close(self, how: str) -> None:
        """Let go of everything, and keep what has ended, once; `how` it has, for the log."""
        if self._let_go(how) and self._ended is not None:
            body, output = self._ended
            keep_response(
                *(self._call, self._history, self.id, body, output),
                background=True,
                log=self.log,
                said=how == "ended",
            )

    def _let_go(self, how: str) -> bool:
        """Leave the generation, the store and the readers; return whether it was not done yet."""
        store = self._call.responses
        if store.running.pop(self.id, None) is None:
            return False
        store.release(self._reserved)
        self._resources.close()
        if self.log is not None:
            self.log.end()
        self._tell(how)
        return True

    def _tell(self, how: str) -> None:
        """Write a line of the access log: that of the request did not know what it would cost."""
        all_stats, seconds = self._call.all_stats, trio.current_time() - self._call.received
        cost = RequestStats.sum(all_stats).fields() if all_stats else {}
        told = {"request_id": self._call.request_id, "seconds": round(seconds, 6), **cost}
        access.info("background %s %s", self.id, how, extra=told)
