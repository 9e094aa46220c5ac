"""docs/protocol.md is what the frame table says."""

from __future__ import annotations

from pathlib import Path

from tgi_trio.ipc.frames import FRAMES
from tgi_trio.ipc.protocol_doc import render

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == render()


def test_it_names_every_frame() -> None:
    text = render()
    for spec in FRAMES:
        assert f"### {spec.kind.name} " in text
