"""Images are decoded in processes that may die of it: pixels as transformers makes them."""

from __future__ import annotations

import importlib
import io
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from PIL import Image

from tests.router.media.image_files import claimed_png, encode, noise, upright
from tgi_trio.errors import ModelLoadError, Unavailable, ValidationError
from tgi_trio.ipc.images import bundle_bytes, read_bundle, write_bundle
from tgi_trio.media.packed_frames import pack_frames
from tgi_trio.media.processors import PROCESSORS, PixelProcessor, Processor
from tgi_trio.router.media.decoder import DecoderSettings, ImageDecoder, VideoDecoderSettings
from tgi_trio.router.media.layouts.layout import ImageSize
from tgi_trio.router.media.spool import EncodedImage, Spool
from tgi_trio.router.sandbox_pool import Answer, Turn

LLAVA = DecoderSettings(
    "llava", {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
)


@asynccontextmanager
async def decoder(settings: DecoderSettings = LLAVA) -> AsyncIterator[ImageDecoder]:
    spool = Spool()
    one = ImageDecoder(settings, 1, spool)
    try:
        yield one
    finally:
        with trio.CancelScope(shield=True):
            await one.close()
            spool.close()


async def pixels(one: ImageDecoder, data: bytes) -> tuple[ImageSize, dict[str, Any]]:
    async with one.decode(data) as image:
        memory = memoryview(bytearray(image.nbytes))
        await image.copy_to(memory)
        assert isinstance(image.size, ImageSize)
        return image.size, read_bundle(memory)


async def refusal(one: ImageDecoder, data: bytes) -> str:
    with pytest.raises(ValidationError) as caught:
        async with one.decode(data):
            pass
    return str(caught.value)


def expected(image: Image.Image, settings: DecoderSettings = LLAVA) -> dict[str, Any]:
    row = PROCESSORS[settings.family]
    assert isinstance(row, Processor)
    module = importlib.import_module(
        f"transformers.models.{row.module}.image_processing_pil_{row.module}"
    )
    found = getattr(module, f"{row.name}ImageProcessorPil")(
        **{**settings.settings, **row.fixed}, do_rescale=False, do_normalize=False
    )
    arrays = found([image], return_tensors="np", **settings.given)
    if isinstance(arrays, np.ndarray):
        return {"pixel_values": arrays}
    return {name: array for name, array in arrays.items() if name not in row.drops}


LONGEST = {"longest_edge": 64}
SIZES = {"size": {"height": 16, "width": 16}, "high_res_size": {"height": 32, "width": 32}}
FAMILIES = [
    DecoderSettings("deepseek_vl_hybrid", SIZES),
    DecoderSettings("gemma3", {"size": {"height": 28, "width": 28}}),
    DecoderSettings("gemma4", {"max_soft_tokens": 70}),
    DecoderSettings("got_ocr2", {"size": {"height": 16, "width": 16}, "crop_to_patches": True}),
    DecoderSettings("granite_docling", {"size": {"height": 16, "width": 16}, "max_patches": 5}),
    DecoderSettings("hunyuan_vl", {"min_pixels": 784, "max_pixels": 3136, "patch_size": 8}),
    DecoderSettings("idefics", {"size": {"height": 16, "width": 16}}),
    DecoderSettings("idefics3", {"size": LONGEST, "max_image_size": {"longest_edge": 32}}),
    DecoderSettings("internvl", {"size": {"height": 16, "width": 16}, "max_patches": 4}),
    DecoderSettings("minicpmv", {"scale_resolution": 40, "patch_size": 8, "max_slice_nums": 4}),
    DecoderSettings("mllama", {"size": {"height": 16, "width": 16}, "max_image_tiles": 3}),
    DecoderSettings("ovis2", {"size": {"height": 16, "width": 16}, "crop_to_patches": True}),
    DecoderSettings("paddleocr", {"min_pixels": 784, "max_pixels": 3136}),
    DecoderSettings("pixtral", {"size": LONGEST, "patch_size": 14}, {"patch_size": 28}),
    DecoderSettings("qwen2_vl", {"min_pixels": 784, "max_pixels": 3136}),
]


@pytest.mark.parametrize("settings", FAMILIES, ids=lambda each: each.family)
def test_a_bundle_holds_what_transformers_own_processor_makes(settings: DecoderSettings) -> None:
    image = noise(40, 90)
    processor = PixelProcessor(settings.family, settings.settings, settings.given)
    arrays = processor.process(np.asarray(image))
    memory = memoryview(bytearray(bundle_bytes(arrays)))
    write_bundle(memory, arrays)
    found, wanted = read_bundle(memory), expected(image, settings)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.array_equal(found[name], array), name


def test_an_image_beside_others_has_the_pixels_that_transformers_makes_there() -> None:
    sizes: Any = {"size": {"height": 24, "width": 24}, "image_grid_pinpoints": [[24, 48], [48, 24]]}
    asked, image = DecoderSettings("llava_onevision", sizes), noise(40, 90)
    from transformers.models.llava_onevision import image_processing_pil_llava_onevision as theirs

    processor = theirs.LlavaOnevisionImageProcessorPil(
        **sizes, do_rescale=False, do_normalize=False
    )
    ours = PixelProcessor(asked.family, asked.settings, {})
    for beside in (False, True):
        found = ours.process(np.asarray(image), beside)
        images: Any = [[image, noise(9, 9)]] if beside else [image]
        wanted = processor(images, return_tensors="np")
        assert found.keys() == wanted.keys()
        assert found["batch_num_images"].tolist() == [2 if beside else 1]
        assert found["pixel_values"].shape[:2] == (1, 1 if beside else 3)
        for name, array in found.items():
            assert np.array_equal(array, wanted[name][:1]), name


@pytest.mark.trio
async def test_every_format_is_read_as_it_is_seen() -> None:
    """Upright, of several frames the first, and without a background: on white."""
    image, other = noise(20, 30), noise(20, 30, seed=1)
    frames: dict[str, Any] = {"save_all": True, "append_images": [other]}
    dull = noise(20, 30, mode="L")
    clear = noise(20, 30, mode="RGBA")
    white = Image.alpha_composite(Image.new("RGBA", clear.size, (255, 255, 255, 255)), clear)
    palette = image.quantize(8)
    both: dict[str, Any] = {"save_all": True, "append_images": [palette]}
    turned = encode(image.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=100)
    async with decoder() as one:
        for data, wanted in [
            (encode(image), image),
            (encode(image, **frames), image),
            (encode(image, "WEBP", lossless=True), image),
            (encode(image, "WEBP", lossless=True, **frames), image),
            (encode(image, "TIFF", **frames), image),
            (encode(palette, "GIF", **both), palette.convert("RGB")),
            (encode(dull), dull.convert("RGB")),
            (encode(clear), white.convert("RGB")),
            (turned, Image.open(io.BytesIO(turned))),
        ]:  # fmt: skip
            size, found = await pixels(one, data)
            assert size == wanted.size[::-1]
            assert np.array_equal(found["pixel_values"], expected(wanted)["pixel_values"])
        size, found = await pixels(one, upright(image, 6))
        assert size == (30, 20)


@pytest.mark.trio
async def test_what_is_no_image_is_told_what_is_wrong_and_the_process_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What libtiff writes of a file to standard error came into the log."""
    whole = encode(noise(20, 30))
    lzw = encode(noise(20, 30), "TIFF", compression="tiff_lzw")
    bomb = claimed_png(60_000, 60_000)
    async with decoder(DecoderSettings("llava", LLAVA.settings, max_pixels=10_000)) as one:
        for data, words in [
            (b"", "invalid image: it has 0 bytes"),
            (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is none of PNG, JPEG, GIF"),
            (encode(noise(2, 2), "BMP"), "it is none of PNG"),
            (whole[:10], "it is none of PNG"),
            (whole[: len(whole) // 2], "it cannot be decoded"),
            (encode(noise(64, 64), "JPEG")[:700], "it cannot be decoded"),
            (bomb, "it has 60000 x 60000 pixels, 10000 are allowed (--max-image-pixels)"),
            (claimed_png(0, 5), "invalid image: "),
            (claimed_png(90, 90, b"junk"), "it cannot be decoded"),
            (lzw[:8] + b"\xff" * 16 + lzw[24:], "it cannot be decoded"),
        ]:
            assert words in await refusal(one, data), (data[:40], words)
        size, _ = await pixels(one, whole)
        assert size == (20, 30)
    assert not caplog.messages


@pytest.mark.trio
async def test_what_libraries_warn_of_in_a_file_is_not_written_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pillow warns of notes that are cut off, once it has opened the file all the same."""
    notes = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06"
    segment = b"\xff\xe1" + (2 + len(notes)).to_bytes(2, "big") + notes
    image = encode(noise(20, 30), "JPEG")
    cut_off = image[:2] + segment + image[2:]
    with pytest.warns(UserWarning, match="Corrupt EXIF data"):
        Image.open(io.BytesIO(cut_off)).close()
    async with decoder() as one:
        size, _ = await pixels(one, cut_off)
        assert size == (20, 30)
    assert not caplog.messages


@pytest.mark.trio
async def test_a_video_of_more_pictures_than_are_seen_is_refused_before_they_are_read() -> None:
    """What names a video has no child that its pictures, of three bytes each, could end."""
    given = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 32_000}}
    spool, settings = Spool(), VideoDecoderSettings("qwen2", given, max_frames=40)
    one = ImageDecoder(settings, 1, spool)
    try:
        for count in (40, 41, 200_000):
            video = EncodedImage(spool)
            video.append(b",".join([b"AAAA"] * count))
            if count == 40:
                assert (await one.name(video, 10**6)).nbytes == len(pack_frames([bytes(3)] * 40))
                continue
            said = f"^invalid video: it has {count} frames, 40 are allowed"
            with pytest.raises(ValidationError, match=said):
                await one.name(video, 10**6)
    finally:
        await one.close()
        spool.close()


