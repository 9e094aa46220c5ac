"""Logits processors before temperature: watermark, penalties, biases, masks.

Each edits `scores` [R, W] (float32, torch's or numpy's) in place, and only the entries concerned,
so it costs nothing for rows without it. A row's state is kept in `sequence.state["sampler"]` and
updated from the sequence's tokens, so a replayed sequence gets the same results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import ShardSequence

if TYPE_CHECKING:  # torch is imported only where tensors come from
    import torch

Scores: TypeAlias = Union["torch.Tensor", NDArray[np.float32]]

STATE = "sampler"  # key in Sequence.state
_WATERMARK_PRIME = 15485863  # TGI's; a detector must use the same

# (seed, size, count) -> the first `count` of the ids below `size`, in the order of torch.randperm
# with a CPU generator of that seed, as detectors of watermarks use it.
Permutation: TypeAlias = Callable[[int, int, int], NDArray[np.int64]]

Counts = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Watermark:
    """Kirchenbauer et al., "A Watermark for Large Language Models", 2023, the soft kind.

    The defaults are TGI's. A detector must know both, and the tokenizer.
    """

    gamma: float = 0.5  # share of the vocabulary in the green list, rounded down
    delta: float = 2.0  # added to the logits of the green list


class GrammarMasks(Protocol):
    """The part of `guides.Grammars` that sampling needs."""

    def start(self) -> None:
        """Begin what the first grammar would otherwise wait for."""
        ...

    def prepare(self, sequence: ShardSequence) -> bool: ...

    def drop(self, sequence: ShardSequence) -> None: ...

    def allowed(self, sequences: list[ShardSequence]) -> tuple[NDArray[np.uint8], dict[int, str]]:
        """Return masks uint8 [S, bytes], a bit per token, 1 if allowed, and faults by place."""
        ...

    def pieces(self, ids: NDArray[np.int64]) -> list[bytes]:
        """Return the bytes of each token's text, b"" for a special one.

        Waits for the tokenizer, and raises ValueError without one.
        """
        ...

    def rewind(self, sequence: ShardSequence) -> None:
        """Forget the tokens beyond the sequence's that `allowed` has read: they were drafts.

        Must be called before the sequence gets other tokens in their place.
        """
        ...


class TokenCounts:
    """How often each token occurs in `token_ids[start:]`, updated as the sequence grows."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._seen = start  # the sequence's tokens that are counted, or before `start`
        self._ids = np.empty(16, np.int64)  # distinct ids; the first len(_place) are real
        self._counts = np.empty(16, np.int64)
        self._place: dict[int, int] = {}

    def update(self, sequence: ShardSequence) -> Counts:
        """Return the distinct ids and their counts: int64 [U] each, valid until the next call."""
        if self._seen > sequence.length:  # a step with drafts is repeated
            self._seen, self._place = self._start, {}
        if self._seen < sequence.length:
            new = sequence.token_ids[self._seen : sequence.length]
            self._seen = sequence.length
            for token, count in zip(*np.unique(new, return_counts=True), strict=True):
                self._count(int(token), int(count))
        used = len(self._place)
        return self._ids[:used], self._counts[:used]

    def _count(self, token: int, count: int) -> None:
        used = len(self._place)
        place = self._place.setdefault(token, used)
        if place < used:
            self._counts[place] += count
            return
        if used == len(self._ids):
            self._ids = np.concatenate((self._ids, self._ids))
            self._counts = np.concatenate((self._counts, self._counts))
        self._ids[used], self._counts[used] = token, count


@dataclass
class RowState:
    """The processors' state of one sequence."""

    all: TokenCounts  # prompt and generated
    generated: TokenCounts
    bias: dict[int, float]

    @classmethod
    def of(cls, sequence: ShardSequence) -> RowState:
        """Return the sequence's state, created on first use."""
        state = sequence.state.get(STATE)
        if not isinstance(state, RowState):
            bias: dict[int, float] = {}
            for token, value in sequence.sampling.logit_bias:
                bias[token] = bias.get(token, 0.0) + value
            state = cls(TokenCounts(0), TokenCounts(sequence.prompt_length), bias)
            sequence.state[STATE] = state
        return state


def like_scores(scores: Scores, array: NDArray[Any]) -> Any:
    """Return `array` so that it can be used with `scores`: unchanged, or on their device."""
    if isinstance(scores, np.ndarray):
        return array
    import torch

    return torch.from_numpy(array).to(scores.device)


