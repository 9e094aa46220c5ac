"""Large images are cut out of bodies, and nothing else ever is, wherever pieces of bodies end."""

from __future__ import annotations

import base64
import itertools
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.media.image_text import decode_quoted
from tgi_trio.router.http.messages import body_images
from tgi_trio.router.http.messages.body_images import SHORTEST, BodyCutter, CutBody
from tgi_trio.router.media.image_prompt import ImagePrompt
from tgi_trio.router.media.links import MediaLink, split_text
from tgi_trio.router.media.spool import Spool

DATA = random.Random(0).randbytes(SHORTEST)
LARGE = base64.b64encode(DATA).decode()
URL = f"data:image/png;base64,{LARGE}"
SMALL = "data:image/png;base64,AAAA"


SPOOL = Spool()
CUTTERS = ExitStack()


@pytest.fixture(autouse=True)
def all_blocks_are_given_back() -> Iterator[None]:
    yield
    CUTTERS.close()
    assert not SPOOL.used


def cut_images(body: bytes, *ends: int, written: bool = False) -> CutBody:
    """Cut a body that comes in pieces with such ends; `written`: where there is room for them."""
    cutter = CUTTERS.enter_context(BodyCutter(SPOOL))
    for begin, end in itertools.pairwise([0, *sorted(ends), len(body)]):
        piece = body[begin:end]
        room = cutter.room(len(piece)) if written else []
        if not room:
            cutter.feed(piece)
            continue
        done = 0
        for view in room:
            with view:
                view[:] = piece[done : done + len(view)]
                done += len(view)
        assert done == len(piece)
        cutter.fill(done)
    return cutter.finish()


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
    "a mark that was typed beside a text": chat(
        image("data:;base64,#0"), {"type": "text", "text": f"![]({URL})"}
    ),
    "another prompt": {"prompt": f"![]({URL})"},
    "a link that does not end": {"inputs": f"![]({URL}"},
    "a quote within": {"inputs": f'![](data:image/png;base64,{LARGE}"{LARGE})'},
    "numbers": {"inputs": "x", "ids": list(range(3 * SHORTEST))},
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("indent", [None, 1])
def test_large_images_are_cut_and_can_be_had(name: str, indent: int | None) -> None:
    value, count = CUT[name]
    body = dump(value, indent=indent)
    cut = cut_images(body)
    assert len(cut.images) == count
    assert LARGE.encode() not in cut.body
    for one in cut.images:
        assert one.text() == LARGE
        assert decode_quoted(b'"%b"' % one.written(), len(DATA)) == DATA
    assert seen(cut) == seen(CutBody(body))
    for written in (False, True):
        pieces = cut_images(body, *range(0, len(body), 1000), written=written)
        assert pieces.body == cut.body and len(pieces.images) == count
        assert [each.text() for each in pieces.images] == [LARGE] * count


