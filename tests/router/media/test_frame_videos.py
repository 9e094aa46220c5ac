"""Videos whose frames are seen as images: frames, pixels and texts are those of transformers."""

from __future__ import annotations

import importlib
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.router.media.image_files import encode, noise
from tests.router.media.torchvision_processors import video_processor
from tests.router.media.video_files import make_video, read_all
from tgi_trio.errors import ModelLoadError
from tgi_trio.media.decoding import read_pixels
from tgi_trio.media.packed_frames import pack_frames
from tgi_trio.media.video_canvas import Clip
from tgi_trio.media.video_canvases import CANVASES
from tgi_trio.media.videos import VideoLimits, read_video
from tgi_trio.router.media.layouts.layout import ImageSettings
from tgi_trio.router.media.layouts.spelled import spell_number
from tgi_trio.router.media.layouts.videos import VIDEO_LAYOUTS

NAMES = {"internvl": "InternVL", "smolvlm": "SmolVLM"}
SMALL: dict[str, dict[str, Any]] = {
    "internvl": {"size": {"height": 24, "width": 24}},
    "smolvlm": {"size": {"longest_edge": 40}, "max_image_size": {"longest_edge": 24}},
}
LIMITS = VideoLimits(10**6, 10**8, 10**8)
RATES = st.sampled_from([1.0, 10.0, 12.5, 24000 / 1001, 25.0, 30000 / 1001, 30.0, 60.0])


@cache
def theirs(family: str) -> Any:
    return video_processor(
        family, NAMES[family], do_rescale=False, do_normalize=False, **SMALL[family]
    )


def read(family: str, data: bytes, limits: VideoLimits = LIMITS, **asked: Any) -> Any:
    canvas = CANVASES[family].read(SMALL[family], 80)
    return read_video(data, canvas, limits, lambda each: read_pixels(each, 10**6), **asked)


@given(
    total=st.integers(1, 8000),
    rate=RATES,
    fps=st.none() | st.sampled_from([0.1, 1.0, 2.0, 3.7]),
    number=st.none() | st.integers(1, 80),
)
@settings(max_examples=100, deadline=None)
def test_frames_are_those_that_smolvlm_samples(
    total: int, rate: float, fps: float | None, number: int | None
) -> None:
    """`num_frames` are the most, whatever `fps` says."""
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total, fps=rate, duration=total / rate)
    found = theirs("smolvlm").sample_frames(metadata, num_frames=number or 64, fps=fps or 1)
    canvas = CANVASES["smolvlm"].read({}, 80)
    canvas = canvas.with_frames(None, number).with_frames(fps, None)
    assert list(canvas.choose(total, rate)) == found.tolist()


@given(
    total=st.integers(1, 3000),
    rate=RATES,
    fps=st.none() | st.sampled_from([0.5, 1.0, 2.0]),
    number=st.integers(1, 80),
    shift=st.sampled_from([True, False, 0, 3, 2.5]),
)
@settings(max_examples=100, deadline=None)
def test_frames_are_those_that_internvl_samples(
    total: int, rate: float, fps: float | None, number: int, shift: float
) -> None:
    from transformers.video_utils import VideoMetadata

    wanted = number if fps is None else int(total / rate * fps)
    assume(0 < wanted <= min(total, 80) and shift < total)
    found = theirs("internvl").sample_frames(
        VideoMetadata(total, fps=rate),
        num_frames=None if fps else number,
        **{"fps": fps, "initial_shift": shift},
    )
    # Rounding may give one more, behind the last: there is no such frame to decode.
    expected = [min(frame, total - 1) for frame in found.tolist()]
    canvas = CANVASES["internvl"].read({"initial_shift": shift}, 80)
    canvas = canvas.with_frames(fps, None if fps else number)
    assert list(canvas.choose(total, rate)) == expected


@pytest.mark.parametrize("family", NAMES)
def test_where_nobody_says_how_many_frames_a_short_video_is_seen_whole(family: str) -> None:
    canvas = CANVASES[family].read({}, 768)
    assert canvas.choose(5, 1.0) == (0, 1, 2, 3, 4)
    assert len(canvas.choose(10_000, 10.0)) == {"internvl": 8, "smolvlm": 64}[family]
    few = CANVASES[family].read({}, 6)  # --max-video-frames
    assert len(few.choose(10_000, 10.0)) == 6
    with pytest.raises(ValueError, match="7 frames are asked for, 6 are allowed"):
        few.with_frames(None, 7)


