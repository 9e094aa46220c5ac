"""The router as HTTP sees it: the engine, and everything else that a route needs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import fields

from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.adapters.text_processors import TextProcessors
from tgi_trio.router.engine.engine import Engine
from tgi_trio.router.engine.stream import TokenStream
from tgi_trio.router.http.engine_api import ModelCard, ServedLimits
from tgi_trio.router.media.kinds import NOTHING_UNSERVED, Kind
from tgi_trio.router.media.media_reader import MediaReader
from tgi_trio.router.request import Request, Timings
from tgi_trio.router.shards.supervisor import Supervisor
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.output import OutputText
from tgi_trio.router.validation import Validator
from tgi_trio.settings.records import Settings


class EngineFacade:
    """Implements `router.http.engine_api.EngineApi`."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        supervisor: Supervisor,
        text_processors: TextProcessors,
        validator: Validator,
        metrics: Metrics,
        adapters: AdapterRegistry | None = None,
        images: MediaReader | None = None,
        unserved: Mapping[Kind, str] = NOTHING_UNSERVED,
    ) -> None:
        """`unserved`: why there is no `images` for a model that could take such."""
        aliases = tuple(n for n in settings.served_model_names if n != settings.model_id)
        self.model = ModelCard(
            settings.model_id,
            settings.model_sha,
            aliases,
            settings.model_pipeline_tag,
            unserved,
        )
        self.limits = ServedLimits(
            **{f.name: getattr(settings, f.name) for f in fields(ServedLimits)}
        )
        self.text_processors = text_processors
        self.validator = validator
        self.metrics = metrics
        self.images = images
        self.adapters = AdapterRegistry() if adapters is None else adapters
        self.adapters.on_forgotten(text_processors.forget)
        for name in self.adapters.names:
            metrics.know("adapter", name)
        self._slots = settings.max_batch_size
        self._engine = engine
        self._supervisor = supervisor

    def permit(self, count: int = 1) -> AbstractContextManager[None]:
        """Take `count` permits without waiting; raises Overloaded or Unavailable."""
        return self._engine.permit(count)

    def submit(
        self, request: Request, timings: Timings | None = None, output: OutputText | None = None
    ) -> TokenStream:
        """Queue a validated request; raises Overloaded. `output` as `Engine.submit` has it."""
        return self._engine.submit(request, timings, output)

    def health(self) -> tuple[bool, str]:
        """Return whether requests are being served, and the reason.

        True means: a shard is loaded, steps advance when there is work, and we have not been asked
        to end.
        """
        if self._engine.retiring:
            return False, "shutting down"
        if not self._supervisor.ready:
            return False, f"shard {self._supervisor.state.value}: {self._supervisor.why}"
        return True, "ready"

    def load(self) -> tuple[int, int]:
        """Return how many requests hold a permit, and how many sequences run at once at most."""
        return self._engine.requests, self._slots

    def alive(self) -> tuple[bool, str]:
        """Return whether this process can ever serve again, and why not."""
        return not self._supervisor.given_up, self._supervisor.why