@pytest.mark.trio
async def test_a_child_that_needs_too_much_or_dies_ends_one_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = encode(Image.new("RGB", (3000, 3000)))
    monkeypatch.setattr("tgi_trio.router.media.decoder._BASE_MEMORY", 2**20)
    monkeypatch.setattr("tgi_trio.router.media.decoder._PIXEL_MEMORY", 0)
    async with decoder() as one:
        assert "takes too much memory" in await refusal(one, large)
        assert "takes too much memory" in await refusal(one, large)
    monkeypatch.undo()
    monkeypatch.setattr("tgi_trio.router.media.decoder._BASE_S", 0.01)
    monkeypatch.setattr("tgi_trio.router.media.decoder._PIXEL_S", 0.0)
    monkeypatch.setattr("tgi_trio.router.media.decoder._SLOWDOWN", 10_000.0)
    async with decoder() as one:
        assert "takes too much time" in await refusal(one, large)


@pytest.mark.trio
async def test_a_child_that_somebody_kills_says_nothing_of_the_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask(*_: object, **__: object) -> Answer:
        return Answer(signal=signal.SIGKILL)

    monkeypatch.setattr(Turn, "ask", ask)
    async with decoder() as one:
        with pytest.raises(Unavailable, match="has ended before it was done"):
            await pixels(one, encode(noise(4, 4)))


@pytest.mark.trio
async def test_a_model_whose_images_cannot_be_processed_does_not_start() -> None:
    with pytest.raises(ModelLoadError, match="the settings of the image processor"):
        PixelProcessor("llava", {"size": "large"}, {})
    async with decoder(DecoderSettings("nothing")) as one:
        with pytest.raises(ModelLoadError, match="no image processor is known of 'nothing'"):
            await one.start()


def test_the_routers_own_process_never_loads_pillow() -> None:
    code = (
        "import sys, tgi_trio.router.media.decoder; "
        "sys.exit(bool({'PIL', 'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
