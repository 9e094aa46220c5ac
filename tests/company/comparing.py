"""Answers in company against answers alone: equal to the bit, or but for rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tests.company.companies import Company
from tests.company.guests import Answer, Customs, Guest
from tests.company.servers import Server
from tests.company.telling import FORGOTTEN
from tgi_trio.router.request import Token

ALONE = Customs()
_TIE = 1e-5  # between log-probabilities of two tokens that a draw may take for each other
# Between ids of two tokens that a draw may take for each other: it takes the first one at which the
# mass of all up to there exceeds a number, and where sums are rounded that may be its neighbour.
_BESIDE = 4
# Between log-probabilities after a truncation: where rounding decides which of two tokens at its
# edge is kept, the shares of all others follow (`typical_p` 0.7: 0.005, and the same for a request
# alone whose temperature is 1.000002).
_EDGE = 1e-2


class Hermit:
    """Answers requests one at a time: nobody else is there, and nothing is left of the last."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: dict[int, tuple[Guest, Answer]] = {}  # by identity of what is asked for

    def answers(self, guests: Sequence[Guest]) -> list[Answer]:
        """Return the answers to what guests ask for, when nobody else is beside them."""
        new = {id(each.call or each.request): each for each in guests}
        new = {key: each for key, each in new.items() if key not in self._known}
        if new:
            alone = [Guest(each.request, comes=None, call=each.call) for each in new.values()]
            found = self._server.house(ALONE, alone, alone=True).serve()
            self._known |= dict(zip(new, zip(new.values(), found, strict=True), strict=True))
        return [self._known[id(each.call or each.request)][1] for each in guests]


class Met(NamedTuple):
    """What has come of a company."""

    wrong: list[str]  # what differs in its answers
    counters: dict[str, int]  # the scheduler's


def meet(server: Server, hermit: Hermit, company: Company) -> Met:
    """Serve a company, and compare everybody's answer with that alone."""
    lone = hermit.answers(company.guests)
    texts = [[token.id for token in each.tokens] for each in lone]
    foretold = texts if company.customs.foretold else ()
    guests = [resume(*each) for each in zip(company.guests, lone, strict=True)]
    house = server.house(company.customs, guests, foretold=foretold)
    answers, wrong = house.serve(), list[str]()
    for place, (guest, answer, alone) in enumerate(zip(guests, answers, lone, strict=True)):
        alone = replace(alone, tokens=alone.tokens[len(guest.request.emitted) :])
        left = guest.leaves is not None
        if guest.patience is not None and answer.timed_out:
            answer, left = answer.before_the_end(), True
        asked, tolerance = guest.request.sampling, server.tolerance
        if tolerance and (asked.typical_p, asked.top_p, asked.min_p, asked.top_k) != (1, 1, 0, 0):
            tolerance = max(tolerance, _EDGE)
        found = differences(answer, alone, left, tolerance, drawn=asked.sample)
        wrong += [f"guest {place}: {what}" for what in found]
    return Met(wrong, house.counters)


def resume(guest: Guest, alone: Answer) -> Guest:
    """Return a guest whose request holds what its client has already, which is not everything."""
    count = int(guest.resumes * len(alone.tokens))
    emitted = tuple(token.id for token in alone.tokens[:count])
    return replace(guest, request=replace(guest.request, emitted=emitted)) if emitted else guest


