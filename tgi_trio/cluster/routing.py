"""Prefix-aware routing: chooses the replica for a request. Pure: no clock, no I/O.

A request goes to the replica that was sent the longest prefix of its prompt, since that one has the
prefix in its KV cache, unless it is so much busier than others that waiting there would cost more.
Otherwise it goes to the less busy of two drawn at random (power of two choices): known loads are
always a little old, and choosing the least busy of all would send everybody to the same replica
(Mitzenmacher, "How Useful Is Old Information?", 2000). A decision never looks at all replicas, so
it costs the same for ten and for ten thousand.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from tgi_trio.cluster.prefix_chain import Chain

HEADS: Final = 1 << 17  # prefixes remembered at most, some 250 bytes each
OWNERS: Final = 4  # replicas remembered for one prefix at most
CHOICES: Final = 8  # replicas that `order` returns at most
SLACK: Final = 0.25  # pressure by which a replica with the prefix may be busier than one without
SLOTS: Final = 8.0  # assumed until a replica reports its number of slots


class RoutedReplica:
    """One replica as the front sees it, from `add` to `remove`."""

    __slots__ = (
        "at",
        "elsewhere",
        "name",
        "ours",
        "ours_then",
        "reported",
        "reports",
        "slots",
    )

    def __init__(self, name: str, ours: int) -> None:
        self.name = name
        self.at = -1  # its index in `Routing._open`; -1: it gets no new requests
        self.ours = ours  # requests that this front has there
        self.ours_then = 0  # the same at its last report
        self.elsewhere = 0  # requests that other fronts have sent there since its last report
        self.reported = 0  # its requests, running and waiting, at its last report
        self.reports = False  # whether it has ever reported
        self.slots = SLOTS

    def pressure(self) -> float:
        """Return its estimated present load: requests per slot."""
        since = self.reported + self.ours - self.ours_then + self.elsewhere
        return (since if since > self.ours else self.ours) / self.slots


class Routing:
    """The replicas, their loads, and the prefixes that they were sent.

    At most `heads` prefixes are remembered, the least recently used are dropped. `draw` is the
    source of randomness. Methods that take a replica raise KeyError for an unknown one, except
    those that may be called late: `report`, `learn` and `finished`.
    """

    def __init__(self, draw: random.Random, heads: int = HEADS) -> None:
        self._draw = draw.random
        self._heads = heads
        self._replicas: dict[str, RoutedReplica] = {}
        self._open: list[RoutedReplica] = []  # those that get new requests
        self._left: dict[str, int] = {}  # our unfinished requests at replicas that were removed
        self._owners: OrderedDict[bytes, tuple[RoutedReplica, ...]] = OrderedDict()  # newest last

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def __len__(self) -> int:
        """Return how many replicas get new requests."""
        return len(self._open)

    def add(self, replica: str) -> None:
        """Add a replica, with an empty cache. Raises ValueError if it is present already."""
        if replica in self._replicas:
            raise ValueError(f"replica {replica} is there already")
        self._replicas[replica] = RoutedReplica(replica, self._left.pop(replica, 0))
        self.readmit(replica)

    def remove(self, replica: str) -> None:
        """Forget a replica and its prefixes; `finished` may still be called for its requests."""
        self.suspend(replica)
        gone = self._replicas.pop(replica)
        if gone.ours:
            self._left[replica] = gone.ours

    def suspend(self, replica: str) -> None:
        """Send a replica no new requests, but keep its prefixes."""
        one = self._replicas[replica]
        if one.at < 0:
            return
        last = self._open.pop()
        if last is not one:
            self._open[one.at] = last
            last.at = one.at
        one.at = -1

    def readmit(self, replica: str) -> None:
        """Send a suspended replica requests again."""
        one = self._replicas[replica]
        if one.at < 0:
            one.at = len(self._open)
            self._open.append(one)

    def report(self, replica: str, *, requests: int, slots: int) -> None:
        """Take a replica's report: its requests, running and waiting, and its number of slots."""
        one = self._replicas.get(replica)
        if one is None:
            return
        one.reported = requests
        one.reports = True
        one.ours_then = one.ours
        one.elsewhere = 0
        one.slots = max(1.0, slots)

    def order(self, chain: Chain) -> list[str]:
        """Return replicas for a request: the best first, then others to try if it is full.

        At most CHOICES, each once; empty if no replica gets requests.
        """
        if not self._open:
            return []
        chosen = list(self._drawn())
        # Power of two choices: the less busy of the first two goes first.
        if len(chosen) > 1 and chosen[1].pressure() < chosen[0].pressure():
            chosen[0], chosen[1] = chosen[1], chosen[0]
        owner = self._owner(chain, chosen[0].pressure() + SLACK)
        if owner is not None and owner is not chosen[0]:
            chosen = [owner, *(one for one in chosen if one is not owner)][:CHOICES]
        return [one.name for one in chosen]

    def sent(self, replica: str, chain: Chain) -> None:
        """Note that this front sent a request there; `finished` has to be called at its end."""
        one = self._replicas[replica]
        one.ours += 1
        self._remember(one, chain)

    def finished(self, replica: str) -> None:
        """Note that a request has ended, in any way. Raises ValueError if there was none."""
        one = self._replicas.get(replica)
        if one is not None:
            if not one.ours:
                raise ValueError(f"no request is left at {replica}")
            one.ours -= 1
            return
        left = self._left.get(replica, 0)
        if not left:
            raise ValueError(f"no request is left at {replica}")
        if left == 1:
            del self._left[replica]
        else:
            self._left[replica] = left - 1

    def learn(self, replica: str, chain: Chain) -> None:
        """Note that another front sent a request there.

        It counts towards the load until the replica's next report, which then includes it; it does
        not count if the replica never reports.
        """
        one = self._replicas.get(replica)
        if one is not None:
            one.elsewhere += one.reports
            self._remember(one, chain)

    def check(self) -> None:
        """Raise AssertionError if the tables contradict each other; for tests."""
        for at, one in enumerate(self._open):
            assert one.at == at and self._replicas[one.name] is one
        for name, one in self._replicas.items():
            assert one.name == name and one.ours >= 0
            assert one.at < 0 or self._open[one.at] is one
        assert not self._left.keys() & self._replicas.keys()
        assert all(count > 0 for count in self._left.values())
        assert len(self._owners) <= self._heads
        for owners in self._owners.values():
            assert 0 < len(owners) <= OWNERS and len(set(owners)) == len(owners)

    def _drawn(self) -> Iterator[RoutedReplica]:
        """Yield up to CHOICES different replicas in random order."""
        there = self._open
        count = len(there)
        seen: set[int] = set()
        for _ in range(min(CHOICES, count)):
            at = int(self._draw() * count)
            while at in seen:  # linear probing: drawing again would have no bound
                at = (at + 1) % count
            seen.add(at)
            yield there[at]

    def _owner(self, chain: Chain, limit: float) -> RoutedReplica | None:
        """Return the owner of the longest prefix among those with at most `limit` pressure."""
        for head in reversed(chain):
            best: RoutedReplica | None = None
            lowest = limit
            for one in self._owners.get(head, ()):
                if one.at >= 0 and (pressure := one.pressure()) <= lowest:
                    best, lowest = one, pressure
            if best is not None:
                return best
        return None

    def _remember(self, one: RoutedReplica, chain: Chain) -> None:
        owners = self._owners
        for head in chain:
            known = owners.get(head)
            if known is None:
                owners[head] = (one,)
                continue
            owners.move_to_end(head)
            if known[-1] is not one:  # moved to the end; removed replicas are dropped
                kept = [k for k in known if k is not one and self._replicas.get(k.name) is k]
                owners[head] = (*kept[1 - OWNERS :], one)
        while len(owners) > self._heads:
            owners.popitem(last=False)
