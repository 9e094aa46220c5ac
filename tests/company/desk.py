"""The router's application before a house's engine, and clients that call it without sockets."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import trio
import trio.testing

from tests.company.calling import ClientCall
from tests.router.http.fake_engine import any_grammar, call_style
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.adapters.text_processors import TextProcessors
from tgi_trio.router.engine.engine import Engine
from tgi_trio.router.engine.stream import TokenStream
from tgi_trio.router.http.app import Application
from tgi_trio.router.http.engine_api import ModelCard, ServedLimits
from tgi_trio.router.media.media_reader import MediaReader
from tgi_trio.router.request import Request, Timings
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.output import OutputText
from tgi_trio.router.text.text_processor import ModelTextProcessor, TextProcessor
from tgi_trio.router.text.thoughts.derive import ThoughtSettings
from tgi_trio.router.text.tokenizer import Tokenizer, TokenizerPool
from tgi_trio.router.validation import ValidationLimits, Validator

# Condensed from that of Qwen 2.5, whose calls it has.
_TEMPLATE: Final = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% if tools %}<tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% endfor %}"
)
_LIMITS: Final = ServedLimits(max_best_of=4, max_input_tokens=300, max_total_tokens=400)


class _Behind:
    """What the application knows of the router; see `engine_api.EngineApi`."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, tell: Callable[[int], None]) -> None:
        """`tell`: called with the number of each sequence that is submitted."""
        self._engine, self._tell = engine, tell
        self.model, self.limits, self.metrics = ModelCard("tiny"), _LIMITS, Metrics()
        self.adapters, self.images = AdapterRegistry(), _NO_IMAGES
        template = ChatTemplate({"default": _TEMPLATE}, {})
        text_processor = TextProcessor(tokenizer, template, None, call_style(template, tokenizer))
        self.text_processors = TextProcessors(
            ModelTextProcessor(text_processor, frozenset(), {}, None, ThoughtSettings())
        )
        limits = ValidationLimits(
            max_input_tokens=_LIMITS.max_input_tokens,
            max_total_tokens=_LIMITS.max_total_tokens,
            vocab_size=tokenizer.vocab_size,
            max_best_of=_LIMITS.max_best_of,
            max_top_n_tokens=_LIMITS.max_top_n_tokens,
        )
        pool = TokenizerPool(tokenizer, 1)
        self.validator = Validator(pool, limits, random.Random(7), any_grammar)

    def permit(self, count: int = 1) -> AbstractContextManager[None]:
        return self._engine.permit(count)

    def submit(
        self, request: Request, timings: Timings | None = None, output: OutputText | None = None
    ) -> TokenStream:
        stream = self._engine.submit(request, timings, output)
        self._tell(stream.id)
        return stream

    def health(self) -> tuple[bool, str]:
        return True, ""

    def load(self) -> tuple[int, int]:
        return self._engine.requests, 16

    def alive(self) -> tuple[bool, str]:
        return True, ""


_NO_IMAGES: MediaReader | None = None


class Visit:
    """A client's call, and what it has been told."""

    def __init__(self, call: ClientCall) -> None:
        self.status = 0
        self.pieces: list[bytes] = []
        self.is_over = False
        self._sent = False
        self._left = trio.Event()
        self._body = json.dumps(call.body).encode()
        self._path = call.path

    def leave(self) -> None:
        """Go, whatever has been told."""
        self._left.set()

    async def call(self, app: Application) -> None:
        """Call, and wait for the end."""
        length = b"%d" % len(self._body)
        scope = {
            **{"type": "http", "method": "POST", "path": self._path, "http_version": "1.1"},
            **{"query_string": b"", "scheme": "http"},
            "headers": [(b"content-type", b"application/json"), (b"content-length", length)],
        }
        try:
            await app(scope, self._receive, self._send)  # type: ignore[arg-type]
        finally:
            self.is_over = True

    async def _receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif body := message.get("body", b""):
            self.pieces.append(bytes(body))


class Desk:
    """Takes the calls of a house's guests, one life long."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, nursery: trio.Nursery) -> None:
        self.ids: list[int] = []  # of the sequences that have been submitted
        self._news = trio.Event()
        self._app = Application(_Behind(engine, tokenizer, self._tell))
        self._nursery = nursery

    def _tell(self, sequence: int) -> None:
        self.ids.append(sequence)
        self._news.set()

    async def begin(self, visit: Visit, call: ClientCall) -> None:
        """Begin a call; returns once it is submitted, or over: validation has threads."""
        self._news = trio.Event()

        async def serve() -> None:
            await visit.call(self._app)
            self._news.set()

        self._nursery.start_soon(serve)
        await self._news.wait()
        await trio.testing.wait_all_tasks_blocked()
