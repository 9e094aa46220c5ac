"""Guests of a house, what they have been told, and how the house is run meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tests.company.bodies import ClientCall
from tgi_trio.router.request import Outcome, Request, Token

_DEADLINE: Final = "deadline"  # what errors name of a request that has timed out, or is going to


@dataclass
class Answer:
    """What a client has got of one request."""

    tokens: list[Token] = field(default_factory=list)
    outcome: Outcome | None = None  # None: it left before the end
    failure: str = ""
    # Over HTTP: see `telling.Told`.
    told: Mapping[tuple[int, int], list[Any]] = field(default_factory=dict)

    def take(self, tokens: list[Token], end: Outcome | BaseException | None) -> None:
        """Take in what the engine delivers."""
        self.tokens += tokens
        if isinstance(end, BaseException):
            self.failure = str(end)
        elif end is not None:
            self.outcome = end

    @property
    def timed_out(self) -> bool:
        """Whether its client has been told that the request's deadline has passed."""
        return _DEADLINE in self.failure or any(map(_names_deadline, self.told.values()))

    def before_the_end(self) -> Answer:
        """Return what its client was told before that."""
        told = {}
        for place, events in self.told.items():
            names = [_names_deadline([each]) for each in events]
            told[place] = events[: names.index(True)] if True in names else events
            if isinstance(events[0], int) and True in names:
                told[place] = []  # of a body nothing is told but that
        return replace(self, failure="", told=told)


def _names_deadline(told: Sequence[Any]) -> bool:
    return _DEADLINE in repr(told)


@dataclass(frozen=True)
class Guest:
    """A request, and when it comes and goes."""

    request: Request
    comes: int | None = 0  # turn; None: when nobody else is there any more
    leaves: int | None = None  # after how many tokens its client has had enough; None: never
    patience: int | None = None  # turns after which its request has timed out; None: it never has
    call: ClientCall | None = None  # what it asks over HTTP; `request` is as large as that may be
    # The part of its answer that its client has from another server, which was lost.
    resumes: float = 0.0


@dataclass(frozen=True)
class Customs:
    """How a house is run: memory, and what router, shard and rings make of their time."""

    blocks: int = 96  # block 0 included
    slots: int = 64
    host: bool = False
    caching: bool = False
    reserve: bool = False
    budget: int = 64
    batch: int = 16
    ask_ahead: int = 16
    grant_ahead: int = 64
    # By turn, again and again: steps of the shard, commands it may read, replies the router reads.
    paces: tuple[tuple[int, int, int], ...] = ((1, 99, 99),)
    crashes: tuple[int, ...] = ()  # turns
    restarts: tuple[int, ...] = ()  # turns from which on nobody is let in until it has been started
    part: int = 0  # blocks of prefixes that are kept at a time for that; 0: all
    anew: bool = False  # whether a shard that follows another loads its model anew
    failing: int = 0  # every so many steps fail when they are computed first; 0: none
    foretold: bool = False  # whether drafts are mostly right
    times: tuple[int, ...] = (0,)  # nanoseconds of steps, again and again
    # Bytes: of the arena of images, and of their features that are kept; turns of a decoding.
    arena: int = 1 << 20
    features: int = 1 << 20
    decoding: int = 0
    adapters: int = 8  # that are in memory at a time
    responses: int = 1 << 20  # bytes of those that are kept

    @property
    def forgets(self) -> bool:
        """Whether a response may be forgotten that its client has not."""
        return self.responses < 1 << 20 or bool(self.restarts)
