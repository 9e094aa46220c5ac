"""What a message may hold beside text, and what errors call it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

Kind = Literal["image", "video", "audio"]


class Words(NamedTuple):
    """What errors call a kind."""

    one: str
    several: str
    sense: str = "see"


WORDS: Final[dict[Kind, Words]] = {
    "image": Words("an image", "images"),
    "video": Words("a video", "videos"),
    "audio": Words("an audio part", "audio parts", "hear"),
}


NOTHING_UNSERVED: Final[Mapping[Kind, str]] = MappingProxyType({})


def name_kinds(kinds: Collection[Kind]) -> str:
    """Return what several of these kinds are called together."""
    first, *others = (words.several for kind, words in WORDS.items() if kind in kinds)
    return f"{', '.join([first, *others[:-1]])} and {others[-1]}" if others else first