def seen(cut: CutBody) -> Any:
    """What a body says, with each image in its place."""

    def restore(url: str) -> str:
        (link,) = cut.restore(ImagePrompt((MediaLink(url),))).links
        return url if link.encoded is None else f"{url.rpartition('#')[0]}{link.encoded.text()}"

    def read(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: read(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [read(each, key) for each in value]
        if key == "inputs":
            pieces = split_text(value)
            return [restore(each.url) if isinstance(each, MediaLink) else each for each in pieces]
        if key == "data":
            return restore(f"data:;base64,{value}")
        return restore(value) if key in ("url", "image_url") else value

    return read(json.loads(bytes(cut.body)))


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_image_where_images_are_taken_stays(name: str) -> None:
    body = dump(WHOLE[name])
    assert cut_images(body) == CutBody(body)
    assert not SPOOL.used, "nothing is kept of what is whole again"


def test_a_mark_that_was_typed_as_an_escape_is_none() -> None:
    body = dump(WHOLE["a mark that was typed beside a text"]).replace(b"#", rb"\u0023")
    assert cut_images(body) == CutBody(body)


@pytest.mark.parametrize("beginning", ['"data"', '"data:;base64,"', '"data":"A"'])
def test_behind_very_many_beginnings_nothing_is_looked_for(
    beginning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a moment, in which nothing else of the router runs."""
    looked: list[int] = []

    def look(text: bytearray, begin: int, in_link: bool) -> int:
        looked.append(begin)
        return text.find(b'"', begin)

    monkeypatch.setattr(body_images, "_find_end", look)
    many = '{"inputs":"' + (beginning * 5000).replace('"', '\\"')
    for body in (many.encode(), many.replace("\\", "").encode()):
        assert cut_images(body + f"![]({URL})".encode()).images == ()
    assert len(looked) <= 2 * body_images.BEGINNINGS


@pytest.mark.parametrize("end", [b"", b'"', b'"}', b'"}}]}]}}'])
def test_broken_bodies_stay(end: bytes) -> None:
    body = dump(chat(image(URL)))[: -len('"}}]}]}')] + end
    assert cut_images(body) == CutBody(body)


def test_what_has_come_of_a_body_is_given_back() -> None:
    """Whose client leaves in the middle of its second image."""
    body = dump(chat(image(URL), image(URL)))
    with BodyCutter(SPOOL) as cutter:
        cutter.feed(body[: len(body) * 15 // 16])
        assert SPOOL.used == 2
    assert not SPOOL.used


def test_prompts_are_restored() -> None:
    cut = cut_images(dump({"inputs": f"![]({URL})"}))
    link, other = (MediaLink(f"data:image/png;base64,{each}") for each in ("#0", "#1"))
    prompt = cut.restore(ImagePrompt(("a", link, other)))
    assert prompt.pieces[0] == "a" and prompt.pieces[2] == other
    assert isinstance(prompt.pieces[1], MediaLink) and prompt.pieces[1].encoded is cut.images[0]
    text = "![](data:image/png;base64,#0) #0"
    assert cut.write_out(text) == f"![]({URL}) #0"
    assert cut.count(text) == len(cut.write_out(text))


# Of texts, in which images, what reads like one and ends of them meet in every order.
PARTS = st.sampled_from(
    [
        *["![](", ")", '"', "\\", "data:image/png;base64,", "data:;base64,#0", ";base64,"],
        *["data:a/b;c=d;base64,", "x", "{}", "ä", "data", "http://a.b/", "A" * 70, "B/+=" * 30],
        *["![](data:image/png;base64,", "C" * 200 + ")"],
    ]
)
TEXTS = st.lists(PARTS, max_size=5).map("".join)
URLS = st.sampled_from(["A" * 100, "B/+=" * 40, "A" * 10]).map("data:image/png;base64,{}".format)
MOSTLY = st.one_of(URLS, URLS, URLS, TEXTS)
SOURCES = st.sampled_from(["A" * 100, "/" * 90, "A", "data:a/b;base64," + "A" * 99])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Bodies of all dialects with images of all kinds, some of them broken."""
    links = URLS.map("![]({}) and".format)
    texts = st.one_of(TEXTS, links, st.tuples(links, TEXTS, links).map("".join))
    source = st.fixed_dictionaries(
        {"type": st.sampled_from(["base64", "url"]), "data": st.one_of(SOURCES, TEXTS)}
    )
    parts = st.one_of(
        texts.map(lambda text: {"type": "text", "text": text}),
        MOSTLY.map(image),
        MOSTLY.map(lambda url: {"type": "input_image", "image_url": url}),
        source.map(lambda source: {"type": "image", "source": source}),
    )
    several = st.lists(parts, max_size=4)
    body = draw(
        st.one_of(
            several.map(lambda parts: chat(*parts)),
            several.map(lambda parts: {"input": [{"content": parts}], "data": "x"}),
            texts.map(lambda text: {"inputs": text}),
            st.lists(texts, max_size=3).map(lambda texts: {"inputs": texts, "data": texts}),
            st.tuples(texts, several).map(
                lambda both: {"instances": [{"inputs": both[0]}, chat(*both[1])]}
            ),
        )
    )
    written = dump(body, indent=draw(st.sampled_from([None, None, 2])))
    written = written.replace(b"/", draw(st.sampled_from([b"/", b"\\/", b"\\u002f"])))
    if draw(st.integers(0, 5)) == 0:
        place = draw(st.integers(0, len(written)))
        written = written[:place] + draw(st.sampled_from([b"", b'"', b"\\"]))
    return written


@given(st.data())
@settings(max_examples=100)
def test_a_body_says_the_same_cut_or_whole_wherever_its_pieces_end(data: st.DataObject) -> None:
    body = data.draw(bodies())
    ends = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_images, "SHORTEST", 64)
        cut, pieces = cut_images(body), cut_images(body, *ends)
        single = cut_images(body, *range(len(body)))
        written = [cut_images(body, *each, written=True) for each in (ends, range(len(body)))]
    for other in (pieces, single, *written):
        assert other.body == cut.body
        assert [each.written() for each in other.images] == [each.written() for each in cut.images]
    if not cut.images:
        assert cut.body == body
    elif load(body) is None:  # and who decodes the image says so
        assert None in [load(b'"%b"' % each.written()) for each in cut.images]
    else:
        assert seen(cut) == seen(CutBody(body))


def load(body: bytes) -> Any:
    """Return what JSON says, None where it is broken."""
    try:
        return json.loads(body)
    except ValueError:
        return None
