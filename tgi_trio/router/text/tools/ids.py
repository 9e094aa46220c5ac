"""Ids of calls, as the templates of a family want to see them."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import string
from collections.abc import Callable, Iterable
from dataclasses import replace

from tgi_trio.router.text.tools.format import Format
from tgi_trio.router.text.turns import Turn

_ALPHANUMERIC = string.ascii_letters + string.digits
_NINE = re.compile("[A-Za-z0-9]{9}")
_COUNTED = re.compile(r"functions\.[^:]+:[0-9]+")


def new_call_id(source: random.Random) -> str:
    """Return the id of a call: nine letters and digits, since Mistral's templates take no other."""
    return "".join(source.choices(_ALPHANUMERIC, k=9))


def make_ids(form: Format, past: int, source: random.Random | None = None) -> Callable[[str], str]:
    """Return what gives an id to each call of an answer, by its name.

    `past`: calls in the conversation before the answer. Where a family's ids are counted, they
    count through all of it. `source`: where the others come from (default: the system); answers
    that share one have ids that differ, and each the same ones however they are interleaved.
    """
    if form.ids != "counted":
        own: random.Random = random.SystemRandom()
        if source is not None and not isinstance(source, random.SystemRandom):
            own = random.Random(source.getrandbits(64))
        return lambda name: new_call_id(own)
    numbers = itertools.count(past)
    return lambda name: f"functions.{name}:{next(numbers)}"


def fit_ids(turns: Iterable[Turn], form: Format) -> list[Turn]:
    """Return turns whose calls have ids that the family's templates take, and their results too.

    Ids come back as a client was given them, and some clients' come from another API or another
    model. Each becomes the same one every time, so that the head of a prompt stays as it was.
    """
    if form.ids == "any":
        return list(turns)
    fitted: list[Turn] = []
    known: dict[str | None, str] = {}
    count = 0
    for turn in turns:
        if turn.calls:
            calls = []
            for call in turn.calls:
                id = _fit(call.id or "", call.name, count, form)
                known[call.id] = id
                calls.append(replace(call, id=id))
                count += 1
            turn = replace(turn, calls=calls)
        elif turn.call_id is not None:
            id = known.get(turn.call_id) or _fit(turn.call_id, turn.name or "", count, form)
            turn = replace(turn, call_id=id)
        fitted.append(turn)
    return fitted


def _fit(id: str, name: str, number: int, form: Format) -> str:
    if form.ids == "counted":
        return id if _COUNTED.fullmatch(id) else f"functions.{name}:{number}"
    if _NINE.fullmatch(id):
        return id
    number = int.from_bytes(hashlib.sha256(f"{id or number}".encode()).digest()[:8])
    return "".join(_ALPHANUMERIC[number // 62**i % 62] for i in range(9))
