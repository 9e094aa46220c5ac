"""The form and the answers of OpenAI's transcriptions, as the OpenAPI document has them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tgi_trio.router.http.messages.shared_fields import Seed

File = Annotated[str, Meta(extra_json_schema={"format": "binary"})]


class TranscriptionForm(Struct):
    """Form of /v1/audio/transcriptions; `routes/transcriptions.py` reads it."""

    file: File
    model: str = ""
    language: str = ""  # a code like `en`, or a name
    prompt: str = ""  # in place of the instruction to transcribe
    response_format: Literal["json", "text"] = "json"
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0
    stream: bool = False
    max_completion_tokens: Annotated[int, Meta(ge=1)] | UnsetType = UNSET  # as there is room
    seed: Seed | UnsetType = UNSET


class TranscriptionUsage(Struct, forbid_unknown_fields=True):
    """Tokens of a transcription."""

    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int


class TranscriptionReply(Struct, forbid_unknown_fields=True):
    """Answer of /v1/audio/transcriptions."""

    text: str
    usage: TranscriptionUsage


class TranscriptDelta(Struct, forbid_unknown_fields=True, tag="transcript.text.delta"):
    """Event of a stream of /v1/audio/transcriptions."""

    delta: str


class TranscriptDone(Struct, forbid_unknown_fields=True, tag="transcript.text.done"):
    """The last event of a stream of /v1/audio/transcriptions."""

    text: str
    usage: TranscriptionUsage


TranscriptionEvent = TranscriptDelta | TranscriptDone
