"""Large images are cut out of bodies, and nothing else ever is."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.router.http.messages.body_images import SHORTEST, CutBody, cut_images
from tgi_trio.router.images.image_prompt import ImagePrompt
from tgi_trio.router.images.links import ImageLink

DATA = random.Random(0).randbytes(SHORTEST)
LARGE = base64.b64encode(DATA).decode()
URL = f"data:image/png;base64,{LARGE}"
SMALL = "data:image/png;base64,AAAA"


def dump(value: Any, **how: Any) -> bytes:
    return json.dumps(value, **how).encode()


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


SOURCE = {"type": "base64", "media_type": "image/png", "data": LARGE}
CUT = {
    "a chat": (chat(image(URL), {"type": "text", "text": "#0?"}, image(SMALL)), 1),
    "two images": (chat(image(URL), image(URL)), 2),
    "a response": ({"input": [{"content": [{"type": "input_image", "image_url": URL}]}]}, 1),
    "a message": (chat({"type": "image", "source": SOURCE}), 1),
    "a prompt": ({"inputs": f"See ![]({URL}) and ![]({SMALL}) and\n![]({URL})!"}, 2),
    "prompts": ({"inputs": [f"![]({URL})", "x" * SHORTEST, f"![]({URL})"]}, 2),
    "instances": ({"instances": [{"inputs": f"![]({URL})"}, chat(image(URL))]}, 2),
    "much text beside it": ({"inputs": f"{'word ' * 9000}![]({URL}){'word ' * 9000}"}, 1),
}
WHOLE = {
    "no images": chat({"type": "text", "text": "x" * 3 * SHORTEST}),
    "a small image": chat(image(SMALL)),
    "an image as text": chat({"type": "text", "text": URL}),
    "a link in a chat": chat({"type": "text", "text": f"![]({URL})"}),
    "an image and a text like one": chat(image(URL), {"type": "text", "text": URL}),
    "an image in a tool": chat(image(URL)) | {"tools": [{"image_url": {"url": URL}}]},
    "a document": chat({"type": "document", "source": SOURCE | {"type": "text"}}),
    "a mark that was typed": chat(image(URL), image("data:image/png;base64,#0")),
    "another prompt": {"prompt": f"![]({URL})"},
    "a link that does not end": {"inputs": f"![]({URL}"},
    "a quote within": {"inputs": f'![](data:image/png;base64,{LARGE}"{LARGE})'},
    "numbers": {"inputs": "x", "ids": list(range(3 * SHORTEST))},
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("indent", [None, 1])
def test_large_images_are_cut_and_can_be_had(name: str, indent: int | None) -> None:
    value, count = CUT[name]
    cut = cut_images(dump(value, indent=indent))
    assert len(cut.images) == count
    assert LARGE.encode() not in cut.body
    restored = cut.body
    for i, one in enumerate(cut.images):
        restored = restored.replace(
            b"%b#%d" % (b"" if b'"data"' in restored else b"base64,", i),
            (b"" if b'"data"' in restored else b"base64,") + LARGE.encode(),
        )
        assert one.text() == LARGE
        assert trio.run(one.decode, len(DATA)) == DATA
    assert json.loads(restored) == value


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_image_where_images_are_taken_stays(name: str) -> None:
    body = dump(WHOLE[name])
    assert cut_images(body) == CutBody(body)


@pytest.mark.parametrize("end", [b"", b'"', b'"}', b'"}}]}]}}'])
def test_broken_bodies_stay(end: bytes) -> None:
    body = dump(chat(image(URL)))[: -len('"}}]}]}')] + end
    assert cut_images(body) == CutBody(body)


def test_prompts_are_restored() -> None:
    cut = cut_images(dump({"inputs": f"![]({URL})"}))
    link, other = (ImageLink(f"data:image/png;base64,{each}") for each in ("#0", "#1"))
    prompt = cut.restore(ImagePrompt(("a", link, other)))
    assert prompt.pieces[0] == "a" and prompt.pieces[2] == other
    assert isinstance(prompt.pieces[1], ImageLink) and prompt.pieces[1].encoded is cut.images[0]
    text = "![](data:image/png;base64,#0) #0"
    assert cut.write_out(text) == f"![]({URL}) #0"
    assert cut.count(text) == len(cut.write_out(text))


@given(
    st.lists(
        st.sampled_from(
            [URL, SMALL, f"![]({URL})", "data:;base64,#0", '\\"', "x" * SHORTEST, LARGE]
        ),
        max_size=4,
    ),
    st.sampled_from(["inputs", "content", "image_url", "other"]),
)
@settings(max_examples=60)
def test_every_body_says_the_same_cut_or_whole(texts: list[str], field: str) -> None:
    """With the images put back in the places of their marks."""
    body = dump({"inputs": texts, field: [{"image_url": text, field: text} for text in texts]})
    cut = cut_images(body)
    assert (cut.body == body) == (not cut.images)
    restored = cut.body
    for i in range(len(cut.images)):
        restored = restored.replace(
            b"image/png;base64,#%d" % i, f"image/png;base64,{LARGE}".encode()
        )
    assert json.loads(restored) == json.loads(body)
