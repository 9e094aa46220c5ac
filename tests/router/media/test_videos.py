"""Frames that are seen of a video and their patches are those of transformers' video processors."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.router.media.image_files import encode, noise
from tests.router.media.torchvision_processors import processor_module, video_processor
from tests.router.media.video_files import make_video, read_all
from tgi_trio.errors import ModelLoadError, ValidationError
from tgi_trio.media.decoding import read_pixels
from tgi_trio.media.packed_frames import pack_frames, unpack_frames
from tgi_trio.media.patch_canvases import PatchCanvas, Qwen2Canvas, Qwen3Canvas
from tgi_trio.media.video_canvas import Clip, VideoCanvas
from tgi_trio.media.video_canvases import CANVASES
from tgi_trio.media.videos import VideoLimits, read_video
from tgi_trio.router.media.layouts.videos import TimedLayout, WholeLayout

FAMILIES = {"qwen2": ("qwen2_vl", "Qwen2VL"), "qwen3": ("qwen3_vl", "Qwen3VL")}
GLM = {"glm46v": ("glm46v", "Glm46V"), "glm4v": ("glm4v", "Glm4v")}
SMALL: dict[str, Any] = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 32_000}}
LIMITS = VideoLimits(10**6, 10**8, 10**8)


@cache
def theirs(family: str, **settings: Any) -> Any:
    return video_processor(
        *(FAMILIES | GLM)[family], do_rescale=False, do_normalize=False, **settings
    )


def read(data: bytes, canvas: VideoCanvas, limits: VideoLimits = LIMITS, **asked: Any) -> Any:
    return read_video(data, canvas, limits, lambda each: read_pixels(each, 10**6), **asked)


@pytest.mark.parametrize("family", FAMILIES)
@given(
    total=st.integers(2, 3000),
    rate=st.sampled_from([1.0, 10.0, 12.5, 24000 / 1001, 25.0, 30000 / 1001, 30.0, 60.0]),
    fps=st.none() | st.sampled_from([0.1, 1.0, 2.0, 3.7]),
    number=st.none() | st.integers(2, 40),
)
@settings(max_examples=60, deadline=None)
def test_frames_are_those_that_transformers_samples(
    family: str, total: int, rate: float, fps: float | None, number: int | None
) -> None:
    from transformers.video_utils import VideoMetadata

    assume(number is None or (fps is None and number <= total))
    # Where it rounds up beyond the last frame, it fails.
    assume(family == "qwen3" or number is None or 0 < round(number / 2) * 2 <= total)
    plain = 2 if number is None and fps is None else fps
    found = theirs(family).sample_frames(
        VideoMetadata(total, fps=rate), num_frames=number, fps=plain if number is None else None
    )
    # Rounding gives Qwen2's one more, which is behind the last: there is no such frame to decode.
    expected = [frame for frame in found.tolist() if frame < total]
    canvas = CANVASES[family].read({}, 768).with_frames(fps, number)
    assert list(canvas.choose(total, rate)) == expected


@pytest.mark.parametrize("family", GLM)
@given(
    total=st.integers(2, 3000),
    rate=st.sampled_from([0.5, 1.0, 10.0, 24000 / 1001, 25.0, 30000 / 1001, 30.0, 60.0]),
)
@settings(max_examples=60, deadline=None)
def test_frames_are_those_that_glms_sample(family: str, total: int, rate: float) -> None:
    from transformers.video_utils import VideoMetadata

    duration = total / rate
    found = theirs(family).sample_frames(VideoMetadata(total, fps=rate, duration=duration))
    expected = found.tolist() or [0, total - 1]  # of what is too short for one
    assert list(CANVASES[family].read({}, 4000).choose(total, rate)) == expected
    fewer = CANVASES[family].read({}, 8).choose(total, rate)
    assert len(fewer) <= 8 and len(fewer) % 2 == 0
    assert {fewer[0], fewer[-1]} <= set(expected)


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "glm4v"])
@given(frames=st.integers(2, 400), height=st.integers(1, 2500), width=st.integers(1, 2500))
@settings(max_examples=60, deadline=None)
def test_sizes_are_those_of_transformers(
    family: str, capped: bool, frames: int, height: int, width: int
) -> None:
    canvas = CANVASES[family].read({"cap_pixels_per_frame": capped}, 768)
    assert isinstance(canvas, PatchCanvas)
    whole, sizes = theirs(family), []
    assume(max(height, width) <= 200 * min(height, width))
    folder, name = (FAMILIES | GLM)[family]
    kind = getattr(processor_module(folder, "video"), f"{name}VideoProcessor")
    above: Any = kind.__mro__[1]
    shape = torch.empty(1, frames, 3, height, width, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(above, "resize", lambda self, image, size, resample: sizes.append(size))
        patch.setattr(whole, "max_video_tokens", canvas.max_tokens, raising=False)
        whole.resize(
            shape,
            *(whole.size, 3, canvas.unit),
            temporal_factor=2,
            cap_pixels_per_frame=capped,
        )
    rows, columns = canvas.fit(frames, height, width)
    assert (rows * canvas.unit, columns * canvas.unit) == (sizes[0].height, sizes[0].width)


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_those_of_transformers(family: str, kind: str, codec: str) -> None:
    from transformers.video_utils import VideoMetadata

    for size, off in (((32, 48), 0), ((40, 100), 1)):  # the other is resized, which rounds
        data = make_video(23, *size, kind=kind, codec=codec)
        arrays, clip = read(data, CANVASES[family].read(SMALL, 768), num_frames=6)
        whole = video_processor(*FAMILIES[family], do_rescale=False, do_normalize=False, **SMALL)
        found = whole(
            [torch.from_numpy(read_all(data))],
            **{"do_sample_frames": True, "num_frames": 6, "fps": None, "return_metadata": True},
            video_metadata=[VideoMetadata(23, fps=10.0)],
            return_tensors="pt",
        )
        assert clip.frames == tuple(found["video_metadata"][0].frames_indices.tolist())
        assert arrays["image_grid_thw"].tolist() == found["video_grid_thw"].tolist()
        pixels = found["pixel_values_videos"].numpy().astype(np.int64)
        assert np.abs(pixels - arrays["pixel_values"]).max() <= off
        seconds = 2 / found["video_metadata"][0].sampled_fps
        np.testing.assert_allclose(arrays["seconds_per_grid"], [seconds], rtol=1e-6)


def test_an_odd_number_of_frames_is_filled_up_by_the_last() -> None:
    data = make_video(9, 32, 48)
    arrays, clip = read(data, Qwen3Canvas.read(SMALL, 768), num_frames=3)
    assert clip.frames == (0, 4, 8) and arrays["image_grid_thw"].tolist() == [[2, 8, 12]]
    last = arrays["pixel_values"][96:].reshape(96, 3, 2, 16)
    np.testing.assert_array_equal(last[:, :, 0], last[:, :, 1])


def test_a_rotation_that_a_file_asks_for_is_done() -> None:
    """Phones write it into the track's header: a matrix, here of a quarter to the right."""
    data = make_video(4, 32, 48)
    at = data.index(b"tkhd") + 4 + 40  # behind version, times, id, duration, layer and volume
    matrix = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)
    turned = data[:at] + matrix + data[at + len(matrix) :]
    canvas = Qwen2Canvas.read(SMALL, 768)
    arrays, clip = read(turned, canvas)
    assert (clip.height, clip.width) == (48, 32)
    frames = np.rot90(read_all(data), -1, axes=(1, 2))
    whole, _ = read(pack_frames([encode_frame(frame) for frame in frames]), canvas)
    np.testing.assert_array_equal(arrays["pixel_values"], whole["pixel_values"])


