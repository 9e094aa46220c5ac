"""Masks with one bit per token, made by the host, for grammars, watermarks and n-grams.

All depend on a row's last token, so a mask is made once that is known, while the device computes
the logits. A choice after drafts gets the mask for the case that these are right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.sampling.choosing import extend_by_drafts
from tgi_trio.shard.sampling.logits_processors import (
    GrammarMasks,
    Permutation,
    Watermark,
    watermark_seed,
)
from tgi_trio.shard.sampling.no_repeats import find_repeats
from tgi_trio.shard.torch_backend.sampling.choice_settings import Choosing, fix, repeat

_Number = TypeVar("_Number", np.int32, np.int64)

_NO_TOKENIZER = "this shard was started without a tokenizer"


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of a step's choices."""

    bits: NDArray[np.int32]  # [M, words]: bit i % 32 of word i // 32 belongs to token i
    green: NDArray[np.int32]  # [C]: row of `bits` with the watermark's tokens, -1: none
    allowed: NDArray[np.int32]  # [C]: row of `bits` with the tokens that may follow, -1: all
    faults: dict[int, str]  # reasons, by choice, for which it has no mask


class ChoiceMasks:
    """Makes masks for one model."""

    def __init__(
        self,
        vocab_size: int,
        grammars: GrammarMasks | None,
        watermark: Watermark,
        permutation: Permutation,
    ) -> None:
        """Without `grammars`, rows that have a grammar fail."""
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._grammars = grammars
        self.watermark = watermark
        self._permutation = permutation
        self._none = fix(np.zeros((1, self._words), np.int32))
        self._asked_of: list[ShardSequence] | None = None
        self._asking = np.zeros(0, np.bool_), np.zeros(0, np.bool_)  # marked and guided rows

    def make(self, choosing: Choosing) -> Masks:
        """Return the masks of a step's choices, except for those of rows that are gone.

        Every other row's last token must be known.
        """
        marked, guided = self._find_asking(choosing.rows)
        if gone := list(choosing.gone):
            marked, guided = marked.copy(), guided.copy()
            marked[gone] = guided[gone] = False
        if not choosing.alone:
            marked, guided = marked[choosing.owners], guided[choosing.owners]
        count = len(choosing)
        green = allowed = repeat(-1, count, np.int32)
        tables: list[NDArray[np.int32]] = []
        faults: dict[int, str] = {}
        if len(own := marked.nonzero()[0]):
            green = _put_rising(count, own, 0)
            owners, aheads = choosing.owners[own].tolist(), choosing.aheads[own].tolist()
            pairs = zip(owners, aheads, strict=True)
            tables.append(np.stack([self._green(choosing.rows[i], ahead) for i, ahead in pairs]))
        todo = guided.nonzero()[0]
        if len(todo):
            found = self._follow(choosing, todo, faults)
            places = _join([own for own, _ in found])
            allowed = _put_rising(count, places, sum(map(len, tables)))
            tables += [table for _, table in found]
        bits = _join(tables) if tables else self._none
        return Masks(bits if len(bits) else self._none, green, allowed, faults)

    def _find_asking(
        self, rows: list[ShardSequence]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows have a watermark, and which a grammar or n-grams that may not recur.

        Kept while the rows are.
        """
        if rows is not self._asked_of:
            marked = np.array([row.sampling.watermark for row in rows], np.bool_)
            sampling = [row.sampling for row in rows]
            guided = np.array([bool(s.grammar) or s.no_repeat_size > 0 for s in sampling], np.bool_)
            self._asked_of, self._asking = rows, (marked, guided)
        return self._asking

    def _green(self, row: ShardSequence, ahead: int) -> NDArray[np.int32]:
        last = int(row.token_ids[row.length + ahead - 1])
        size = self._vocab_size
        ids = self._permutation(watermark_seed(last), size, int(self.watermark.gamma * size))
        marked = np.zeros(32 * self._words, np.bool_)
        marked[ids] = True
        return np.packbits(marked, bitorder="little").view(np.int32)

    def _follow(
        self,
        choosing: Choosing,
        todo: NDArray[np.int64],
        faults: dict[int, str],
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int32]]]:
        """Return choices, with a mask for each.

        After a draft that its mask does not allow, no masks follow: it will not be accepted.
        """
        found: list[tuple[NDArray[np.int64], NDArray[np.int32]]] = []
        ahead, going = 0, todo if choosing.alone else todo[choosing.aheads[todo] == 0]
        firsts = going
        while len(going):
            if len(going) == len(choosing.rows) and not ahead:
                some = choosing.rows
            else:
                owners = choosing.owners[going].tolist()
                some = [extend_by_drafts(choosing.rows[owner], ahead) for owner in owners]
            table, wrong = self._ask(some)
            if wrong:
                faults |= {int(going[place]): f"grammar: {why}" for place, why in wrong.items()}
                right = np.delete(np.arange(len(going)), list(wrong))
                going, table = going[right], table[right]
            found.append((going, table))
            if choosing.alone:
                break
            following = [
                c + 1
                for i, c in enumerate(going.tolist())
                if c + 1 < len(choosing)
                and choosing.aheads[c + 1] == ahead + 1
                and _has(table[i], int(choosing.drafts(c + 1)[-1]))
            ]
            going = np.array(following, np.int64)
            ahead += 1
        if ahead > 1 and self._grammars is not None:
            for c in firsts.tolist():
                row = choosing.rows[choosing.owners[c]]
                if row.sampling.grammar:
                    self._grammars.rewind(row)
        return found

    def _ask(self, rows: list[ShardSequence]) -> tuple[NDArray[np.int32], dict[int, str]]:
        """Return masks of rows, int32 [R, words], and faults of grammars by place."""
        guided = [place for place, row in enumerate(rows) if row.sampling.grammar]
        faults: dict[int, str] = {}
        if self._grammars is not None and len(guided) == len(rows):
            masks, faults = self._grammars.allowed(rows)
            table = self._fit(masks)
        else:
            table = np.full((len(rows), self._words), -1, np.int32)
            if guided and self._grammars is None:
                faults = dict.fromkeys(guided, _NO_TOKENIZER)
            elif guided and self._grammars is not None:
                masks, wrong = self._grammars.allowed([rows[place] for place in guided])
                table[guided] = self._fit(masks)
                faults = {guided[place]: why for place, why in wrong.items()}
        for words, row in zip(table.view(np.uint32), rows, strict=True):
            if row.sampling.no_repeat_size:
                barred = find_repeats(row, self._vocab_size).astype(np.uint32)
                np.bitwise_and.at(words, barred // 32, ~(np.uint32(1) << barred % 32))
        return table, faults

    def _fit(self, table: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Fit grammars' masks to the vocabulary's width; ids beyond theirs are not allowed."""
        width = 4 * self._words
        if table.shape[1] < width:
            table = np.pad(table, ((0, 0), (0, width - table.shape[1])))
        return np.ascontiguousarray(table[:, :width]).view(np.int32)


def _has(mask: NDArray[np.int32], token: int) -> bool:
    return bool((int(mask[token // 32]) >> (token % 32)) & 1)


def _put_rising(count: int, places: NDArray[np.int64], first: int) -> NDArray[np.int32]:
    """Return int32 [count]: `first`, `first` + 1 and so on at `places`, -1 elsewhere."""
    found = np.full(count, -1, np.int32)
    found[places] = np.arange(first, first + len(places))
    return found


def _join(parts: list[NDArray[_Number]]) -> NDArray[_Number]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
