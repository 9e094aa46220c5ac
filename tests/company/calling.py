"""What clients ask over HTTP: kinds of wishes, and calls that have them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from tests.company.bodies import (
    ADAPTERS,
    BODIES,
    FOLDERS,
    LOADED,
    UNSEEING,
    ClientCall,
    Medium,
    Wanted,
    load_adapter,
)
from tests.company.covering import Factors
from tests.company.gallery import Gallery

_TEXT: Final = "the rain in tone is no more than the other ones were in the late hours. "
_COMMON: Final = 3  # images that several calls show
_LENGTHS: Final = {"few": (2, 6), "many": (14, 28), "very many": (60, 70)}  # tokens
# The routes have what they can have of each kind.
CALLED: Final[Factors] = {
    "route": list(BODIES),
    "stream": ["no", "yes"],
    "text": ["short", "long", "shared"],
    "length": list(_LENGTHS),
    "choice": ["best", "drawn"],
    # `n`, `best_of`; TGI's route draws seeds for these, and so says other things each time
    "answers": ["one", "several", "to several prompts"],
    "truncate": ["no", "yes"],
    "tools": ["none", "auto", "required", "named"],
    "format": ["text", "json", "tags"],  # tags hold beside tools, which any other form excludes
    "thought": ["none", "free", "short"],
    "gap": ["none", "alone", "among files"],
    "stop": ["none", "string"],
    "told": ["text", "log-probabilities", "prompt"],
    "adapter": ["none", *ADAPTERS, LOADED],
    "images": ["none", "one", "two"],
    "then": ["nothing", "goes on", "branches", "forgets"],
    "salt": ["none", "some"],
    "priority": ["plain", "urgent", "patient"],
}


def write_call(chosen: Mapping[str, str], seed: int, gallery: Gallery | None = None) -> ClientCall:
    """Return a call with the wishes of `chosen`, kind -> name; the rest is drawn by `seed`.

    `gallery`: of the images that it may show.
    """
    draw = random.Random(seed)
    most = draw.randint(*_LENGTHS[chosen["length"]])
    seeded: dict[str, Any] = {"seed": draw.getrandbits(40)} if chosen["choice"] == "drawn" else {}
    text, shown = _write(chosen, draw), tuple[Medium, ...]()
    if gallery is not None and chosen["images"] != "none" and chosen["route"] not in UNSEEING:
        numbers = draw.sample(range(_COMMON), 2 if chosen["images"] == "two" else 1)
        shown = tuple(_find(gallery, number) for number in numbers)
    wanted = Wanted(chosen, text, most, seeded, shown)
    call = replace(BODIES[chosen["route"]](wanted), shown=shown)
    return load_adapter(call, draw.choice(FOLDERS)) if chosen["adapter"] == LOADED else call


def _find(gallery: Gallery, number: int) -> Medium:
    found = gallery.find(number)
    return Medium(number, found.kind, len(found.picture.ids))


def _write(chosen: Mapping[str, str], draw: random.Random) -> str:
    """Return the text of a prompt."""
    words = [draw.choice(_TEXT.split()) for _ in range(draw.randint(1, 4))]
    if chosen["text"] == "shared":
        return f"{_TEXT} {' '.join(words)}"
    return " ".join(words * (6 if chosen["text"] == "long" else 1))
