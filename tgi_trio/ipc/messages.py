"""Commands and step reports as dataclasses, with their encoding to frames and back.

The router encodes commands and decodes steps, the shard the other way round. The layout of frames
is in `frames.py` alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import CorruptFrame
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frame_columns import check_counts, split_column
from tgi_trio.ipc.frames import Finish, FrameKind, RowFlag
from tgi_trio.ipc.images import SequenceImage
from tgi_trio.ipc.prefill_images import image_columns, split_images

IntArray = NDArray[np.int32]

_NO_IDS: IntArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the next token of one sequence is chosen; defaults are the "off" values."""

    seed: int = 0
    sample: bool = False  # False: greedy
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    absolute_penalties: bool = False  # OpenAI's formula instead of TGI's
    watermark: bool = False
    ignore_eos: bool = False
    top_n: int = 0
    prompt_logprobs: bool = False
    prompt_top_n: int = 0  # alternatives per prompt position, where prompt_logprobs
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    no_repeat_size: int = (
        0  # of n-grams that may not come again, see `shard/sampling/no_repeats.py`
    )
    no_repeat_window: int = 0  # tokens among which they are looked for; 0: all
    no_repeat_spared: tuple[int, ...] = ()  # tokens that are never barred
    gap_ends: tuple[int, ...] = ()  # of a gap that it fills, see `shard/sampling/gaps.py`
    adapter: int = 0
    ends: tuple[int, ...] = ()  # tokens that end it as the model's own ends do
    tokenizer: str = ""  # tokenizer.json that `grammar` is read with; "": the model's

    def flags(self) -> int:
        """Return the RowFlag bits of a PREFILL row."""
        return (
            RowFlag.SAMPLE * self.sample
            | RowFlag.IGNORE_EOS * self.ignore_eos
            | RowFlag.WATERMARK * self.watermark
            | RowFlag.PROMPT_LOGPROBS * self.prompt_logprobs
            | RowFlag.ABSOLUTE_PENALTIES * self.absolute_penalties
        )