def encode_frame(frame: np.ndarray[Any, Any]) -> bytes:
    from PIL import Image

    return encode(Image.fromarray(np.ascontiguousarray(frame)))


def test_pictures_are_packed_and_unpacked() -> None:
    parts = [b"", b"a" * 300, bytes(range(256))]
    packed = pack_frames(parts)
    assert unpack_frames(packed) == parts
    assert unpack_frames(b"RIFF") is None
    with pytest.raises(ValueError, match="cut off"):
        unpack_frames(packed[:-1])


@pytest.mark.parametrize(
    ("data", "limits", "asked", "said"),
    [
        (b"", LIMITS, {}, "it cannot be decoded"),
        (make_video(8)[:-500], LIMITS, {}, "it cannot be decoded"),
        (make_video(1), LIMITS, {}, "it has 1 frame, and this model sees 2 or more"),
        (make_video(8), VideoLimits(1000, 10**8, 10**8), {}, "--max-image-pixels"),
        (make_video(8), VideoLimits(10**6, 5000, 10**8), {}, "--max-video-pixels"),
        (make_video(8), VideoLimits(10**6, 10**8, 999), {}, "--image-memory"),
        (make_video(8), LIMITS, {"num_frames": 9}, "it has 8 frames, and 9 are to be seen"),
        (make_video(8, 8, 2000), LIMITS, {}, "one side is 250 times as long"),
        (pack_frames([encode(noise(8, 8))]), LIMITS, {}, "it has 1 frame"),
        (pack_frames([encode(noise(8, s)) for s in (8, 16)]), LIMITS, {}, "of several sizes"),
        (pack_frames([encode(noise(8, 8))] * 99), LIMITS, {}, "99 frames, 40 are allowed"),
        (make_video(8, kind="avi").replace(b"H264", b"ZZ99"), LIMITS, {}, "its codec is not known"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", LIMITS, {}, "it cannot be decoded"),
        (b"#EXTM3U\n#EXTINF:9,\nfile:///etc/passwd\n", LIMITS, {}, "it cannot be decoded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_seen_is_refused(
    data: bytes, limits: VideoLimits, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read(data, Qwen2Canvas.read(SMALL, 40), limits, **asked)


@pytest.mark.parametrize(
    "settings",
    [{"patch_size": 0}, {"fps": "2"}, {"num_frames": -1}, {"size": 3}, {"do_resize": False}],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(settings)).removesuffix("_size")):
        Qwen3Canvas.read(settings, 768)


def test_seconds_that_are_more_than_tokens_are_refused() -> None:
    """Positions go up to the number of a sequence's tokens, and no further."""
    canvas = Qwen2Canvas.read(SMALL, 768)
    layout = WholeLayout(canvas, positions=2)
    near = Clip(16, 16, (0, 10, 20, 30), 40, 10.0)
    assert layout.count_features(near) == 2 * 4
    with pytest.raises(ValidationError, match="which is more than this model tells apart"):
        layout.count_features(near._replace(total=400, rate=10.0))
    assert WholeLayout(canvas).count_features(near._replace(total=400)) == 8


@pytest.mark.parametrize(("family", "fps"), [("qwen2_5_omni", 3.0), ("qwen3_omni", 13.0)])
def test_moments_of_omni_are_by_what_is_asked_for(family: str, fps: float) -> None:
    """Whatever is seen of a short one, and for pictures by their own rate."""
    own = {**SMALL, "min_pixels": 1, "max_pixels": 2}  # no limits of a video's
    canvas = CANVASES[family].read(own, 768)
    assert isinstance(canvas, PatchCanvas)
    short = make_video(4, 224, 448)
    given: list[tuple[dict[str, Any], float]] = [({}, 1.0), ({"fps": fps}, 2 / fps)]
    for asked, seconds in given:
        arrays, clip = read(short, canvas, **asked)
        assert clip.frames == (0, 1, 2, 3)
        np.testing.assert_array_equal(arrays["seconds_per_grid"], np.array([seconds], np.float32))
    _, rows, columns = arrays["image_grid_thw"][0]
    side = 28 if family == "qwen2_5_omni" else 32
    assert rows * columns * canvas.patch**2 >= 128 * side**2
    arrays, _ = read(pack_frames([encode(noise(64, 64))] * 4), canvas)
    np.testing.assert_array_equal(arrays["seconds_per_grid"], np.array([2.0], np.float32))
    with pytest.raises(ValueError, match="frames are not chosen by `num_frames`"):
        canvas.with_frames(None, 4)
    rare = canvas.with_frames(0.002, None)
    with pytest.raises(ValueError, match="more moments than tokens: ask for more"):
        rare.fit(768, 64, 64)
    if family == "qwen3_omni":
        with pytest.raises(ValueError, match="lie between this model's positions"):
            canvas.with_frames(3.0, None)


def test_grids_stand_behind_their_seconds() -> None:
    layout = TimedLayout(Qwen3Canvas.read(SMALL, 768))
    text = layout.expand(Clip(8, 8, (0, 5, 11), 12, 10.0))
    pad = "<|vision_start|><|video_pad|><|vision_end|>"
    assert text == f"<0.2 seconds>{pad}<1.1 seconds>{pad}"
