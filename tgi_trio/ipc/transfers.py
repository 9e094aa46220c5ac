"""Copies of KV blocks between a device and the host's memory, as records and as frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import Kind


class Transfer(NamedTuple):
    """One copy of a block."""

    block: int  # of the KV cache
    place: int  # of the host's memory, from 1 on
    back: bool  # from the host's memory to the KV cache; False: the other way


def encode_transfers(command: int, transfers: Sequence[Transfer]) -> bytes:
    """Return a TRANSFER frame, whose copies are made in this order."""
    columns = {
        "block_ids": np.array([each.block for each in transfers], np.int32),
        "places": np.array([each.place for each in transfers], np.int32),
        "back": np.array([each.back for each in transfers], np.uint8),
    }
    return encode(Kind.TRANSFER, {"command": command}, columns)


def decode_transfers(frame: Frame) -> list[Transfer]:
    """Return the copies that a TRANSFER frame asks for."""
    columns: Iterable[tuple[int, int, int]] = zip(
        frame.column("block_ids").tolist(),
        frame.column("places").tolist(),
        frame.column("back").tolist(),
        strict=True,
    )
    return [Transfer(block, place, bool(back)) for block, place, back in columns]
