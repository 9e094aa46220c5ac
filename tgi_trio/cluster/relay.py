"""Serves one client's request from one replica, or from several after failures.

If a replica is full (429), does not serve now (503, 529) or does not have the response that the
request goes on from (`x-tgi-elsewhere`), the next one is tried; the client gets such an answer only
if all replicas give one. If none takes requests but one may soon, as when the
only one was too busy to say how it is, the request waits for it. If a replica is lost, the request
is retried elsewhere: from the beginning if the client has got nothing yet, otherwise a stream is
resumed behind the ids that the client has. A request that has lost MOST_LOST replicas fails, since
it may be what crashes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from tgi_trio.cluster.claims import Claims, serve_one_model
from tgi_trio.cluster.event_cutter import BadStream, EventCutter
from tgi_trio.cluster.exchange import AnswerTooLarge, Exchange
from tgi_trio.cluster.fleet import Fleet, Replica
from tgi_trio.cluster.prefix_chain import make_prefix_chain
from tgi_trio.cluster.replica_http import AnswerHead, ReplicaLost, request_bytes
from tgi_trio.router.http.messages.problems import ELSEWHERE
from tgi_trio.router.http.sse import EventBody
from tgi_trio.router.http.wire.headers import Header
from tgi_trio.router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

MOST_LOST: Final = 3  # lost replicas after which a request fails
MOST_HELD: Final = 1 << 26  # bytes of a stream that may be held back: all of an answer, often
WAIT_SECONDS: Final = 10.0  # a request that has not begun may wait this long for a replica
RESUME_SECONDS: Final = 30.0  # a stream may wait this long for a replica that resumes it
PAUSE: Final = 0.1  # seconds between two rounds over all replicas

# Statuses after which the next replica is tried; Messages have 529 in the place of 503.
PASSED_OVER: Final = frozenset({429, 503, 529})


def _is_passed_over(head: AnswerHead) -> bool:
    """Whether the next replica is asked: it may have the response that a request goes on from."""
    return head.status in PASSED_OVER or bool(head.header(ELSEWHERE))


class Unserved(Exception):
    """No replica can serve the request; the text says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request."""

    method: str
    target: bytes
    headers: list[Header]  # without hop-by-hop headers
    body: bytes
    request_id: str
    internal: tuple[Header, ...] = ()  # `Front.seal`: secret, seed and time; empty: not resumable
    began: float = 0.0  # trio clock, seconds

    def at(self, emitted: bytes | None) -> bytes:
        """Return the bytes to send to a replica now; `emitted`: the ids that the client has."""
        more = [] if emitted is None else [(b"x-tgi-emitted", emitted)]
        if self.internal:  # deadlines count from when the front got the request
            waited = trio.current_time() - self.began
            more.append((b"x-tgi-waited", b"%d" % (1e3 * waited)))
        headers = [*self.headers, *self.internal, *more]
        # For HEAD, the body is left out on the way to the client.
        method = "GET" if self.method == "HEAD" else self.method
        return request_bytes(method.encode(), self.target, headers, self.body)


@dataclass(frozen=True, slots=True)
class Answer:
    """A replica's answer: a whole body, or the beginning of a stream."""

    head: AnswerHead
    body: bytes | None  # None: a stream, for `Relay.pump`


