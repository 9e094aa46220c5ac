"""The body of /infill, as llama.cpp's server takes it. Null is the default everywhere."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from tgi_trio.router.http.messages.schema import ExtraFile
from tgi_trio.router.http.messages.shared_fields import I32, Count, Scheduling, Seed
from tgi_trio.router.http.messages.unserved import INFILL

Milliseconds = Annotated[float, Meta(ge=-1)]  # 0 or -1: no limit


class InfillRequest(Scheduling):
    """Body of /infill: what stands before a gap and behind it, and how the gap is filled."""

    unserved: ClassVar = INFILL

    input_prefix: str
    input_suffix: str
    prompt: str | None = None  # the end of what stands before: the line of the cursor up to it
    input_extra: list[ExtraFile] | None = None  # parts of other files, the nearest last
    model: str | None = None
    # Where the text ends.
    n_predict: Count | None = None  # tokens; 0: the prompt is computed and kept, -1: any number
    n_indent: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    t_max_predict_ms: Milliseconds | None = None
    t_max_prompt_ms: Milliseconds | None = None  # without effect, as at llama.cpp
    stop: str | list[str] | None = None
    # How tokens are drawn: by those of `samplers`, where that is given.
    samplers: str | list[str] | None = None
    temperature: float | None = None
    top_k: I32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None
    # What is answered.
    stream: bool | None = None
    response_fields: list[str] | None = None
    return_tokens: bool | None = None
    # What is kept.
    cache_prompt: bool | None = None
    id_slot: I32 | None = None  # without effect: what is cached serves every request
