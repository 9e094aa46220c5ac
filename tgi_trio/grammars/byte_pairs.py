"""Byte pair encoding of short texts, with a vocabulary and merges in Python.

`tokenizers` would do the same, but loading a tokenizer.json takes it half a second that blocks the
process. Here it only cuts texts into words, which needs no vocabulary. Words are merged by our own
code (Sennrich, Haddow, Birch 2016), and words that have been met are remembered.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Final

import tokenizers
from tokenizers.normalizers import NFC

_REMEMBERED: Final = 1 << 12  # most words
_LONGEST: Final = 64  # most characters of a word that is remembered
_NOTHING: Final = -1


class BytePairEncoder:
    """Encodes texts to token ids as `tokenizers` does without special tokens around them."""

    def __init__(
        self,
        cutter: tokenizers.Tokenizer,
        alphabet: str,
        ids: Mapping[str, int],
        added: Mapping[str, int],
        ranks: Mapping[str, int],
        *,
        whole_words_first: bool,
    ) -> None:
        """`cutter`: a tokenizer whose tokens are the characters of `alphabet`, from id 0.

        Its added tokens are `added`. `ids` and `added`: text -> id. `ranks`: merge (its two parts
        with a space between) -> rank; the least is applied first. `whole_words_first`: a word that
        is a token is not merged.
        """
        self._cutter = cutter
        self._alphabet = alphabet
        self._ids = ids
        self._added = {
            cut: added[token.content] for cut, token in cutter.get_added_tokens_decoder().items()
        }
        self._ranks = ranks
        self._whole_words_first = whole_words_first
        self._starts = {text[0] for text in added if text}
        self._remembered = lru_cache(_REMEMBERED)(self._merge)

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        found: list[int] = []
        for word in self._cut_plainly(text) if self._is_plain(text) else self._cut(text):
            if isinstance(word, int):
                found.append(word)
            else:
                found += (self._remembered if len(word) <= _LONGEST else self._merge)(word)
        return found

    def _is_plain(self, text: str) -> bool:
        """Return whether no normalizer changes a text, and it cannot contain added tokens."""
        plain = self._cutter.normalizer is None or isinstance(self._cutter.normalizer, NFC)
        return plain and text.isascii() and self._starts.isdisjoint(text)

    def _cut_plainly(self, text: str) -> Iterator[str]:
        """Yield the words of a plain text, in the alphabet."""
        for word, _ in self._cutter.pre_tokenizer.pre_tokenize_str(text):
            yield word

    def _cut(self, text: str) -> Iterator[str | int]:
        """Yield the words of a text, in the alphabet, and the ids of added tokens."""
        cut = self._cutter.encode(text, add_special_tokens=False)
        for _, cuts in groupby(zip(cut.word_ids, cut.ids, strict=True), itemgetter(0)):
            parts = [token for _, token in cuts]
            added = self._added.get(parts[0])  # it is alone: texts are cut around added tokens
            if added is not None:
                yield added
            else:
                yield "".join(map(self._alphabet.__getitem__, parts))

    def _merge(self, word: str) -> tuple[int, ...]:
        """Return the ids of one word; the merge of least rank comes first, then the leftmost."""
        if self._whole_words_first and word in self._ids:
            return (self._ids[word],)
        parts = list(word)  # "" for one that has been merged into its left neighbour
        before = list(range(-1, len(parts) - 1))
        behind = [*range(1, len(parts)), _NOTHING]
        waiting: list[tuple[int, int, str]] = []

        def consider(left: int) -> None:
            pair = f"{parts[left]} {parts[behind[left]]}"
            if (rank := self._ranks.get(pair)) is not None:
                heapq.heappush(waiting, (rank, left, pair))

        for left in range(len(parts) - 1):
            consider(left)
        while waiting:
            _, left, pair = heapq.heappop(waiting)
            right = behind[left]
            if not parts[left] or right == _NOTHING or pair != f"{parts[left]} {parts[right]}":
                continue  # one of the two has been merged already
            parts[left] += parts[right]
            parts[right] = ""
            behind[left] = behind[right]
            if behind[left] != _NOTHING:
                before[behind[left]] = left
                consider(left)
            if before[left] != _NOTHING:
                consider(before[left])
        return tuple(self._ids[part] for part in parts if part)
