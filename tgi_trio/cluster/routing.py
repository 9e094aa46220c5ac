"""Which replica gets a request: pure, without a clock, without input or output.

The replica that has seen the longest part of the prompt, since it has that part's KV; unless it is
so much busier than another that waiting there would cost more. Whoever has no such replica goes to
the less busy of two drawn at random: with loads that are always a little old, picking the best of
all would send everybody to the same one (Mitzenmacher, "How Useful Is Old Information?", 2000).
Nothing here looks at all replicas, so a decision costs the same for ten and for ten thousand.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from tgi_trio.cluster.prefix_chain import Chain

HEADS: Final = 1 << 17  # prefixes that are remembered: some 250 bytes each
OWNERS: Final = 4  # replicas that are remembered for a prefix
CHOICES: Final = 8  # replicas that `order` names at most
SLACK: Final = 0.25  # of its slots a replica with the prefix may be busier by than one without
SLOTS: Final = 8.0  # of a replica that has not yet said how many it has


class Replica:
    """One replica as a front sees it, from being added to being removed."""

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
        self.at = -1  # its place among those that get requests; -1: it gets none
        self.ours = ours  # requests that this front has there
        self.ours_then = 0  # the same when it last reported
        self.elsewhere = 0  # requests that other fronts sent there since it last reported
        self.reported = 0  # requests that it had then, running and waiting
        self.reports = False  # whether it has ever said so
        self.slots = SLOTS

    def pressure(self) -> float:
        """Return how busy it must be by now, in parts of what it runs at once."""
        since = self.reported + self.ours - self.ours_then + self.elsewhere
        return (since if since > self.ours else self.ours) / self.slots


class Routing:
    """Replicas, how busy they are and which prefixes they were sent.

    Memory is bounded by `heads`: the prefixes that were not asked for the longest are forgotten.
    `draw` is where chance comes from. Methods that name a replica raise KeyError for one that is
    not there, but for those that may come late: `report`, `learn` and `finished`.
    """

    def __init__(self, draw: random.Random, heads: int = HEADS) -> None:
        self._draw = draw.random
        self._heads = heads
        self._replicas: dict[str, Replica] = {}
        self._open: list[Replica] = []  # those that get requests
        self._left: dict[str, int] = {}  # requests of ours at replicas that were removed
        self._owners: OrderedDict[bytes, tuple[Replica, ...]] = OrderedDict()  # newest last

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def __len__(self) -> int:
        """Return how many replicas get requests."""
        return len(self._open)

    def add(self, replica: str) -> None:
        """Let a replica have requests. Its cache is taken for empty; ValueError if it is there."""
        if replica in self._replicas:
            raise ValueError(f"replica {replica} is there already")
        self._replicas[replica] = Replica(replica, self._left.pop(replica, 0))
        self.readmit(replica)

    def remove(self, replica: str) -> None:
        """Forget a replica and what it was sent; requests that are still there may yet finish."""
        self.suspend(replica)
        gone = self._replicas.pop(replica)
        if gone.ours:
            self._left[replica] = gone.ours

    def suspend(self, replica: str) -> None:
        """Send a replica nothing new, and remember what it has."""
        one = self._replicas[replica]
        if one.at < 0:
            return
        last = self._open.pop()
        if last is not one:
            self._open[one.at] = last
            last.at = one.at
        one.at = -1

    def readmit(self, replica: str) -> None:
        """Let a suspended replica have requests again."""
        one = self._replicas[replica]
        if one.at < 0:
            one.at = len(self._open)
            self._open.append(one)

    def report(self, replica: str, *, requests: int, slots: int) -> None:
        """Take what a replica says of itself: its requests, and how many it runs at once."""
        one = self._replicas.get(replica)
        if one is None:
            return
        one.reported = requests
        one.reports = True
        one.ours_then = one.ours
        one.elsewhere = 0
        one.slots = max(1.0, slots)

    def order(self, chain: Chain) -> list[str]:
        """Return replicas for a request, the best first, and others to try when one is full.

        At most eight, each once; all there are if they are no more. Empty when none gets requests.
        """
        if not self._open:
            return []
        chosen = list(self._drawn())
        # Of two drawn at random the less busy; the others stay as they were drawn.
        if len(chosen) > 1 and chosen[1].pressure() < chosen[0].pressure():
            chosen[0], chosen[1] = chosen[1], chosen[0]
        owner = self._owner(chain, chosen[0].pressure() + SLACK)
        if owner is not None and owner is not chosen[0]:
            chosen = [owner, *(one for one in chosen if one is not owner)][:CHOICES]
        return [one.name for one in chosen]

    def sent(self, replica: str, chain: Chain) -> None:
        """Note that this front sent a request there; `finished` is called once for each."""
        one = self._replicas[replica]
        one.ours += 1
        self._remember(one, chain)

    def finished(self, replica: str) -> None:
        """Note that such a request has ended, however it did; ValueError if there was none."""
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

        It is counted until the replica's next report; one that never reports would have it forever.
        """
        one = self._replicas.get(replica)
        if one is not None:
            one.elsewhere += one.reports
            self._remember(one, chain)

    def check(self) -> None:
        """Raise AssertionError where the books contradict each other; for tests."""
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

    def _drawn(self) -> Iterator[Replica]:
        """Yield up to eight different replicas in an order of chance."""
        there = self._open
        count = len(there)
        seen: set[int] = set()
        for _ in range(min(CHOICES, count)):
            at = int(self._draw() * count)
            while at in seen:  # the next free one: few are taken, and drawing again has no bound
                at = (at + 1) % count
            seen.add(at)
            yield there[at]

    def _owner(self, chain: Chain, limit: float) -> Replica | None:
        """Return who has the longest part of a chain, among those no busier than `limit`."""
        for head in reversed(chain):
            best: Replica | None = None
            lowest = limit
            for one in self._owners.get(head, ()):
                if one.at >= 0 and (pressure := one.pressure()) <= lowest:
                    best, lowest = one, pressure
            if best is not None:
                return best
        return None

    def _remember(self, one: Replica, chain: Chain) -> None:
        owners = self._owners
        for head in chain:
            known = owners.get(head)
            if known is None:
                owners[head] = (one,)
                continue
            owners.move_to_end(head)
            if known[-1] is not one:  # the newest last, and none that has been removed
                kept = [k for k in known if k is not one and self._replicas.get(k.name) is k]
                owners[head] = (*kept[1 - OWNERS :], one)
        while len(owners) > self._heads:
            owners.popitem(last=False)
