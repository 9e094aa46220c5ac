"""Images in a text as TGI's native routes take them: Markdown images with an empty text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tgi_trio.router.media.data_urls import is_data_url
from tgi_trio.router.media.kinds import Kind
from tgi_trio.router.media.spool import EncodedImage

_BEGIN: Final = "![]("
_END: Final = ")"


@dataclass(frozen=True, slots=True)
class MediaLink:
    """Where an image or a video of a prompt is: an http(s) or a data URL, not yet checked."""

    url: str
    where: str = "the prompt"  # the place in the request, for errors
    field: str | None = None  # path of the field that has it, likewise
    encoded: EncodedImage | None = None  # the image of a data URL whose base64 is only a mark
    kind: Kind = "image"
    # Of a video: frames that are to be seen, in a second or in all; None: as the model does.
    fps: float | None = None
    num_frames: int | None = None


Piece = str | MediaLink


def to_audio_link(data: str, where: str, field: str | None = None) -> MediaLink:
    """Return the link of a sound whose base64 is `data`, or that is a data URL."""
    url = data if is_data_url(data) else f"data:audio;base64,{data}"
    return MediaLink(url, where, field, kind="audio")


def split_text(text: str) -> list[Piece]:
    """Return the pieces of a prompt in order, without empty texts.

    As in TGI, a URL ends at the first closing bracket. No regular expressions: a data URL may have
    millions of letters, and matching would block everything else.
    """
    pieces: list[Piece] = []
    done = 0
    while (begin := text.find(_BEGIN, done)) >= 0:
        end = text.find(_END, begin)
        if end < 0:
            break
        if begin > done:
            pieces.append(text[done:begin])
        pieces.append(MediaLink(text[begin + len(_BEGIN) : end]))
        done = end + len(_END)
    if done < len(text):
        pieces.append(text[done:])
    return pieces
