"""docs/protocol.md is what the frame table says."""

from __future__ import annotations

from tgi_trio.ipc.frames import FRAMES
from tools.docs.protocol import render


def test_it_names_every_frame() -> None:
    text = render()
    for spec in FRAMES:
        assert f"### {spec.kind.name} " in text
