"""Ids of tool calls, in the form that a family's templates accept."""

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
    """Return a call's id: nine letters and digits, since Mistral's templates accept no other."""
    return "".join(source.choices(_ALPHANUMERIC, k=9))


def make_ids(form: Format, past: int, source: random.Random | None = None) -> Callable[[str], str]:
    """Return a function that makes ids for the calls of an answer, given their names.

    `past`: number of earlier calls in the conversation, from which counted ids continue. `source`:
    random source of other ids (default: the system's). Answers that share one get different ids,
    and the same ones however they are interleaved.
    """
    if form.ids != "counted":
        generator: random.Random = random.SystemRandom()
        if source is not None and not isinstance(source, random.SystemRandom):
            generator = random.Random(source.getrandbits(64))
        return lambda name: new_call_id(generator)
    numbers = itertools.count(past)
    return lambda name: f"functions.{name}:{next(numbers)}"


def fit_ids(turns: Iterable[Turn], form: Format) -> list[Turn]:
    """Return turns in which calls and results have ids that the family's templates accept.

    Clients may send ids from another API or another model. An id is always replaced by the same
    one, so that a prompt's prefix stays the same.
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
