"""The sampler of the CPU backend: the rules of `shard/sampling/base.py` with compiled kernels.

One thread works on a row, in up to three rounds. First it finds the row's maxima, mass and 64 best
candidates. If these do not decide but 512 might, it finds those. If they do not decide either, the
row is truncated in place and then treated as one without truncation. No torch in this file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import Choices, ShardSequence
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import DRAW_UNIFORMS, SHUFFLE, WORK_ON_ROWS
from tgi_trio.shard.cpu_backend.scratch_memory import CHUNK, sampler_bytes
from tgi_trio.shard.cpu_backend.tables import ROW
from tgi_trio.shard.sampling import logits_processors as processors
from tgi_trio.shard.sampling.base import (
    MOST_TIES,
    WIDTHS,
    Choice,
    SamplerBase,
    SamplingSettings,
    alternatives,
    choose_among_best,
    uniforms,
    why_not,
)
from tgi_trio.shard.sampling.gaps import Gaps
from tgi_trio.shard.sampling.logits_processors import Scores
from tgi_trio.shard.sampling.truncation import Floats, Ints

_SHARED_SCORES = 2**19  # from this number of scores on, other threads are woken
# largest padded scores to keep: new pages cost more than copying so few numbers
_KEPT_BYTES = 2**20
_MOST_DRAFTS = 8
_BEST, _DRAWN = 1, 2  # values of ROW.picks
_SHARPEST = np.finfo(np.float32).max  # the largest 1 / temperature


class CpuSampler(SamplerBase):
    """Chooses next tokens with kernels, on a CPU, with the results of `Sampler`."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        cores: list[int] | None = None,
        grammars: processors.GrammarMasks | None = None,
        watermark: processors.Watermark | None = None,
    ) -> None:
        """`cores`: processors to use, the caller's first; None: only the caller's."""
        super().__init__(
            vocab_size, eos_ids, permutation=permutation, grammars=grammars, watermark=watermark
        )
        self._work_on_rows = WORK_ON_ROWS.open()
        self._chunks = -(-vocab_size // CHUNK)
        others = (cores or [0])[1:]
        self._rooms = allocate_zeroed((1 + len(others), sampler_bytes(self._chunks)))
        self._room_addresses = [address(room) for room in self._rooms]
        self._counter = allocate_zeroed((1,), np.int64)
        self._counter_address = address(self._counter)
        self._helpers = None
        if others:  # the affinity of a new thread is that of its creator
            self._helpers = ThreadPoolExecutor(
                len(others), "sampler", lambda: os.sched_setaffinity(0, others)
            )
        self._padded = allocate_zeroed((0, self._chunks * CHUNK), np.float32)
        # The first round for recent settings; with drafts, a few alternate.
        self._drafts: deque[tuple[SamplingSettings, NDArray[np.void]]] = deque(maxlen=_MOST_DRAFTS)
        self._reserve(1, max(WIDTHS))

    def choose(self, logits: Scores, rows: list[ShardSequence]) -> Choices:
        """Choose the next token of every row.

        `logits`: float32 [R, >= vocab_size] in host memory, for the last known token of each row;
        may be overwritten. Faults as for `Sampler.choose`.
        """
        if not rows:
            return Choices.none(0)
        (settings,) = self._settings(rows, len(rows))
        scores = self._pad_vocabulary(logits)
        faults = self._process(scores, settings)
        allowed = self._masks(settings, self._chunks * CHUNK, faults)
        numbers, choice = uniforms(settings, _draw), Choice.of(len(rows))
        table = self._table(scores, settings, numbers)
        if allowed is not None:
            guided = [row for row, _ in settings.grammar]
            table["allowed"][guided] = address(allowed) + np.arange(len(guided)) * len(allowed[0])
        self._work(table)
        for row in np.flatnonzero(~np.isfinite(table["best"])).tolist():
            faults.setdefault(row, why_not(float(table["best"][row]), rows[row]))
        gaps = self._gaps(settings, faults)
        wide = self._choose_cut(table, settings, numbers, choice, gaps)
        self._truncate(table, wide, settings)
        self._take(table, np.concatenate([settings.open, wide]), settings, choice)
        return choice.choices(faults)

    def drop(self, sequence: ShardSequence) -> None:
        super().drop(sequence)
        self._drafts.clear()

    def _pad_vocabulary(self, logits: Scores) -> NDArray[np.float32]:
        """Return scores [R, whole chunks], -inf beyond the vocabulary; a view if they fit.

        Otherwise they are in memory that the next call overwrites, unless they are large.
        """
        scores: NDArray[np.float32] = np.asarray(logits)[:, : self._vocab_size]
        width = self._chunks * CHUNK
        if width == self._vocab_size and scores.dtype == np.float32 and scores.strides[1] == 4:
            return scores
        padded = self._padded[: len(scores)]
        if len(padded) < len(scores):
            padded = allocate_zeroed((len(scores), width), np.float32)
            if padded.nbytes <= _KEPT_BYTES:
                self._padded = padded
        padded[:, : self._vocab_size] = scores
        padded[:, self._vocab_size :] = -np.inf
        return padded

    def _reserve(self, rows: int, width: int) -> None:
        """Allocate for statistics of so many rows, and so many candidates of each."""
        self._maxima = allocate_zeroed((rows, self._chunks), np.float32)
        self._masses = allocate_zeroed((rows, self._chunks), np.float32)
        self._keys = allocate_zeroed((rows, width), np.int64)
        self._drafts.clear()  # their addresses are out of date

    def _table(
        self, scores: NDArray[np.float32], settings: SamplingSettings, numbers: Floats
    ) -> NDArray[np.void]:
        """Return the first round of all rows: ROW [R]."""
        draft = next((draft for known, draft in self._drafts if known is settings), None)
        if draft is None:
            draft = self._to_rows(settings)
            self._drafts.append((settings, draft))
        table = draft.copy()
        table["scores"] = address(scores) + np.arange(len(scores)) * scores.strides[0]
        table["uniform"] = numbers
        return table

    def _to_rows(self, settings: SamplingSettings) -> NDArray[np.void]:
        """Return the part of the first round that depends only on the rows' settings: ROW [R]."""
        count, listed = len(settings.rows), _count_listed(settings)
        have = self._keys.shape
        if count > have[0] or listed > have[1]:
            self._reserve(max(count, have[0]), max(listed, have[1]))
        table = np.zeros(count, ROW)
        places = np.arange(count)
        for name, array in (
            ("maxima", self._maxima),
            ("masses", self._masses),
            ("keys", self._keys),
        ):
            table[name] = address(array) + places * array.strides[0]
        table["chunks"] = self._chunks
        table["finds_best"], table["mass"] = 1, 1.0
        table["sharpness"] = 1.0
        if settings.temperature is not None:  # finite, since 0 times it must be 0
            table["sharpness"] = np.minimum(1 / settings.temperature[:, 0], _SHARPEST)
        table["floor"] = -np.inf
        floored, floors = settings.floors
        table["floor"][floored] = floors
        table["picks"] = np.where(settings.sample, _DRAWN, _BEST)
        table["weighs"] = 1
        table["width"] = np.where(settings.top_n > 0, listed, 0)
        cut, cuts = settings.cut, settings.cuts
        table["picks"][cut] = 0
        table["width"][cut] = WIDTHS[0]
        entropy = (cuts.typical_p < 1) & (cuts.top_p >= 1)
        table["weighs"][cut] = np.where(cuts.top_k > 0, 0, np.where(entropy, 2, 1))
        return table

    def _choose_cut(
        self,
        table: NDArray[np.void],
        settings: SamplingSettings,
        numbers: Floats,
        choice: Choice,
        gaps: Gaps | None,
    ) -> Ints:
        """Choose for rows with truncation; return those that their candidates do not decide."""
        if len(settings.cut) == 0:
            return settings.cut

        def find(places: Ints, width: int) -> tuple[Floats, Ints]:
            rows = settings.cut[places]
            if width > WIDTHS[0]:  # the first candidates have been found
                wider = _only(table[rows], width=width)
                self._work(wider)
            return self._candidates(rows, width)

        own = table[settings.cut]
        todo = choose_among_best(find, own["mass"], own["entropy"], settings, numbers, choice, gaps)
        return settings.cut[todo]

    def _truncate(self, table: NDArray[np.void], rows: Ints, settings: SamplingSettings) -> None:
        """Truncate rows in place, then choose from what remains."""
        if len(rows) == 0:
            return
        cuts = settings.cuts[np.searchsorted(settings.cut, rows)]
        with np.errstate(divide="ignore"):
            floors = np.log(cuts.min_p)
        wide = _only(
            table[rows],
            truncates=1,
            top_k=cuts.top_k,
            top_p=cuts.top_p,
            typical_p=cuts.typical_p,
            finds_best=1,  # of what remains, as min-p needs
            floor=floors,
            weighs=1,
            picks=np.where(settings.sample[rows], _DRAWN, _BEST),
            width=np.where(settings.top_n[rows] > 0, _count_listed(settings), 0),
        )
        self._work(wide)
        table[rows] = wide

    def _take(
        self, table: NDArray[np.void], rows: Ints, settings: SamplingSettings, choice: Choice
    ) -> None:
        """Store what the kernels have chosen from whole rows."""
        log_masses = np.log(table["mass"])
        choice.token_ids[rows] = table["token"][rows]
        choice.logprobs[rows] = table["score"][rows] - log_masses[rows]
        listed = rows[settings.top_n[rows] > 0]
        if len(listed):
            best, ids = self._candidates(listed, _count_listed(settings))
            logprobs, keep = best - log_masses[listed][:, None], np.isfinite(best)
            for i, row in enumerate(listed.tolist()):
                count = int(settings.top_n[row])
                choice.tops[row] = alternatives(ids[i], logprobs[i], keep[i], count)

    def _candidates(self, rows: Ints, width: int) -> tuple[Floats, Ints]:
        """Return scores and ids [rows, width] of the candidates that the kernels listed."""
        keys = self._keys[rows, :width]
        costs = (keys >> 32).astype(np.uint32).view(np.float32)
        return -costs.astype(np.float64), keys & 0xFFFFFFFF

    def _work(self, table: NDArray[np.void]) -> None:
        """Process all rows of the table."""
        self._counter[0] = 0
        rows, counter, rooms = address(table), self._counter_address, self._room_addresses
        shared = len(table) > 1 and len(table) * self._vocab_size >= _SHARED_SCORES
        helping: list[Any] = []
        if self._helpers is not None and shared:
            helping = [
                self._helpers.submit(self._work_on_rows, rows, len(table), counter, room)
                for room in rooms[1:]
            ]
        self._work_on_rows(rows, len(table), counter, rooms[0])
        for helper in helping:
            helper.result()


def _draw(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> Floats:
    numbers = np.empty(len(seeds))
    given = np.ascontiguousarray(seeds), np.ascontiguousarray(positions)
    DRAW_UNIFORMS.open()(*map(address, (*given, numbers)), len(numbers))
    return numbers


def _count_listed(settings: SamplingSettings) -> int:
    """Return how many candidates are listed for rows with alternatives."""
    return max(MOST_TIES, int(settings.top_n.max()))


def _only(table: NDArray[np.void], **fields: Any) -> NDArray[np.void]:
    """Return the table with only the given fields to be done."""
    for name in ("allowed", "truncates", "finds_best", "weighs", "picks", "width"):
        table[name] = 0
    for name, value in fields.items():
        table[name] = value
    return table


def permutation(seed: int, size: int, count: int) -> Ints:
    """Return a `logits_processors.Permutation`; torch's generator is numpy's old one."""
    draws = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 2**32, count, np.uint32)
    ids = np.arange(size)
    own = draws[: size - 1].astype(np.int64)  # the last one has no choice
    SHUFFLE.open()(address(ids), size, address(own), len(own))
    return ids[:count]