def differences(
    ours: Answer, alone: Answer, left: bool, tolerance: float, *, drawn: bool = False
) -> list[str]:
    """Return what differs in an answer, of which only a part is there if its client has `left`.

    `drawn`: its tokens are drawn, and not the likeliest ones.
    """
    if ours.told or alone.told:
        return _over_http(ours, alone, left)
    if left and ours.outcome is None and not ours.failure:
        alone = Answer(alone.tokens[: len(ours.tokens)])
    found: list[str] = []
    if ours.failure != alone.failure:
        return [f"failure {ours.failure!r}, alone {alone.failure!r}"]
    for i, (own, other) in enumerate(zip(ours.tokens, alone.tokens, strict=False)):
        tied = abs(own.logprob - other.logprob) <= _TIE
        tied |= drawn and abs(own.id - other.id) <= _BESIDE
        if tolerance and own.id != other.id and tied:
            return []  # rounding has decided between two as likely; what follows is another text
        if (why := _differs(own, other, tolerance)) is not None:
            return [f"token {i}: {why}"]
    if len(ours.tokens) != len(alone.tokens):
        found.append(f"{len(ours.tokens)} tokens, alone {len(alone.tokens)}")
    one, two = ours.outcome, alone.outcome
    if one is None or two is None:
        return found
    for name in ("reason", "text", "generated_tokens", "prompt_tokens", "seed", "tail", "matched"):
        mine, theirs = getattr(one, name), getattr(two, name)
        if mine != theirs:
            found.append(f"{name} {mine!r}, alone {theirs!r}")
    if not _close(one.prompt_logprobs, two.prompt_logprobs, tolerance):
        found.append(
            f"prompt's log-probabilities {one.prompt_logprobs}, alone {two.prompt_logprobs}"
        )
    if (why := _differing_tops(one.prompt_tops, two.prompt_tops, tolerance)) is not None:
        found.append(f"prompt's top tokens: {why}")
    return found


def _over_http(ours: Answer, alone: Answer, left: bool) -> list[str]:
    """Return what differs in what clients are told of each of a call's answers."""
    found = []
    for place in sorted({*ours.told, *alone.told}):
        own, other = ours.told.get(place, []), alone.told.get(place, [])
        if own == [FORGOTTEN]:  # which only a house is asked for that may
            continue
        if left:
            other = [_cut(*pair) for pair in zip(own, other, strict=False)]
        for i, (one, two) in enumerate(zip(own, other, strict=False)):
            if one != two:
                found.append(f"answer {place}, event {i}: {one}, alone {two}")
                break
        else:
            if len(own) != len(other):
                found.append(f"answer {place}: {len(own)} events, alone {len(other)}: {own[-1:]}")
    return found


def _cut(own: Any, other: Any) -> Any:
    """Return what a client is told alone, up to where another one has left in the same text."""
    if not (isinstance(own, dict) and isinstance(other, dict) and own.keys() == other.keys()):
        return other
    return {name: _cut_text(own[name], each) for name, each in other.items()}


def _cut_text(own: Any, other: Any) -> Any:
    if isinstance(own, str) and isinstance(other, str):
        return other[: len(own)]
    return _cut(own, other)


def _differs(own: Token, other: Token, tolerance: float) -> str | None:
    if (own.id, own.text, own.special) != (other.id, other.text, other.special):
        return f"{own}, alone {other}"
    if not _close([own.logprob], [other.logprob], tolerance):
        return f"log-probability {own.logprob}, alone {other.logprob}"
    tops = [[(top.id, top.logprob) for top in token.top] for token in (own, other)]
    why = _differing_tops(tops[:1], tops[1:], tolerance)
    return None if why is None else f"top tokens: {why}"


def _close(ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> bool:
    if len(ours) != len(theirs):
        return False
    return all(
        one == two or (math.isnan(one) and math.isnan(two)) or abs(one - two) <= tolerance
        for one, two in zip(ours, theirs, strict=True)
    )


def _differing_tops(
    ours: Sequence[Iterable[tuple[int, float]]],
    theirs: Sequence[Iterable[tuple[int, float]]],
    tolerance: float,
) -> str | None:
    if len(ours) != len(theirs):
        return f"of {len(ours)} tokens, alone of {len(theirs)}"
    for place, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        mine, yours = list(own), list(other)
        same = sorted(i for i, _ in mine) == sorted(i for i, _ in yours)
        values, wanted = [value for _, value in mine], [value for _, value in yours]
        if not same or not _close(values, wanted, tolerance):
            return f"place {place}: {mine}, alone {yours}"
    return None