@dataclass(frozen=True, slots=True)
class StateGrant:
    """The slots of one sequence's recurrent states (`model/specs/mixers.py`)."""

    slots: tuple[int, int]  # a step reads one and writes the other, so that it can be repeated
    source: int = 0  # slot that its first step reads; 0: it starts from nothing
    held_length: int = 0  # leading tokens whose K and V are in the blocks and not to be written
    saves: tuple[tuple[int, int], ...] = ()  # snapshots: (after how many tokens, slot), ascending


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One sequence of a PREFILL command."""

    sequence: int
    token_ids: IntArray  # int32 [token_count]: prompt, then tokens emitted before a replay
    prompt_length: int
    cached_length: int
    block_ids: ListLike[int]
    max_new_tokens: int
    min_new_tokens: int = 0
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    images: tuple[SequenceImage, ...] = ()  # in the order of their tokens
    states: StateGrant | None = None  # None: the model keeps none


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """More blocks for one running sequence."""

    sequence: int
    block_ids: ListLike[int]


_STATELESS = StateGrant((0, 0))

_PLAIN = (
    *("top_n", "prompt_top_n", "top_k", "temperature", "top_p", "typical_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "adapter"),
    *("no_repeat_size", "no_repeat_window"),
)


def _u4(values: list[int]) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


def _i4(values: ListLike[int]) -> IntArray:
    return np.array(values, dtype=np.int32)


def _concatenate(arrays: list[IntArray]) -> IntArray:
    return np.concatenate(arrays) if len(arrays) > 1 else next(iter(arrays), _NO_IDS)  # one as is


def encode_prefill(command: int, rows: ListLike[PrefillRow]) -> bytes:
    """Return a PREFILL frame for `rows`, in that order."""
    sampling = [row.sampling for row in rows]
    biases = [pair for s in sampling for pair in s.logit_bias]
    grammars = [s.grammar.encode() for s in sampling]
    tokenizers = [os.fsencode(s.tokenizer) for s in sampling]
    states = [row.states or _STATELESS for row in rows]
    saves = [save for own in states for save in own.saves]
    columns: dict[str, NDArray[Any]] = {
        "sequence": np.array([row.sequence for row in rows], dtype=np.uint64),
        "seed": np.array([s.seed for s in sampling], dtype=np.uint64),
        "token_count": _u4([len(row.token_ids) for row in rows]),
        "prompt_length": _u4([row.prompt_length for row in rows]),
        "cached_length": _u4([row.cached_length for row in rows]),
        "block_count": _u4([len(row.block_ids) for row in rows]),
        "max_new_tokens": _u4([row.max_new_tokens for row in rows]),
        "min_new_tokens": _u4([row.min_new_tokens for row in rows]),
        "flags": _u4([s.flags() for s in sampling]),
        "bias_count": _u4([len(s.logit_bias) for s in sampling]),
        "spared_count": _u4([len(s.no_repeat_spared) for s in sampling]),
        "gap_end_count": _u4([len(s.gap_ends) for s in sampling]),
        "grammar_length": _u4([len(g) for g in grammars]),
        "tokenizer_length": _u4([len(t) for t in tokenizers]),
        "end_count": _u4([len(s.ends) for s in sampling]),
        "token_ids": _concatenate([row.token_ids for row in rows]),
        "block_ids": _concatenate([_i4(row.block_ids) for row in rows]),
        "state_slot": _u4([own.slots[0] for own in states]),
        "spare_slot": _u4([own.slots[1] for own in states]),
        "source_slot": _u4([own.source for own in states]),
        "held_length": _u4([own.held_length for own in states]),
        "save_count": _u4([len(own.saves) for own in states]),
        "save_positions": _u4([position for position, _ in saves]),
        "save_slots": _u4([slot for _, slot in saves]),
        "bias_ids": _i4([token for token, _ in biases]),
        "bias_values": np.array([value for _, value in biases], dtype=np.float32),
        "spared_ids": _i4([token for s in sampling for token in s.no_repeat_spared]),
        "gap_ends": _i4([token for s in sampling for token in s.gap_ends]),
        "end_ids": _i4([token for s in sampling for token in s.ends]),
        "grammars": np.frombuffer(b"".join(grammars), dtype=np.uint8),
        "tokenizers": np.frombuffer(b"".join(tokenizers), dtype=np.uint8),
    }
    for name in _PLAIN:
        columns[name] = np.array([getattr(s, name) for s in sampling])
    columns |= image_columns([row.images for row in rows])
    return encode(FrameKind.PREFILL, {"command": command}, columns)


def decode_prefill(frame: Frame) -> list[PrefillRow]:
    """Return the rows of a PREFILL frame; nothing in them aliases the ring.

    Raises CorruptFrame for columns that contradict each other, and for images of no row.
    """
    lists = {name: frame.column(name).tolist() for name in _PLAIN}
    sequences, seeds = frame.column("sequence").tolist(), frame.column("seed").tolist()
    flags = frame.column("flags").tolist()
    prompt_lengths = frame.column("prompt_length").tolist()
    cached_lengths = frame.column("cached_length").tolist()
    max_new, min_new = (frame.column(f"{m}_new_tokens").tolist() for m in ("max", "min"))
    ids = split_column(frame, "token_ids", "token_count")
    blocks = split_column(frame, "block_ids", "block_count")
    bias_ids = split_column(frame, "bias_ids", "bias_count")
    bias_values = split_column(frame, "bias_values", "bias_count")
    spared = split_column(frame, "spared_ids", "spared_count")
    gap_ends = split_column(frame, "gap_ends", "gap_end_count")
    grammars = split_column(frame, "grammars", "grammar_length")
    tokenizers = split_column(frame, "tokenizers", "tokenizer_length")
    ends = split_column(frame, "end_ids", "end_count")
    images = split_images(frame)
    states = _decode_states(frame)
    rows = []
    for i, sequence in enumerate(sequences):
        flag = flags[i]
        sampling = SamplingParameters(
            seed=seeds[i],
            sample=bool(flag & RowFlag.SAMPLE),
            absolute_penalties=bool(flag & RowFlag.ABSOLUTE_PENALTIES),
            watermark=bool(flag & RowFlag.WATERMARK),
            ignore_eos=bool(flag & RowFlag.IGNORE_EOS),
            prompt_logprobs=bool(flag & RowFlag.PROMPT_LOGPROBS),
            logit_bias=tuple(zip(bias_ids[i].tolist(), bias_values[i].tolist(), strict=True)),
            no_repeat_spared=tuple(spared[i].tolist()),
            gap_ends=tuple(gap_ends[i].tolist()),
            grammar=grammars[i].tobytes().decode(),
            ends=tuple(ends[i].tolist()),
            tokenizer=os.fsdecode(tokenizers[i].tobytes()),
            **{name: values[i] for name, values in lists.items()},
        )
        rows.append(
            PrefillRow(
                sequence=sequence,
                token_ids=ids[i].copy(),
                prompt_length=prompt_lengths[i],
                cached_length=cached_lengths[i],
                block_ids=blocks[i].tolist(),
                max_new_tokens=max_new[i],
                min_new_tokens=min_new[i],
                sampling=sampling,
                images=images.get(i, ()),
                states=states[i],
            )
        )
    return rows


def _decode_states(frame: Frame) -> list[StateGrant | None]:
    """Return what a PREFILL frame says of the states of its rows."""
    firsts, spares, sources, held = (
        frame.column(name).tolist()
        for name in ("state_slot", "spare_slot", "source_slot", "held_length")
    )
    positions, slots = (
        split_column(frame, name, "save_count") for name in ("save_positions", "save_slots")
    )
    return [
        StateGrant(
            slots=(first, spares[i]),
            source=sources[i],
            held_length=held[i],
            saves=tuple(zip(positions[i].tolist(), slots[i].tolist(), strict=True)),
        )
        if first
        else None
        for i, first in enumerate(firsts)
    ]


def encode_extend(command: int, rows: ListLike[ExtendRow]) -> bytes:
    """Return an EXTEND frame."""
    columns: dict[str, NDArray[Any]] = {
        "sequence": np.array([row.sequence for row in rows], dtype=np.uint64),
        "block_count": _u4([len(row.block_ids) for row in rows]),
        "block_ids": _i4([b for row in rows for b in row.block_ids]),
    }
    return encode(FrameKind.EXTEND, {"command": command}, columns)


def decode_extend(frame: Frame) -> list[ExtendRow]:
    """Return the rows of an EXTEND frame. Raises CorruptFrame for columns that contradict."""
    blocks = split_column(frame, "block_ids", "block_count")
    sequences = frame.column("sequence").tolist()
    return [ExtendRow(s, b.tolist()) for s, b in zip(sequences, blocks, strict=True)]


def encode_filter(command: int, sequences: ListLike[int]) -> bytes:
    """Return a FILTER frame that drops `sequences`."""
    return encode(
        FrameKind.FILTER, {"command": command}, {"sequence": np.array(sequences, dtype=np.uint64)}
    )


@dataclass(slots=True)
class StepReport:
    """The report of one step; words and columns as in the STEP frame, in its order.

    The router's copy holds plain lists (nothing aliases the ring): at these sizes Python reads
    list items several times faster than numpy scalars.
    """

    step: int
    acknowledged: int
    gap_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    held: int = 0
    prefill_tokens: int = 0
    decode_rows: int = 0
    stalled_rows: int = 0
    draft_tokens: int = 0
    recovered: int = 0
    copied: int = 0
    sequence: list[int] = field(default_factory=list)  # [rows]
    computed: list[int] = field(default_factory=list)  # [rows] tokens whose KV is in the blocks
    token_count: list[int] = field(default_factory=list)  # [rows]
    prompt_count: list[int] = field(default_factory=list)  # [rows]
    finish: list[int] = field(default_factory=list)  # [rows] Finish
    token_ids: list[int] = field(default_factory=list)  # [tokens]
    logprobs: list[float] = field(default_factory=list)  # [tokens]
    top_count: list[int] = field(default_factory=list)  # [tokens]
    top_ids: list[int] = field(default_factory=list)  # [tops]
    top_logprobs: list[float] = field(default_factory=list)  # [tops]
    prompt_logprobs: list[float] = field(default_factory=list)  # [prompts]
    prompt_top_count: list[int] = field(default_factory=list)  # [prompts]
    prompt_top_ids: list[int] = field(default_factory=list)  # [prompt_tops]
    prompt_top_logprobs: list[float] = field(default_factory=list)  # [prompt_tops]
    seen_sequence: list[int] = field(default_factory=list)  # [seen_images]
    seen_image: list[int] = field(default_factory=list)  # [seen_images] which of the sequence's
    seen_ns: list[int] = field(default_factory=list)  # [seen_images] of the tower; 0: not run


# Columns that say how many items of another column a token, row or prompt position has.
_RARE_COUNTS = (
    ("top_count", "top_ids"),
    ("prompt_count", "prompt_logprobs"),
    ("prompt_top_count", "prompt_top_ids"),
)


def decode_step(frame: Frame) -> StepReport:
    """Return a STEP frame as a report that owns its data.

    Raises CorruptFrame for columns that contradict each other, and for a finish that is none.
    """
    report = StepReport(*frame.words(), *frame.lists())
    rows, tokens = len(report.sequence), len(report.token_ids)
    # `count` takes an eighth of the time of `sum` and `any`, for whole numbers that are all alike.
    if tokens != rows or report.token_count.count(1) != rows:
        check_counts(frame, "token_count", sum(report.token_count), tokens)
    if report.top_ids or report.prompt_logprobs or report.prompt_top_ids:
        for counts, items in _RARE_COUNTS:
            said, there = sum(getattr(report, counts)), len(getattr(report, items))
            check_counts(frame, counts, said, there)
    if report.finish.count(0) != rows and max(report.finish) >= len(Finish):
        raise CorruptFrame(f"STEP: finish {max(report.finish)}; there are 0 to {len(Finish) - 1}")
    return report


@dataclass(frozen=True, slots=True)
class Fault:
    """One sequence that failed alone."""

    sequence: int
    message: str


def encode_faults(acknowledged: int, faults: ListLike[Fault]) -> bytes:
    """Return a FAULT frame."""
    texts = [fault.message.encode("utf-8", "replace") for fault in faults]
    columns: dict[str, NDArray[Any]] = {
        "sequence": np.array([fault.sequence for fault in faults], dtype=np.uint64),
        "message_length": _u4([len(text) for text in texts]),
        "messages": np.frombuffer(b"".join(texts), dtype=np.uint8),
    }
    return encode(FrameKind.FAULT, {"acknowledged": acknowledged}, columns)


def decode_faults(frame: Frame) -> list[Fault]:
    """Return the faults of a FAULT frame. Raises CorruptFrame for columns that contradict."""
    texts = split_column(frame, "messages", "message_length")
    sequences = frame.column("sequence").tolist()
    return [
        Fault(s, t.tobytes().decode("utf-8", "replace"))
        for s, t in zip(sequences, texts, strict=True)
    ]


__all__ = [
    "ExtendRow",
    "Fault",
    "Finish",
    "PrefillRow",
    "SamplingParameters",
    "StateGrant",
    "StepReport",
    "decode_extend",
    "decode_faults",
    "decode_prefill",
    "decode_step",
    "encode_extend",
    "encode_faults",
    "encode_filter",
    "encode_prefill",
]
