"""An image of a prompt: what follows from its span and its runs of feature tokens."""

from __future__ import annotations

from tgi_trio.router.media.layouts.layout import ImageSize
from tgi_trio.router.media.prompt_image import PromptImage

IMAGE = PromptImage(
    first=3,
    tokens=9,
    feature_places=((1, 2), (4, 3)),
    size=ImageSize(20, 30),
    key=bytes(32),
    data=b"compressed" * 1000,
)


def test_features_and_the_end_follow_from_runs_and_span() -> None:
    assert (IMAGE.features, IMAGE.end) == (5, 12)


def test_the_bytes_of_an_image_stay_out_of_logs() -> None:
    assert "compressed" not in repr(IMAGE)
