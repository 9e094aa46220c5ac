"""Companies of requests: who comes when, and how the house is run meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tests.company.asking import WISHES, write_request
from tests.company.calling import CALLED, write_call
from tests.company.covering import Coverage, Factors, cover
from tests.company.gallery import Gallery
from tests.company.guests import Customs, Guest
from tgi_trio.ipc.images import ALIGNMENT, bundle_bytes
from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.router.media.places import align
from tgi_trio.router.request import Request

Way = Callable[[random.Random], dict[str, Any]]  # fields of Customs

# Those who come first where there is little memory: as they grow, others have to make room.
_LASTING: Final = {
    **{kind: next(iter(wishes)) for kind, wishes in WISHES.items()},
    **{"prompt": "short", "length": "very many", "penalty": "repetition", "end": "never"},
}
_LASTING_CALL: Final = {
    **{kind: wishes[0] for kind, wishes in CALLED.items()},
    **{"route": "chat", "length": "very many", "answers": "several", "choice": "drawn"},
}
# Wishes with which choices are made one after another; a part of companies has none of them.
_SLOW: Final = ("penalty", "grammar", "told", "watermark", "bias")
_PLAIN: Final = 0.3
_DRAFTED = 8  # most tokens of drafts in two steps, see `SchedulingLimits.ask_tokens`
_CROWDS: Final = {"small": (2, 6), "large": (7, 12)}  # requests
_EVENTS = 10  # of a stream, behind which its client may leave
_PATIENT = 60  # turns that a request may take
_TIMES = (1_000_000, 1_000_000, 2_000_000, 9_000_000, 1_000_000, 300_000)


def _paces(draw: random.Random, steps: int, commands: int, replies: int) -> dict[str, Any]:
    """Return turns of a shard that runs up to `steps` steps while the router looks elsewhere."""
    turns = tuple(
        (draw.randint(0, steps), draw.randint(0, commands), draw.randint(0, replies))
        for _ in range(draw.randint(2, 7))
    )
    return {"paces": (*turns, (1, 99, 99))}


def _crashes(draw: random.Random, count: int) -> dict[str, Any]:
    return {"crashes": tuple(draw.randint(2, 30) for _ in range(count))}


# How a house may be run: of each kind one way. `crowd`, `comes`, `again`, `leaves`, `patience` and
# `resumed` are the guests' own.
WAYS: Final[Mapping[str, Mapping[str, Way]]] = {
    "memory": {
        "much": lambda draw: {},
        "little": lambda draw: {
            **{"blocks": draw.randint(1, 2), "ask_ahead": 2, "grant_ahead": 4},
            "slots": draw.randint(6, 9),
        },
        "little by little": lambda draw: {"ask_ahead": 1, "grant_ahead": draw.randint(2, 20)},
    },
    "prefixes": {
        "forgotten": lambda draw: {},
        "cached": lambda draw: {"caching": True},
        "on the host": lambda draw: {"caching": True, "host": True},
    },
    "budget": {
        "whole prompts": lambda draw: {},
        "pieces": lambda draw: {"budget": draw.randint(3, 9)},
        "a block": lambda draw: {"budget": draw.choice([16, 17, 20])},
    },
    "batch": {"all": lambda draw: {}, "two": lambda draw: {"batch": 2}},
    "pace": {
        "in step": lambda draw: {},
        "late router": lambda draw: _paces(draw, 4, 99, 99),
        "late frames": lambda draw: _paces(draw, 2, 2, 2),
    },
    "crash": {
        "none": lambda draw: {},
        "one": lambda draw: _crashes(draw, 1),
        "two": lambda draw: _crashes(draw, 2),
        "into a model loaded anew": lambda draw: {"anew": True} | _crashes(draw, 1),
    },
    "restart": {
        "none": lambda draw: {},
        "one": lambda draw: {"restarts": (draw.randint(4, 40),)},
        "kept in parts": lambda draw: {
            **{"restarts": (draw.randint(4, 40),), "part": draw.randint(1, 3)},
        },
    },
    "failures": {"none": lambda draw: {}, "some": lambda draw: {"failing": draw.randint(3, 9)}},
    "drafts": {"own": lambda draw: {}, "foretold": lambda draw: {"foretold": True}},
    "images held": {
        "many": lambda draw: {},
        "few": lambda draw: {
            **{"features": draw.choice([1, 1000, 3000]), "decoding": draw.randint(1, 5)},
            "arena": draw.choice([ALIGNMENT, ALIGNMENT, 8000]),
        },
    },
    "adapters held": {"all": lambda draw: {}, "one": lambda draw: {"adapters": 1}},
    "responses kept": {
        "all": lambda draw: {},
        "few": lambda draw: {"responses": draw.choice([0, 2500, 5000, 9000])},
    },
    "times": {"none": lambda draw: {}, "some": lambda draw: {"times": _TIMES}},
    "crowd": {"small": lambda draw: {}, "large": lambda draw: {}},
    "comes": {
        "together": lambda draw: {},
        "one by one": lambda draw: {},
        "now and then": lambda draw: {},
    },
    "again": {"once": lambda draw: {}, "twice": lambda draw: {}},
    "leaves": {"nobody": lambda draw: {}, "some": lambda draw: {}},
    "patience": {"endless": lambda draw: {}, "little": lambda draw: {}},
    "resumed": {"nobody": lambda draw: {}, "some": lambda draw: {}},
}

ASKED: Final[Factors] = {kind: list(wishes) for kind, wishes in WISHES.items()}
AROUND: Final[Factors] = {kind: list(ways) for kind, ways in WAYS.items()}


@dataclass(frozen=True)
class Company:
    """Requests that are served together."""

    seed: int
    around: Mapping[str, str]
    asked: tuple[Mapping[str, str], ...]  # of each guest
    customs: Customs
    guests: tuple[Guest, ...]

    def without(self, *places: int) -> Company:
        """Return it without some guests."""
        kept = [i for i in range(len(self.guests)) if i not in places]
        return replace(
            self,
            asked=tuple(self.asked[i] for i in kept),
            guests=tuple(self.guests[i] for i in kept),
        )


@dataclass
class Companies:
    """Draws companies of which any two wishes and ways meet, in one request and of neighbours."""

    seed: int
    wishes: Mapping[str, frozenset[str]] = field(default_factory=dict)  # those served, by kind
    ways: Mapping[str, frozenset[str]] = field(default_factory=dict)
    gallery: Gallery | None = None
    calls: bool = False  # whether they ask over HTTP

    def __post_init__(self) -> None:
        self.asked = _served(CALLED if self.calls else ASKED, self.wishes)
        self.around = _served(AROUND, self.ways)
        self.coverage = Coverage(self.asked, self.around)

    def __iter__(self) -> Iterator[Company]:
        """Yield companies without end."""
        draw = random.Random(self.seed)
        asked, around = list[dict[str, str]](), list[dict[str, str]]()
        while True:
            around = around or cover(self.around, draw.getrandbits(30))
            ways = around.pop()
            count = draw.randint(*_CROWDS[ways["crowd"]])
            if len(asked) < count:
                asked = cover(self.asked, draw.getrandbits(30))
                draw.shuffle(asked)
            own = [asked.pop() for _ in range(count)]
            if draw.random() < _PLAIN:  # what others make slow has ways of its own
                plain = {kind: self.asked[kind][0] for kind in _SLOW if kind in self.asked}
                own = [row | plain for row in own]
            yield gather(ways, own, draw.getrandbits(30), self.gallery, calls=self.calls)


def _served(factors: Factors, served: Mapping[str, frozenset[str]]) -> dict[str, list[str]]:
    return {
        kind: [level for level in levels if level in served.get(kind, levels)]
        for kind, levels in factors.items()
    }


def gather(
    around: Mapping[str, str],
    asked: list[dict[str, str]],
    seed: int,
    gallery: Gallery | None = None,
    *,
    calls: bool = False,
) -> Company:
    """Return a company of requests that ask for `asked`, while it is `around`."""
    draw = random.Random(seed)
    fields: dict[str, Any] = {}
    for kind, way in around.items():
        fields |= WAYS[kind][way](draw)
    guests, turn = list[Guest](), 0
    if around["memory"] == "little":
        asked = ([_LASTING_CALL] * 4 if calls else [_LASTING] * 2) + asked
    for i, wishes in enumerate(asked):
        call = write_call(wishes, seed + i, gallery) if calls else None
        request = write_request(wishes, seed + i, gallery) if call is None else call.largest
        if around["comes"] == "one by one":
            turn += draw.randint(0, 3)
        elif around["comes"] == "now and then":
            turn += draw.choice([0, 1, 5, 25])
        most = request.stopping.max_new_tokens if call is None else _EVENTS
        patience = _patience(around, draw)
        resumes = _resuming(around, request, draw)
        guests.append(Guest(request, turn, _leaving(around, most, draw), patience, call, resumes))
    if restarts := fields.get("restarts"):  # which some come behind
        guests[1::2] = [replace(each, comes=restarts[0] + 1) for each in guests[1::2]]
    if around["memory"] == "little":  # hardly more than the largest takes alone
        fields["blocks"] += max(_blocks(guest.request) for guest in guests)
    if around["images held"] == "few":  # likewise
        fields["arena"] += max(_image_bytes(guest, gallery) for guest in guests)
    if around["again"] == "twice":
        later = [replace(each, comes=turn + draw.randint(8, 40)) for each in guests]
        guests, asked = guests + later, asked * 2
    return Company(seed, around, tuple(asked), Customs(**fields), tuple(guests))


def _blocks(request: Request) -> int:
    """Return how many blocks a request may take, with room for drafts."""
    tokens = len(request.prompt_ids) + request.stopping.max_new_tokens + _DRAFTED
    return -(-tokens // BLOCK_SIZE)


def _image_bytes(guest: Guest, gallery: Gallery | None) -> int:
    """Return how much of an arena the images of a guest take."""
    if guest.call is not None and gallery is not None:
        numbers = [each.number for each in guest.call.shown]
        shown = (gallery.find(each, gallery.is_beside(each, numbers)) for each in numbers)
        return sum(align(bundle_bytes(each.picture.bundle)) for each in shown)
    sizes = {image.key: align(image.nbytes) for image in guest.request.images}
    return sum(sizes.values())


def _leaving(around: Mapping[str, str], most: int, draw: random.Random) -> int | None:
    if around["leaves"] == "nobody" or draw.random() < 0.6:
        return None
    return draw.randint(0, most)


def _resuming(around: Mapping[str, str], request: Request, draw: random.Random) -> float:
    """Return which part of an answer is there already; streams are told nothing of prompts."""
    if around["resumed"] == "nobody" or request.sampling.prompt_logprobs or draw.random() < 0.4:
        return 0.0
    return draw.random()


def _patience(around: Mapping[str, str], draw: random.Random) -> int | None:
    if around["patience"] == "endless" or draw.random() < 0.5:
        return None
    return draw.choice([draw.randint(1, 8), draw.randint(8, _PATIENT)])
