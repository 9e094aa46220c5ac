"""An engine of a model that sees images, with everything real but the shard."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from tests.router.http.fake_engine import FakeEngine, byte_tokenizer
from tgi_trio.ipc.images import ArenaPlace
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.media.fetch import MediaFetcher
from tgi_trio.router.media.layouts.grid import GridLayout
from tgi_trio.router.media.media_model import MediaModel
from tgi_trio.router.media.media_service import MediaFlags, MediaService
from tgi_trio.router.text.chat_template import ChatTemplate

PAD, START, STOP = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
VIDEO_PAD = "<|video_pad|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}<assistant>"
)
UNIT = 28  # pixels, the side of what one token sees
MODEL = MediaModel(
    "qwen2_vl", GridLayout(UNIT, UNIT**2, 64 * UNIT**2), {"min_pixels": 784, "max_pixels": 50176}
)
FLAGS = MediaFlags(
    max_image_fetch_size=200_000, max_image_pixels=1_000_000, max_images_per_prompt=3
)


class Memory:
    """An arena of this process alone."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._bytes = bytearray(nbytes)

    def view(self, place: ArenaPlace) -> memoryview:
        return memoryview(self._bytes)[place.offset : place.offset + place.nbytes]


@asynccontextmanager
async def seeing_engine(
    fetcher: MediaFetcher | None = None,
    nbytes: int = 4 * 2**20,
    most: int = 200,
    flags: MediaFlags = FLAGS,
    model: MediaModel = MODEL,
) -> AsyncIterator[FakeEngine]:
    """Yield an engine that takes images; `most` tokens of a prompt."""
    tokenizer = byte_tokenizer((PAD, START, STOP, VIDEO_PAD))
    limits = ServedLimits(max_input_tokens=most, max_total_tokens=2 * most)
    engine = FakeEngine(lambda prompt: "Hi", limits=limits, tokenizer=tokenizer)
    engine.chat_template = ChatTemplate({"default": TEMPLATE}, {})
    service = MediaService(model, flags, Memory(nbytes), tokenizer, engine.metrics, 1, fetcher)
    engine.images = service.reader
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        yield engine
        nursery.cancel_scope.cancel()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def seen(engine: FakeEngine, i: int = -1) -> list[tuple[int, int]]:
    """First place and tokens of each image of a request, held against its ids."""
    request = engine.submitted[i]
    pad = engine.tokenizer.added_tokens[PAD]
    for image in request.images:
        assert image.feature_places == ((0, image.tokens),)
        assert (request.prompt_ids[image.first : image.end] == pad).all()
        assert len(image.key) == 32 and image.nbytes > 0
    return [(image.first, image.tokens) for image in request.images]
