"""Images in a text, as TGI's native routes take them: an empty link text, a URL in brackets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tgi_trio.router.images.spool import EncodedImage

_BEGIN: Final = "![]("
_END: Final = ")"


@dataclass(frozen=True, slots=True)
class ImageLink:
    """Where an image of a prompt is: an http(s) or a data URL, not yet looked at."""

    url: str
    where: str = "the prompt"  # of a request, for messages
    encoded: EncodedImage | None = None  # of a data URL, whose own base64 is a mark then


Piece = str | ImageLink


def split_text(text: str) -> list[Piece]:
    """Return the pieces of a prompt in their order, none of them an empty text.

    A URL ends at the first bracket that closes, as TGI has it. Without expressions: a data URL may
    have millions of letters, and nothing else runs while one is matched.
    """
    pieces: list[Piece] = []
    done = 0
    while (begin := text.find(_BEGIN, done)) >= 0:
        end = text.find(_END, begin)
        if end < 0:
            break
        if begin > done:
            pieces.append(text[done:begin])
        pieces.append(ImageLink(text[begin + len(_BEGIN) : end]))
        done = end + len(_END)
    if done < len(text):
        pieces.append(text[done:])
    return pieces
