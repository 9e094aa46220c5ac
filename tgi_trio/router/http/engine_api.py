"""The interface of the rest of the router to the HTTP layer.

Routes use nothing else, so they can be tested with an engine of a few lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from tgi_trio.router.request import Request, Sink, Timings

if TYPE_CHECKING:
    from tgi_trio.router.adapters.registry import AdapterRegistry
    from tgi_trio.router.adapters.text_processors import TextProcessors
    from tgi_trio.router.media.kinds import Kind
    from tgi_trio.router.media.media_reader import MediaReader
    from tgi_trio.router.telemetry.metrics import Metrics
    from tgi_trio.router.text.output import OutputText
    from tgi_trio.router.validation import Validator


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model as `/info` and `/v1/models` name it."""

    id: str
    sha: str | None = None
    aliases: tuple[str, ...] = ()  # --served-model-name
    pipeline_tag: str | None = None  # of the hub; None for local folders
    # Of a model that sees or hears, and is served without: why.
    unserved: Mapping[Kind, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServedLimits:
    """Bounds of a request, named as `/info` names them."""

    max_concurrent_requests: int = 128
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_input_tokens: int = 1024
    max_total_tokens: int = 2048
    validation_workers: int = 2
    max_client_batch_size: int = 4
    max_top_n_tokens: int = 5
    payload_limit: int = 2_000_000  # bytes
    max_grammar_bytes: int = 2**16


class TokenStreamApi(Protocol):
    """One running generation; leaving its context cancels it without awaiting."""

    @property
    def timings(self) -> Timings: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: Any) -> None: ...
    def attach(self, sink: Sink) -> None:
        """Have `sink` called at each step, at once with what has arrived already."""


class EngineApi(Protocol):
    """The router behind the routes."""

    @property
    def model(self) -> ModelCard: ...
    @property
    def limits(self) -> ServedLimits: ...
    @property
    def text_processors(self) -> TextProcessors: ...
    @property
    def validator(self) -> Validator: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def adapters(self) -> AdapterRegistry: ...
    @property
    def images(self) -> MediaReader | None:
        """What reads images; None where the model sees none."""

    def permit(self, count: int = 1) -> AbstractContextManager[None]:
        """Take permits without waiting, to be held for the whole generation; raises Overloaded."""

    def submit(
        self, request: Request, timings: Timings | None = None, output: OutputText | None = None
    ) -> TokenStreamApi:
        """Queue a request; raises Overloaded.

        `output`: what has taken the tokens that the request has from another server, if any.
        """

    def health(self) -> tuple[bool, str]:
        """Return whether generation makes progress, and if not why."""

    def load(self) -> tuple[int, int]:
        """Return how many requests are here, and how many sequences run at once at most."""

    def alive(self) -> tuple[bool, str]:
        """Return whether waiting for health to come back makes sense, and if not why."""
