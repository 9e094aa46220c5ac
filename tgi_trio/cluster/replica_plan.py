"""Decides which servers to start, replace and stop. Pure: it is told the time and returns actions.

A server that ends is replaced at once. If it never served, the next attempt waits for a pause that
doubles with each failure, since what was wrong is most probably still wrong. A server that is to
go first leaves the list of addresses, so that fronts send it no new requests, and is told to stop
a little later.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, TypeAlias

from tgi_trio.cluster.scaling import ReplicaLoad, Scaling

NOTICE_S: Final = 3.0  # from leaving the list to being stopped; fronts read it every second
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0

IDLE: Final = ReplicaLoad(waiting=0, running=0, kv_used=0.0)  # assumed until the first report


class Phase(enum.Enum):
    """A server's state; one that has ended is forgotten."""

    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"  # no longer in the list of addresses
    STOPPING = "stopping"  # told to stop


@dataclass(frozen=True)
class StartReplica:
    """Have Ray start a server under this name."""

    name: str


@dataclass(frozen=True)
class StopReplica:
    """Tell a server to drain and end."""

    name: str


Action: TypeAlias = StartReplica | StopReplica


@dataclass
class _Server:
    phase: Phase = Phase.STARTING
    address: str = ""
    load: ReplicaLoad = IDLE
    stop_at: float = 0.0


class ReplicaPlan:
    """All servers of a cluster. Methods raise KeyError for the name of one that has ended."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._servers: dict[str, _Server] = {}  # the oldest first
        self._started = 0
        self._failures = 0  # consecutive servers that ended before they served
        self._not_before = float("-inf")  # when the next one may be started
        self.closing = False

    @property
    def addresses(self) -> list[str]:
        """The addresses to which requests may go."""
        return [one.address for one in self._servers.values() if one.phase is Phase.SERVING]

    @property
    def names(self) -> list[str]:
        """Every server that has not ended."""
        return list(self._servers)

    def phase(self, name: str) -> Phase:
        """Return a server's state."""
        return self._servers[name].phase

    def serves(self, name: str, address: str) -> None:
        """Note that a server answers at `address`."""
        one = self._servers[name]
        one.address = address
        self._failures = 0
        if one.phase is Phase.STARTING:
            one.phase = Phase.SERVING

    def loaded(self, name: str, load: ReplicaLoad) -> None:
        """Note how busy a server is."""
        self._servers[name].load = load

    def ended(self, name: str, now: float) -> None:
        """Forget a server whose process, or whose machine, is gone."""
        if self._servers.pop(name).phase is Phase.STARTING and not self.closing:
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._failures)
            self._failures += 1
            self._not_before = now + pause

    def close(self) -> None:
        """Stop all servers, and start no more."""
        self.closing = True

    def decide(self, now: float) -> list[Action]:
        """Return what is to be done now; each action is returned once and taken as done."""
        actions: list[Action] = []
        wanted = self._wanted(now)
        there = [n for n, s in self._servers.items() if s.phase in (Phase.STARTING, Phase.SERVING)]
        # Surplus servers: first those that do not serve yet, then the youngest, whose prefix cache
        # is the smallest.
        spare = sorted(there, key=lambda name: self.phase(name) is Phase.STARTING)[wanted:]
        for name in spare:
            one = self._servers[name]
            one.stop_at = now + (NOTICE_S if one.phase is Phase.SERVING else 0.0)
            one.phase = Phase.LEAVING
        for name, one in self._servers.items():
            if one.phase is Phase.LEAVING and now >= one.stop_at:
                one.phase = Phase.STOPPING
                actions.append(StopReplica(name))
        if now >= self._not_before:
            # After a failure only one server at a time is tried.
            missing = wanted - len(there)
            for _ in range(min(1, missing) if self._failures else missing):
                self._started += 1
                name = f"replica-{self._started}"
                self._servers[name] = _Server()
                actions.append(StartReplica(name))
        return actions

    def _wanted(self, now: float) -> int:
        if self.closing:
            return 0
        serving = [one.load for one in self._servers.values() if one.phase is Phase.SERVING]
        return self._scaling.observe(now, serving)