@pytest.mark.parametrize("size", [(32, 48), (48, 32), (24, 24), (16, 104)])
@pytest.mark.parametrize("family", NAMES)
def test_pixels_are_those_of_transformers(family: str, size: tuple[int, int]) -> None:
    data = make_video(12, *size)
    arrays, clip = read(family, data, fps=4.0)
    frames = torch.from_numpy(read_all(data))[list(clip.frames)]
    found = theirs(family)([frames], do_sample_frames=False, return_tensors="pt")
    name = "pixel_values" if family == "smolvlm" else "pixel_values_videos"
    expected = found[name].numpy().astype(np.int64)
    if family == "internvl":
        expected = expected[0]  # there videos are in a batch, and joined for the model
    assert arrays["pixel_values"].shape == expected.shape
    # Both round between passes; where these overshoot, in another order.
    off = np.abs(expected - arrays["pixel_values"])
    assert off.mean() < 0.5 and np.quantile(off, 0.99) <= 2
    assert arrays["num_frames"].tolist() == [len(clip.frames)] and len(clip.frames) in (4, 5)


@pytest.mark.parametrize("family", NAMES)
@given(total=st.integers(1, 9000), rate=RATES, count=st.integers(1, 130))
@settings(max_examples=40, deadline=None)
def test_texts_are_those_of_transformers(family: str, total: int, rate: float, count: int) -> None:
    from transformers.video_utils import VideoMetadata

    frames = tuple(np.unique(np.linspace(0, total - 1, count, dtype=int)).tolist())
    clip = Clip(24, 24, frames, total, rate)
    metadata = VideoMetadata(
        total, fps=rate, duration=total / rate, frames_indices=list(clip.frames)
    )
    pixels = torch.empty(1, len(frames), 3, 24, 24)
    module = importlib.import_module(f"transformers.models.{family}.processing_{family}")
    tokens = {
        "internvl": {"start_image_token": "<img>", "end_image_token": "</img>"},
        "smolvlm": {"fake_image_token": "<fake_token_around_image>"},
    }[family]
    processor = SimpleNamespace(
        **{"image_seq_len": 3, "image_seq_length": 3, "global_image_token": "<global-img>"},
        image_token={"internvl": "<IMG_CONTEXT>", "smolvlm": "<image>"}[family],
        **tokens,
    )
    given = {"video_metadata": [metadata], "pixel_values": pixels, "pixel_values_videos": pixels}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "num2words", spell_number, raising=False)
        write = getattr(module, f"{NAMES[family]}Processor").replace_video_token
        expected = write(processor, given, 0)
    options = {"image_seq_len": 3, "image_seq_length": 3}
    layout = VIDEO_LAYOUTS[family](None, ImageSettings({}, {}, options))
    assert layout.expand(clip) == expected
    assert layout.count_features(clip) == expected.count(layout.feature_token)
    assert layout.placeholder == "<video>"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (101, "one hundred and one"),
        (768, "seven hundred and sixty-eight"),
        (1000, "one thousand"),
        (1015, "one thousand and fifteen"),
        (2345, "two thousand, three hundred and forty-five"),
        (100_020, "one hundred thousand and twenty"),
    ],
)
def test_numbers_are_spelled_as_by_num2words(number: int, words: str) -> None:
    assert spell_number(number) == words
    with pytest.raises(ValueError, match="not written in words"):
        spell_number(number - 10**6)


def test_of_a_smolvlm_that_says_how_it_samples_a_size_beside_it_counts() -> None:
    """As in SmolVLM2's files, which have both."""
    sampling = {"fps": 2, "max_frames": 7, "video_size": {"longest_edge": 50}}
    canvas: Any = CANVASES["smolvlm"].read({"video_sampling": sampling}, 768)
    assert (canvas.fps, canvas.num_frames, canvas.longest) == (2.0, 7, 50)
    beside = {"video_sampling": sampling, "size": {"longest_edge": 60}}
    assert CANVASES["smolvlm"].read(beside, 768).longest == 60  # type: ignore[attr-defined]
    whole = video_processor("smolvlm", "SmolVLM", **beside)
    assert (whole.num_frames, whole.fps, whole.size["longest_edge"]) == (7, 2, 60)


def test_pictures_are_frames_and_all_are_seen() -> None:
    pictures = [encode(noise(20, 30, seed=i)) for i in range(3)]
    for family in NAMES:
        arrays, clip = read(family, pack_frames(pictures))
        assert clip.frames == (0, 1, 2) and arrays["num_frames"].tolist() == [3]
        with pytest.raises(ValueError, match="--image-memory"):
            read(family, pack_frames(pictures), VideoLimits(10**6, 10**8, 3 * 3 * 24 * 24 - 1))


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("internvl", {"size": {"shortest_edge": 4}}),
        ("internvl", {"do_center_crop": True}),
        ("internvl", {"initial_shift": -1}),
        ("internvl", {"num_frames": 0}),
        ("smolvlm", {"max_image_size": {"height": 3}}),
        ("smolvlm", {"fps": 0}),
        ("smolvlm", {"do_resize": False}),
    ],
)
def test_settings_that_are_not_served_are_refused(family: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"video processor|frames are"):
        CANVASES[family].read(wrong, 768)
