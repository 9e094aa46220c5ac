"""Prompts with images: their pieces, their texts, and where the images are among the ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.errors import ValidationError
from tgi_trio.router.http.engine_api import ModelCard
from tgi_trio.router.http.routes.native import find_images
from tgi_trio.router.media.image_prompt import DecodableImage, ImagePrompt, expand_prompt
from tgi_trio.router.media.layouts.fixed import FixedLayout
from tgi_trio.router.media.layouts.layout import ImageSize
from tgi_trio.router.media.layouts.minicpmv import MiniCpmLayout
from tgi_trio.router.media.layouts.pinpoints import OnevisionLayout
from tgi_trio.router.media.layouts.rows import RowLayout
from tgi_trio.router.media.links import MediaLink

LAYOUT = RowLayout(unit=1, longest=8)
FEATURES = {"[IMG]": 1}
IDS = {"[IMG]": 1, "[IMG_BREAK]": 2, "[IMG_END]": 3}


def encode(text: str) -> np.ndarray:
    """One id for each mark and for each other letter."""
    ids: list[int] = []
    while text:
        mark = next((each for each in IDS if text.startswith(each)), text[0])
        ids.append(IDS.get(mark, 9))
        text = text[len(mark) :]
    return np.array(ids, np.int32)


def seen(height: int, width: int) -> DecodableImage:
    return DecodableImage(b"", bytes(32), ImageSize(height, width), 64)


def test_runs_are_the_rows_between_marks() -> None:
    prompt = ImagePrompt(("ab", MediaLink("x"), "c"))
    found = expand_prompt(prompt, [seen(2, 3)], LAYOUT, "", FEATURES)
    assert found.text == "ab[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]c"
    (image,) = found.place(encode(found.text), cut_off=False)
    assert (image.first, image.tokens) == (2, 7)
    assert image.feature_places == ((0, 3), (4, 3)) and image.features == 6
    assert found.features == 6


def test_images_are_counted_where_the_family_does_so() -> None:
    layout = MiniCpmLayout(side=8, unit=4, most=1, numbers=True)
    prompt = ImagePrompt(("a", MediaLink("x"), "b", MediaLink("y")))
    found = expand_prompt(prompt, [seen(8, 8), seen(8, 8)], layout, "", FEATURES)
    image = f"<image>{'<|image_pad|>' * 4}</image>"
    assert found.text == f"a<image_id>0</image_id>{image}b<image_id>1</image_id>{image}"


def test_marks_have_features_beside_an_images_own() -> None:
    layout = FixedLayout("[IMG]", "[IMG]", 2, "[IMG_BREAK]", "[IMG_END]", ("[IMG_END]",))
    ids = {token: IDS[token] for token in (layout.feature_token, *layout.mark_tokens)}
    prompt = ImagePrompt(("a[IMG_END]", MediaLink("x"), "b", MediaLink("y")))
    found = expand_prompt(prompt, [seen(2, 3)] * 2, layout, "", ids)
    assert found.features == 6
    images = found.place(encode(found.text), cut_off=False)
    assert [image.first for image in images] == [3, 8], "what was typed has none"
    assert {image.feature_places for image in images} == {((0, 3),)}


def test_images_beside_others_are_laid_out_as_their_family_does_there() -> None:
    layout = OnevisionLayout((ImageSize(8, 16),), crop=8, patch=4, extra=0)
    for count, tokens in ((1, 4 + 8 + 2), (2, 4 + 1)):
        links = [MediaLink("x")] * count
        found = expand_prompt(
            ImagePrompt(tuple(links)), [seen(8, 16)] * count, layout, "", FEATURES
        )
        assert found.text == "<image>" * tokens * count and found.features == tokens * count


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["a", "[IMG]", "b[IMG][IMG]", "[IMG_END]"]),
            st.tuples(st.integers(1, 4), st.integers(1, 4)),
        ),
        max_size=6,
    ),
    st.integers(0, 10),
)
def test_what_was_typed_is_nobodys_and_images_have_all_of_theirs(
    pieces: list[str | tuple[int, int]], cut: int
) -> None:
    prompt = ImagePrompt(tuple(p if isinstance(p, str) else MediaLink("x") for p in pieces))
    images = [seen(*piece) for piece in pieces if not isinstance(piece, str)]
    found = expand_prompt(prompt, images, LAYOUT, "", FEATURES)
    ids = encode(found.text)
    places = found.place(ids, cut_off=False)
    assert len(places) == len(images)
    end = 0
    for image, place in zip(images, places, strict=True):
        assert isinstance(image.size, ImageSize)
        assert place.first >= end and place.features == image.size.pixels
        own = ids[place.first : place.end]
        assert (own == 1).sum() == place.features and (own == 2).sum() == image.size.height - 1
        assert ids[place.end] == IDS["[IMG_END]"]
        end = place.end
    cut = min(cut, len(ids))
    inside = [p for p in places if p.first < cut < p.end and 1 in ids[cut : p.end]]
    if inside:
        with pytest.raises(ValidationError, match=r"`truncate` cuts image \d in two"):
            found.place(ids[cut:], cut_off=True)
    else:
        kept = found.place(ids[cut:], cut_off=True)
        assert [p.first for p in kept] == [p.first - cut for p in places if p.first >= cut]


def test_an_image_alone_is_a_prompt() -> None:
    images = SimpleNamespace(layout=LAYOUT)
    call: Any = SimpleNamespace(engine=SimpleNamespace(images=images, model=ModelCard("m")))
    assert find_images(call, "![](x)") == ImagePrompt((MediaLink("x"),))
    assert find_images(call, "[](x)") == "[](x)"


def test_tokens_that_do_not_add_up_are_refused() -> None:
    found = expand_prompt(ImagePrompt((MediaLink("x"),)), [seen(1, 2)], LAYOUT, "", FEATURES)
    with pytest.raises(ValidationError, match=r"has 1 tokens '\[IMG\]', where .* have 2"):
        found.place(np.array([1, 3], np.int32), cut_off=False)
