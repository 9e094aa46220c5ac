"""An HTTP request and its answer as routes see them, without framework and socket."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs

import trio

from tgi_trio.router.adapters.served_adapter import ServedAdapter
from tgi_trio.router.http.engine_api import EngineApi
from tgi_trio.router.http.event_log import EventLogBody
from tgi_trio.router.http.messages.body_images import UNCUT, CutBody
from tgi_trio.router.http.messages.body_reader import LARGE, BodyReader, FirstFit
from tgi_trio.router.http.messages.error_shapes import NATIVE, ErrorShape
from tgi_trio.router.http.response_store import ResponseStore
from tgi_trio.router.http.resume import Front
from tgi_trio.router.http.side_threads import SideThreads
from tgi_trio.router.http.sse import EventBody
from tgi_trio.router.http.wire.headers import Header
from tgi_trio.router.http.wire.pace import LoopPace
from tgi_trio.router.request import Timings
from tgi_trio.router.telemetry.request_stats import RequestStats
from tgi_trio.router.text.text_processor import TextProcessor

Result = TypeVar("Result")

SYSTEM_RANDOM: Final = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The settings of the HTTP layer, as flags give them."""

    payload_limit: int = 2_000_000  # bytes, --payload-limit
    cors_allow_origin: tuple[str, ...] = ()  # empty: any
    api_keys: tuple[str, ...] = ()  # empty: no key is asked for
    front_secret: bytes | None = None  # what fronts show; None: there are none
    compute_type: str = "gpu+optimized"  # x-compute-type, env COMPUTE_TYPE
    docker_label: str | None = None
    predict_route: str | None = None  # another path of /vertex, --aip-predict-route
    health_route: str | None = None  # another path of /health, --aip-health-route
    adapter_folder: Path | None = None  # what may be loaded lies below; --adapter-folder
    response_store_bytes: int = 1 << 26  # of /v1/responses; 0: none are kept
    shown: Mapping[str, Any] = field(default_factory=dict)  # every setting that /info tells
    body_timeout: float = 60.0  # seconds a client may take to send its body
    silence: float = 15.0  # seconds without an event before a keep-alive comment
    stream_backlog: int = 1 << 20  # bytes one stream may fall behind its generation
    direct_writes: bool = True  # events straight to the socket; off: always through ASGI's `send`
    shortcut: bool = True  # generation routes skip Quart's dispatch


@dataclass(slots=True)
class Call:
    """One request. What it holds is in `resources`, closed when it ends or the client leaves."""

    engine: EngineApi
    settings: HttpSettings
    headers: dict[bytes, bytes]  # names in lower case
    body: bytes | bytearray | memoryview  # without its large images, where the route takes some
    request_id: str
    received: float  # trio clock, seconds
    resources: ExitStack
    responses: ResponseStore = field(default_factory=ResponseStore)  # what it may go on from
    cut: CutBody = UNCUT  # the images of its body
    path: Mapping[str, str] = field(default_factory=dict)  # what the route's path leaves open
    query_string: bytes = b""  # behind the path, as it was sent
    generations: list[Timings] = field(default_factory=list)  # of all that were queued
    adapter: str | None = None  # that the body's `model` names, see `resolve_model`
    own_text_processor: TextProcessor | None = None  # that adapter's, see `use_model`
    acquired: ServedAdapter | None = None  # that all its prompts have, see `validate_request`
    all_stats: list[RequestStats] = field(default_factory=list)  # of those that ended well
    front: Front | None = None  # what a front adds to it, see `dispatch.answer_call`
    turns: trio.Lock = field(default_factory=trio.Lock)  # one stream at a time: `resume_stream`
    pace: LoopPace = field(default_factory=LoopPace)  # for what many of it are done at a time
    side_threads: SideThreads = field(default_factory=SideThreads)
    made: list[object] = field(default_factory=list)  # of a large body, see `make`

    async def read(self, reader: BodyReader | FirstFit) -> Any:
        """Return the body as `reader` has it; raises what that raises."""
        return await self.make(partial(reader.read, self.headers, self.body))

    async def make(self, function: Callable[[], Result], *, long: bool = False) -> Result:
        """Do what `compute` does with a function that returns something large, and nobody else's.

        It is freed in a thread, too, when the request has been answered.
        """
        made = await self.compute(function, long=long)
        if long or len(self.body) >= LARGE:
            self.made.append(made)
        return made

    async def compute(self, function: Callable[[], Result], *, long: bool = False) -> Result:
        """Return what `function` returns; in a thread for a large body, as others wait for it.

        `long`: it takes a few milliseconds, however large the body is.
        """
        if len(self.body) < LARGE and not long:
            return function()
        return await self.side_threads.run(function)

    @property
    def ids(self) -> random.Random:
        """Return where the ids of the answer come from: nobody can guess them."""
        return SYSTEM_RANDOM if self.front is None else self.front.ids

    @property
    def query(self) -> dict[str, list[str]]:
        """Return the parameters of the query, each with all values that it is given."""
        return parse_qs(self.query_string.decode("utf-8", "replace"), keep_blank_values=True)

    @property
    def text_processor(self) -> TextProcessor:
        """Return what texts are read and written with: the adapter's, or the model's."""
        return self.own_text_processor or self.engine.text_processors.model

    @property
    def from_anthropic(self) -> bool:
        """Whether a client of Anthropic's API asks: each of its requests has this header."""
        return b"anthropic-version" in self.headers

    def now(self) -> int:
        """Return when the answer begins, in Unix seconds."""
        began = None if self.front is None else self.front.began
        return int(time.time()) if began is None else began


@dataclass(slots=True)
class Reply:
    """An answer: a whole body, or a stream of events."""

    body: bytes | EventBody | EventLogBody
    status: int = 200
    content_type: bytes = b"application/json"
    headers: list[Header] = field(default_factory=list)


Handler = Callable[[Call], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Route:
    """A path, with variable parts in werkzeug's form, and the function that answers it."""

    method: str
    path: str
    handler: Handler
    protected: bool = True  # asks for the API key when there is one
    dialect: ErrorShape = NATIVE  # how its errors are told
    anthropic: bool = False  # Anthropic's clients ask it as well, and are answered in their shape
    images: bool = False  # its bodies may hold images, each of them as large as a photo
