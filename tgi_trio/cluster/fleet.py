"""The replicas of a front: their health, their load, and the connections to them.

`Members` decides which replicas are alive and `Routing` which one gets a request; both are pure.
This file connects them with the network: it polls every replica's `/health`, and closes a dead
replica's connections, so that the requests on them move to another one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import trio

from tgi_trio.cluster.claims import Claims, find_differences, read_claims
from tgi_trio.cluster.exchange import AnswerTooLarge, Exchange
from tgi_trio.cluster.members import Member, MemberEvent, Members, MemberState
from tgi_trio.cluster.prefix_chain import Chain
from tgi_trio.cluster.replica_http import (
    AnswerHead,
    Connections,
    NobodyListens,
    ReplicaLost,
    request_bytes,
)
from tgi_trio.cluster.routing import Routing

log = logging.getLogger(__name__)

_INFO: Final = request_bytes(b"GET", b"/info", [], b"")
_LOAD: Final = re.compile(rb"([0-9]{1,9})/([0-9]{1,9})")  # requests / slots


class Replica:
    """One replica, from being named until it is forgotten."""

    def __init__(self, member: Member) -> None:
        self.name = member.name
        self.running = 0  # clients' requests
        self.asking = trio.CancelScope()  # of the task that polls its health
        self.poll_now = trio.Event()  # set to poll at once
        self.polled = trio.Event()  # set once the first poll has ended, in whatever way
        self.claims: Claims | None = None  # what it says that it serves; None: not asked yet
        self.refuses = False  # its last answer was a 403: it does not know this front's secret
        self._member = member
        self._connections = Connections(member.name)

    def exchange(self) -> Exchange:
        """Return an exchange for one request."""
        return Exchange(self._connections, self._hear)

    def hang_up(self) -> None:
        """Close every connection; whoever waits on one gets ReplicaLost."""
        self._connections.close()

    def _hear(self) -> None:
        self._member.heard = trio.current_time()


class Fleet:
    """See the module's docstring."""

    def __init__(
        self,
        routing: Routing,
        timeout: float,
        tell: Callable[[str, Chain], None] | None = None,
        secret: bytes = b"",
    ) -> None:
        """`timeout`: seconds of silence after which a replica is dead; `tell`: `Feed.tell`.

        `secret`: shown to replicas, which then report their load; empty: they report none.
        """
        self._tell_fronts = tell
        headers = [(b"x-tgi-front", secret)] if secret else []
        self._health = request_bytes(b"GET", b"/health", headers, b"")
        self.members = Members(timeout, self._change)
        self._routing = routing
        self._replicas: dict[str, Replica] = {}
        self._nursery: trio.Nursery | None = None
        self._changed = trio.lowlevel.ParkingLot()  # requests that wait for a replica

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Poll the health of all replicas, also of those named later, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            for replica in self._replicas.values():
                self._nursery.start_soon(self._ask_after, replica)
            task_status.started()
            try:
                while True:
                    await trio.sleep(self.members.interval)
                    self.members.tick(trio.current_time())
            finally:
                for replica in self._replicas.values():
                    replica.hang_up()

    # ---- who is there ---------------------------------------------------------------------------

    def name(self, name: str) -> None:
        """Add a replica."""
        self.members.name(name, trio.current_time())

    def dismiss(self, name: str) -> None:
        """Send a replica no new requests, and forget it once those it has are done."""
        self.members.dismiss(name)

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, whatever their state."""
        return list(self._replicas.values())

    @property
    def differing(self) -> dict[str, str]:
        """Replicas that say of themselves what most others do not, and what that is."""
        return find_differences({each.name: each.claims or () for each in self._replicas.values()})

    @property
    def serves(self) -> bool:
        """Whether a replica takes requests."""
        return len(self._routing) > 0

    @property
    def healthy(self) -> bool:
        """Whether requests are to be sent here: a replica takes them, or is only late.

        While no other is up, requests wait for one that is late, until it answers or is dead.
        """
        return any(each.expected for each in self.members)

    async def wait_until_serves(self, until: float) -> bool:
        """Wait until a replica takes requests; returns whether one does. A checkpoint.

        Gives up at `until` (trio's clock), or at once where none will soon: replicas that are dead
        or leaving, or refuse this front, are not waited for.
        """
        await trio.lowlevel.checkpoint()
        with trio.move_on_at(until):
            while not self.serves and self._may_serve():
                await self._changed.park()
        return self.serves

    def _may_serve(self) -> bool:
        """Return whether a replica may soon take requests that does not now."""
        return any(
            each.state in (MemberState.NEW, MemberState.SUSPECT)
            and not self._replicas[each.name].refuses
            for each in self.members
        )

    def _change(self, member: Member, before: MemberState) -> None:
        self._changed.unpark_all()
        name, state, routing = member.name, member.state, self._routing
        if before is MemberState.GONE:
            self._replicas[name] = Replica(member)
            if self._nursery is not None:
                self._nursery.start_soon(self._ask_after, self._replicas[name])
            return
        log.log(
            logging.INFO if state is MemberState.UP else logging.WARNING,
            "replica %s is %s, it was %s",
            name,
            state.value,
            before.value,
        )
        replica = self._replicas[name]
        match state:
            case MemberState.UP:
                (routing.readmit if name in routing else routing.add)(name)
            case MemberState.SUSPECT | MemberState.LEAVING if name in routing:
                routing.suspend(name)
            case MemberState.DEAD | MemberState.GONE if name in routing:
                routing.remove(name)  # its prefix cache is most probably gone
        match state:
            case MemberState.DEAD:
                replica.hang_up()
                replica.claims = None  # what comes back there may be another one
            case MemberState.GONE:
                replica.hang_up()
                replica.asking.cancel()
                del self._replicas[name]
            case MemberState.LEAVING if not replica.running:
                self._tell(replica, MemberEvent.EMPTY)

    def _tell(self, replica: Replica, event: MemberEvent) -> None:
        if self._replicas.get(replica.name) is replica:  # the name may be another one's by now
            self.members.tell(replica.name, event, trio.current_time())

    # ---- how they are ---------------------------------------------------------------------------

    async def _ask_after(self, replica: Replica) -> None:
        """Poll a replica's health at every interval, and at once when `poll_now` is set."""
        with replica.asking:
            while True:
                following = trio.current_time() + self.members.interval
                replica.poll_now = trio.Event()  # first: it may be set while the replica is asked
                await self._ask(replica)
                replica.polled.set()
                with trio.move_on_at(following):
                    await replica.poll_now.wait()

    async def wait_polled(self) -> None:
        """Wait until the first poll of every present replica has ended."""
        for replica in self.replicas:
            await replica.polled.wait()

    async def _ask(self, replica: Replica) -> None:
        # A late answer still counts, so it is waited for until the replica would be dead.
        exchange = replica.exchange()
        try:
            with trio.move_on_after(self.members.timeout):
                head = await exchange.ask(self._health)
                await exchange.rest()
                self._take_answer(replica, head)
                exchange.close()
                if head.status == 200 and replica.claims is None:
                    await self._compare(replica)
        except NobodyListens:
            self._tell(replica, MemberEvent.CLOSED)
        except (ReplicaLost, AnswerTooLarge) as error:
            log.debug("replica %s does not say how it is: %s", replica.name, error)
        finally:
            exchange.close()

    async def _compare(self, replica: Replica) -> None:
        """Ask a replica what it serves, and say where that is not what the others serve."""
        exchange = replica.exchange()
        try:
            head = await exchange.ask(_INFO)
            body = await exchange.rest()
        finally:
            exchange.close()
        before = self.differing
        replica.claims = read_claims(body) if head.status == 200 else ()
        for name, what in self.differing.items():
            if before.get(name) != what:
                log.warning(
                    "replica %s does not serve what most others do: %s. Requests go to all of "
                    "them: give them the same flags, or this model a front of its own",
                    name,
                    what,
                )

    def _take_answer(self, replica: Replica, head: AnswerHead) -> None:
        well = head.status == 200
        if head.status == 403 and not replica.refuses:
            log.warning(
                "replica %s does not know this front: it needs the same --cluster-secret-file",
                replica.name,
            )
        if replica.refuses != (head.status == 403):
            replica.refuses = not replica.refuses
            self._changed.unpark_all()
        self._tell(replica, MemberEvent.WELL if well else MemberEvent.UNWELL)
        load = _LOAD.fullmatch(head.header(b"x-tgi-load"))
        if load is not None:
            requests, slots = map(int, load.groups())
            self._routing.report(replica.name, requests=requests, slots=slots)

    # ---- requests -------------------------------------------------------------------------------

    def candidates(self, chain: Chain) -> Iterator[Replica]:
        """Yield replicas for a request, the best first; skips those that are no longer up."""
        for name in self._routing.order(chain):
            member = self.members.find(name)
            if member is not None and member.state is MemberState.UP:
                yield self._replicas[name]

    def begin(self, replica: Replica, chain: Chain) -> Callable[[], None]:
        """Count a request to a replica; returns a function to be called once, when it has ended.

        To be called right after `candidates` has yielded the replica, so that it is still up.
        """
        replica.running += 1
        self._routing.sent(replica.name, chain)
        if self._tell_fronts is not None:
            self._tell_fronts(replica.name, chain)
        return partial(self._end, replica)

    def _end(self, replica: Replica) -> None:
        replica.running -= 1
        self._routing.finished(replica.name)
        member = self.members.find(replica.name)
        if not replica.running and member is not None and member.state is MemberState.LEAVING:
            self._tell(replica, MemberEvent.EMPTY)

    def lose(self, replica: Replica, error: ReplicaLost, under_way: bool) -> None:
        """Note that a replica lost a request; `under_way`: it may have received some of it."""
        if isinstance(error, NobodyListens):
            self._tell(replica, MemberEvent.CLOSED)
        elif under_way:
            self._tell(replica, MemberEvent.CUT)
            replica.poll_now.set()

    def check(self) -> None:
        """Raise AssertionError if members, routing and replicas disagree; for tests."""
        self._routing.check()
        assert {each.name for each in self.members} == self._replicas.keys()
        up = sum(each.state is MemberState.UP for each in self.members)
        assert len(self._routing) == up
