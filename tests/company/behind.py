"""What the application of a called house knows of its router: texts, adapters, images, limits."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.company.bodies import MOST_ANSWER, MOST_FEATURES, MOST_TEXT
from tests.company.gallery import Seeing
from tests.router.http.fake_engine import any_grammar
from tgi_trio.model.config import read_config
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.adapters.text_processors import TextProcessors
from tgi_trio.router.engine.engine import Engine
from tgi_trio.router.engine.stream import TokenStream
from tgi_trio.router.http.engine_api import ModelCard, ServedLimits
from tgi_trio.router.media.decoder import DecodingBounds, ImageName
from tgi_trio.router.media.kinds import Kind
from tgi_trio.router.media.layouts.layout import OtherLayout
from tgi_trio.router.media.media_reader import MediaLimits, MediaReader, Reading
from tgi_trio.router.media.pixel_store import PixelStore
from tgi_trio.router.media.spool import EncodedImage, Spool
from tgi_trio.router.parameters import ValidationLimits
from tgi_trio.router.request import Request, Timings
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.output import OutputText
from tgi_trio.router.text.own_files import ModelVocabulary
from tgi_trio.router.text.text_processor import ModelTextProcessor, TextProcessor
from tgi_trio.router.text.thoughts.derive import ThoughtSettings, derive_thoughts
from tgi_trio.router.text.tokenizer import Tokenizer, TokenizerPool
from tgi_trio.router.text.tools.probe import find_call_style
from tgi_trio.router.validation import Validator

_LIMITS: Final = ServedLimits(
    max_best_of=4,
    max_input_tokens=MOST_TEXT + MOST_FEATURES,
    max_total_tokens=MOST_TEXT + MOST_FEATURES + MOST_ANSWER,
)
_PIXELS: Final = 1 << 20  # of an image at most


@dataclass(frozen=True)
class Speaking:
    """What reads and writes the texts of a server: loaded once."""

    model: ModelTextProcessor
    vocabulary: ModelVocabulary | None  # with which those of adapters are compared

    @classmethod
    def of(cls, folder: Path, tokenizer: Tokenizer, *, adapted: bool, sees: bool) -> Speaking:
        """Return what the files of a model say; `adapted`: whether it has adapters."""
        config, special = read_config(folder), tokenizer.special_tokens
        template = ChatTemplate(tokenizer.chat_templates, special)
        added = tokenizer.added_tokens
        thoughts = derive_thoughts(template, tokenizer.response_template, added)
        calls = find_call_style(template, added)
        vocabulary = None
        if adapted:
            vocabulary = ModelVocabulary(folder / "tokenizer.json", config.vocab_size)
        return cls(
            ModelTextProcessor(
                TextProcessor(tokenizer, template, thoughts, calls),
                frozenset(config.eos_ids),
                {} if vocabulary is None else vocabulary.parts,
                None,
                ThoughtSettings(),
                keeps_added=sees,
            ),
            vocabulary,
        )


class Behind:
    """The router behind the routes; see `engine_api.EngineApi`."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        speaking: Speaking,
        adapters: AdapterRegistry,
        images: MediaReader | None,
        tell: Callable[[int], None],
    ) -> None:
        """`tell`: called with the number of each sequence that is submitted."""
        self._engine, self._tell = engine, tell
        self.model, self.limits, self.metrics = ModelCard("tiny"), _LIMITS, metrics
        self.adapters, self.images = adapters, images
        self.text_processors = TextProcessors(speaking.model, speaking.vocabulary)
        adapters.on_forgotten(self.text_processors.forget)
        for name in adapters.names:
            metrics.know("adapter", name)
        tokenizer = self.text_processors.model.tokenizer
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


class _Nobody:
    """Fetches and names nothing: images come in bodies, as short as they are."""

    async def fetch(self, url: str, take: Callable[[int], object]) -> bytes:
        raise AssertionError(f"{url} is no data URL")

    async def name(self, image: EncodedImage, most: int) -> ImageName:
        raise AssertionError("an image has been cut out of its body")


def make_reader(
    seeing: Seeing, store: PixelStore, tokenizer: Tokenizer, metrics: Metrics
) -> MediaReader:
    """Return what reads the images of bodies."""
    model, spool, nobody = seeing.model, Spool(), _Nobody()
    assert model is not None
    bounds = DecodingBounds(_PIXELS, 0, 0, 60.0, _PIXELS)
    pictures = None if model.layout is None else Reading(model.layout, nobody)
    readings: Mapping[Kind, Reading[OtherLayout]] = {
        kind: Reading(other.layout, nobody, other.decoder_settings(bounds).dump())
        for kind, other in model.others.items()
    }
    limits = MediaLimits()
    return MediaReader(
        *(pictures, tokenizer, nobody, store, spool, metrics, limits), readings=readings
    )