class Relay:
    """See the module's docstring. The caller always has to close it."""

    def __init__(self, fleet: Fleet, request: ClientRequest, metrics: Metrics) -> None:
        self._fleet = fleet
        self._request = request
        self._metrics = metrics
        self._chain = make_prefix_chain(request.body)
        self._cutter = EventCutter(MOST_HELD, has_ids=bool(request.internal))
        self._given = False  # whether the client has got events of the stream
        self._claims: Claims | None = None  # of the replica where the stream began
        self._lost = 0  # replicas lost while they had the request
        self._exchange: Exchange | None = None
        self._end: Callable[[], None] | None = None  # uncounts it at its present replica
        self.replica: Replica | None = None  # the present or last one

    def close(self) -> None:
        """Leave the replica, which cancels the request there. Synchronous, idempotent."""
        exchange, self._exchange = self._exchange, None
        end, self._end = self._end, None
        if exchange is not None:
            exchange.close()
        if end is not None:
            end()

    async def start(self) -> Answer:
        """Return the first answer that is not passed over, else the best of those.

        Raises Unserved if there is none.
        """
        until = trio.current_time() + WAIT_SECONDS
        while (answer := await self._ask_all()) is None:
            if not await self._fleet.wait_until_serves(until) or trio.current_time() >= until:
                raise Unserved(503, "No replica is there to serve the request: try again later")
            if self.replica is not None:  # lost: the next one may be the same
                await trio.sleep(PAUSE)
        return answer

    async def _ask_all(self) -> Answer | None:
        """Return the same as `start`, or None if there is no answer now. Raises Unserved."""
        refusal: Answer | None = None
        for replica in self._fleet.candidates(self._chain):
            if self._given and not serve_one_model(replica.claims, self._claims):
                continue
            answer = await self._attempt(replica)
            if answer is None:
                continue
            if not _is_passed_over(answer.head):
                return answer
            self._metrics.inc("tgi_front_passed_over")
            if refusal is None or answer.head.status == 429:
                refusal = answer
        return refusal

    async def _attempt(self, replica: Replica) -> Answer | None:
        """Ask a replica; None if it was lost. Raises Unserved."""
        self._end, self.replica = self._fleet.begin(replica, self._chain), replica
        exchange = self._exchange = replica.exchange()
        try:
            head = await exchange.ask(
                self._request.at(self._cutter.emitted if self._given else None)
            )
            kind = head.header(b"content-type")
            if head.status == 200 and kind.startswith(b"text/event-stream"):
                if not self._given:
                    self._claims = replica.claims
                return Answer(head, None)
            answer = Answer(head, await exchange.rest())
            self.close()
            return answer
        except ReplicaLost as error:
            self._lose(replica, error)
            return None
        except AnswerTooLarge as error:
            raise Unserved(502, f"The replica's answer is too large: {error}") from None

    def _lose(self, replica: Replica, error: ReplicaLost) -> None:
        """Leave a lost replica. Raises Unserved if it was the last that the request may lose."""
        begun = self._exchange is not None and self._exchange.begun
        self.close()
        self._fleet.lose(replica, error, under_way=begun)
        self._metrics.inc("tgi_front_lost")
        log.warning("request %s lost replica %s: %s", self._request.request_id, replica.name, error)
        self._lost += begun
        if self._lost >= MOST_LOST:
            raise Unserved(
                502, f"{self._lost} replicas were lost while they had the request: it is given up"
            )

    # ---- a stream -------------------------------------------------------------------------------

    async def pump(self, body: EventBody) -> None:
        """Write all events of the stream that `start` has begun, unless the client disconnects.

        `body.finish` is left to the caller. Raises Unserved if no replica can resume the stream.
        """
        while self._exchange is not None and self.replica is not None:
            try:
                await self._write_events(self._exchange, body)
                self.close()
            except ReplicaLost as error:
                lost = trio.current_time()
                self._lose(self.replica, error)
                await self._resume()
                self._metrics.observe("tgi_front_pause_duration", trio.current_time() - lost)
            except BadStream as error:
                raise Unserved(502, f"The replica's stream cannot be read: {error}") from None

    async def _write_events(self, exchange: Exchange, body: EventBody) -> None:
        """Write one replica's events until it ends or the client disconnects.

        Raises ReplicaLost and BadStream.
        """
        cut, write = self._cutter.cut, body.write

        def take(part: bytes) -> bool:
            events = cut(part)
            if events:
                write(events)
                self._given = True
            return not body.failed

        await exchange.follow(take)
        write(self._cutter.finish())

    async def _resume(self) -> None:
        """Resume the stream at another replica. Raises Unserved."""
        if self._given and not self._request.internal:
            raise Unserved(
                502, "The replica was lost; with --cluster-secret-file another would go on"
            )
        self._cutter.start_again()
        with trio.move_on_after(RESUME_SECONDS):
            while True:
                answer = await self._ask_all()
                if answer is not None and answer.body is None:
                    self._metrics.inc("tgi_front_resumed")
                    return
                if answer is not None and not _is_passed_over(answer.head):
                    status = answer.head.status
                    raise Unserved(502, f"No other replica can go on with it: status {status}")
                await trio.sleep(PAUSE)
        raise Unserved(503, f"No replica could go on with it within {RESUME_SECONDS:g} s")