class Entries:
    """Single entries of the score matrix, gathered for several rows at once."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._ids: list[NDArray[np.int64]] = []
        self._values: list[tuple[NDArray[Any] | float, ...]] = []

    def add(self, row: int, ids: NDArray[np.int64], *values: NDArray[Any] | float) -> None:
        """Add distinct `ids` of one row; each value is a single number, or one per id."""
        self._rows.append(row)
        self._ids.append(ids)
        self._values.append(values)

    def edit(self, scores: Scores, change: Callable[..., Any]) -> None:
        """Replace the entries by `change(entries, *values)`, all float32 [N]."""
        if not self._rows:
            return
        lengths = [len(ids) for ids in self._ids]
        rows = like_scores(scores, np.repeat(self._rows, lengths))
        ids = like_scores(scores, np.concatenate(self._ids))
        columns = []
        for column in zip(*self._values, strict=True):
            parts = [np.broadcast_to(v, n) for v, n in zip(column, lengths, strict=True)]
            flat = np.concatenate(parts).astype(np.float32)
            columns.append(like_scores(scores, flat))
        scores[rows, ids] = change(scores[rows, ids], *columns)


def watermark(
    scores: Scores,
    rows: Iterable[tuple[int, ShardSequence]],
    chosen: Watermark,
    size: int,
    permutation: Permutation,
) -> None:
    """Add `delta` to the green list, which each new token seeds anew."""
    for row, sequence in rows:
        seed = watermark_seed(int(sequence.token_ids[sequence.length - 1]))
        green = permutation(seed, size, int(chosen.gamma * size))
        scores[row, like_scores(scores, green)] += chosen.delta


def watermark_seed(last: int) -> int:
    """Return the seed of the green list that follows a token."""
    return _WATERMARK_PRIME * last


def repetition(scores: Scores, rows: Iterable[tuple[int, ShardSequence]]) -> None:
    """Divide (multiply, if negative) the scores of all tokens that occur, prompt included."""
    entries = Entries()
    for row, sequence in rows:
        ids, _ = RowState.of(sequence).all.update(sequence)
        entries.add(row, ids, sequence.sampling.repetition_penalty)
    entries.edit(scores, lambda old, p: old.clip(max=0) * p + old.clip(min=0) / p)


def frequency_and_presence(scores: Scores, rows: Iterable[tuple[int, ShardSequence]]) -> None:
    """Subtract the frequency penalty times the count, and the presence penalty once.

    OpenAI's formula (`absolute_penalties`) counts generated tokens; TGI's takes the token's share
    of prompt and generated text together. TGI pads that text to the longest in the batch, so its
    penalty depends on the other requests; here it is the sequence's own length.
    """
    entries = Entries()
    for row, sequence in rows:
        state, sampling = RowState.of(sequence), sequence.sampling
        if sampling.absolute_penalties:
            ids, counts = state.generated.update(sequence)
            share = counts.astype(np.float64)
        else:
            ids, counts = state.all.update(sequence)
            share = counts / sequence.length
        if len(ids):
            penalty = sampling.frequency_penalty * share + sampling.presence_penalty
            entries.add(row, ids, penalty)
    entries.edit(scores, operator.sub)


def logit_bias(
    scores: Scores, rows: Iterable[tuple[int, ShardSequence]], size: int
) -> dict[int, str]:
    """Add each row's biases; return the rows whose biased ids do not exist."""
    entries, faults = Entries(), {}
    for row, sequence in rows:
        bias = RowState.of(sequence).bias
        ids = np.fromiter(bias, np.int64, len(bias))
        if ids.min() < 0 or ids.max() >= size:
            faults[row] = f"logit_bias names token {ids.max()}; the model has 0 to {size - 1}"
        else:
            entries.add(row, ids, np.fromiter(bias.values(), np.float32, len(bias)))
    entries.edit(scores, operator.add)
    return faults


def forbid(scores: Scores, rows: list[int], ids: NDArray[np.int64]) -> None:
    """Set the scores of tokens `ids` in `rows` to -inf."""
    at = like_scores(scores, np.array(rows))[:, None]
    scores[at, like_scores(scores, ids)] = -np.inf


def masks(
    rows: list[tuple[int, ShardSequence]], grammars: GrammarMasks | None, size: int
) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """Return which of `size` tokens each row's grammar allows, and faults of rows without masks.

    uint8 [len(rows), bytes]: a bit per token, lowest first, 1 if it may follow.
    """
    needed = -(-size // 8)
    if grammars is None:
        fault = "grammar: this shard was started without a tokenizer"
        return np.zeros((len(rows), needed), np.uint8), {row: fault for row, _ in rows}
    allowed, faults = grammars.allowed([sequence for _, sequence in rows])
    if allowed.shape[1] < needed:  # ids beyond the tokenizer's cannot follow
        allowed = np.pad(allowed, ((0, 0), (0, needed - allowed.shape[1])))
    return allowed, {rows[place][0]: f"grammar: {why}" for place, why in faults.items()}


def apply_masks(
    scores: Scores, rows: list[tuple[int, ShardSequence]], allowed: NDArray[np.uint8], size: int
) -> None:
    """Set all but the allowed ones of the first `size` tokens to -inf; see `masks`."""
    if isinstance(scores, np.ndarray) or scores.device.type == "cpu":
        table = np.asarray(scores)  # the same memory; torch wakes its threads for every row
        forbidden = np.unpackbits(~allowed, axis=1, count=size, bitorder="little").view(np.bool_)
        for (row, _), mask in zip(rows, forbidden, strict=True):
            np.copyto(table[row, :size], -np.inf, where=mask)
    else:
        at = like_scores(scores, np.array([row for row, _ in rows]))
        places = like_scores(scores, np.arange(8, dtype=np.uint8))
        bits = (like_scores(scores, allowed)[:, :, None] >> places) & 1
        forbidden = bits.flatten(1)[:, :size] == 0
        scores[at, :size] = scores[at, :size].masked_fill(forbidden, -np.inf)
