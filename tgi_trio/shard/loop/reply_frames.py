"""The shard's replies as frames that fit the reply ring.

A report or a list of faults that is too large for one frame becomes several: rows are divided
between them, and a row with very many prompt log-probabilities is divided too (its first pieces
carry prompt log-probabilities only). All frames of a step have its number and acknowledgement;
times and row counts are in the first one alone, so that sums over frames stay right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.frame_codec import FrameTemplate, encode
from tgi_trio.ipc.frames import SPECS, Finish, FrameKind
from tgi_trio.ipc.messages import Fault, encode_faults

_STEP = SPECS[FrameKind.STEP]
_NO_WORDS = {name: 0 for name, _ in _STEP.words}
_STEP_DTYPES = {name: dtype for name, dtype, _ in _STEP.plan}
_ROW_COLUMNS = ("sequence", "computed", "token_count", "prompt_count", "finish")
_SEEN_COLUMNS = ("seen_sequence", "seen_image", "seen_ns")
_MESSAGE_CHARS = 2000  # of a fault's message; longer ones are cut


class StepFrames:
    """Encodes STEP frames; keeps a template, since most frames resemble the previous one."""

    def __init__(self) -> None:
        self._template: FrameTemplate | None = None
        self._size = 0  # of the last frame that was encoded without one

    def encode(
        self, words: Mapping[str, int], columns: Mapping[str, NDArray[Any]], max_bytes: int
    ) -> list[bytes]:
        """Return the STEP frames of a step, each of `max_bytes` at most.

        `words` left out are 0, `columns` left out are empty; any integer or float dtype.
        """
        if len(words) < len(_NO_WORDS):
            words = {**_NO_WORDS, **words}
        template = self._template
        frame = None if template is None else template.encode(words, columns)
        if frame is None:
            frame, before = encode(FrameKind.STEP, words, columns), self._size
            self._template, self._size = None, len(frame)
            if columns and self._size == before:  # most likely the second frame of its kind
                self._template = FrameTemplate(FrameKind.STEP, frame, columns)
        if len(frame) <= max_bytes:
            return [frame]
        return list(_divide(words, columns, max_bytes))


def _divide(
    words: Mapping[str, int], columns: Mapping[str, NDArray[Any]], max_bytes: int
) -> Iterator[bytes]:
    """Yield the frames of a step that does not fit into one."""
    columns = {name: column.astype(_STEP_DTYPES[name]) for name, column in columns.items()}
    if seen := {name: columns.pop(name) for name in _SEEN_COLUMNS if name in columns}:
        yield encode(FrameKind.STEP, words, seen)  # a few images at most
        words = _continued(words)
    deepest = int(np.max(columns.get("prompt_top_count", ()), initial=0))
    most = max_bytes // (16 + 16 * deepest)  # prompt positions: half of a frame
    for piece in _pieces(_divide_long_prompts(columns, most), max_bytes):
        yield encode(FrameKind.STEP, words, piece)
        words = _continued(words)


def _continued(words: Mapping[str, int]) -> dict[str, int]:
    """Return the words of a step's further frames."""
    return _NO_WORDS | {name: words[name] for name in ("step", "acknowledged", "held", "copied")}


def encode_fault_frames(acknowledged: int, faults: list[Fault], max_bytes: int) -> Iterator[bytes]:
    """Yield the FAULT frames of `faults`, each of `max_bytes` at most; long messages are cut."""
    per_frame = max(1, max_bytes // (5 * _MESSAGE_CHARS))  # UTF-8 is 4 bytes a character at most
    limit = min(_MESSAGE_CHARS, max_bytes // 5)
    for start in range(0, len(faults), per_frame):
        some = faults[start : start + per_frame]
        yield encode_faults(acknowledged, [Fault(f.sequence, f.message[:limit]) for f in some])


def _divide_long_prompts(columns: Mapping[str, NDArray[Any]], most: int) -> dict[str, NDArray[Any]]:
    """Return the columns with rows of more than `most` prompt log-probabilities divided."""
    counts = columns["prompt_count"].astype(np.int64)
    repeats = np.maximum(1, -(-counts // most))
    if (repeats == 1).all():
        return dict(columns)
    divided = dict(columns)
    for name in _ROW_COLUMNS:
        divided[name] = np.repeat(columns[name], repeats)
    last = np.cumsum(repeats) - 1  # the piece that carries the row's tokens and its end
    divided["prompt_count"][:] = most
    divided["prompt_count"][last] = counts - (repeats - 1) * most
    divided["token_count"][:] = 0
    divided["token_count"][last] = columns["token_count"]
    divided["finish"][:] = Finish.NONE
    divided["finish"][last] = columns["finish"]
    return divided


def _pieces(
    columns: Mapping[str, NDArray[Any]], max_bytes: int
) -> Iterator[dict[str, NDArray[Any]]]:
    """Divide rows into consecutive pieces whose frames have `max_bytes` at most."""
    rows = len(columns["sequence"])
    empty = np.empty(0, np.int64)
    tokens = np.concatenate(([0], np.cumsum(columns["token_count"], dtype=np.int64)))
    prompts = np.concatenate(([0], np.cumsum(columns["prompt_count"], dtype=np.int64)))
    tops = np.concatenate(([0], np.cumsum(columns.get("top_count", empty), dtype=np.int64)))
    prompt_tops = np.concatenate(
        ([0], np.cumsum(columns.get("prompt_top_count", empty), dtype=np.int64))
    )
    bounds = {
        "rows": np.arange(rows + 1),
        "tokens": tokens,
        "tops": tops[tokens] if len(tops) > 1 else np.zeros(rows + 1, np.int64),
        "prompts": prompts,
        "prompt_tops": prompt_tops[prompts],
    }
    start = 0
    while start < rows:
        stop = rows
        while True:
            piece = {
                column.name: columns[column.name][
                    bounds[column.per][start] : bounds[column.per][stop]
                ]
                for column in _STEP.columns
                if column.name in columns
            }
            size = _STEP.header_bytes + sum(-(-array.nbytes // 8) * 8 for array in piece.values())
            if size <= max_bytes or stop == start + 1:  # a single row that is too large is refused
                break  # by the ring, with both sizes in the message
            stop = start + (stop - start) // 2
        yield piece
        start = stop
