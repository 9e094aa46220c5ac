"""Copies of blocks and snapshots between a device and the host's memory: records and frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import FrameKind


class Transfer(NamedTuple):
    """One copy, of a KV block or of a slot of states."""

    item: int  # the block's number, or the slot's
    place: int  # in the host's memory, from 1 on; blocks and slots are numbered apart
    back: bool  # from the host's memory to the device's; False: the other way
    states: bool = False  # it is a slot


def encode_transfers(command: int, transfers: Sequence[Transfer]) -> bytes:
    """Return a TRANSFER frame, whose copies are made in this order."""
    columns: dict[str, NDArray[Any]] = {
        "items": np.array([each.item for each in transfers], np.int32),
        "places": np.array([each.place for each in transfers], np.int32),
        "back": np.array([each.back for each in transfers], np.uint8),
        "states": np.array([each.states for each in transfers], np.uint8),
    }
    return encode(FrameKind.TRANSFER, {"command": command}, columns)


def decode_transfers(frame: Frame) -> list[Transfer]:
    """Return the copies that a TRANSFER frame asks for."""
    rows: Iterable[tuple[int, int, int, int]] = zip(
        frame.column("items").tolist(),
        frame.column("places").tolist(),
        frame.column("back").tolist(),
        frame.column("states").tolist(),
        strict=True,
    )
    return [Transfer(item, place, bool(back), bool(states)) for item, place, back, states in rows]
