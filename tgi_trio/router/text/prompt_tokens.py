"""A cache of tokenised pieces of long prompts, since a chat comes again with every turn.

A prompt is cut after special tokens: no token reaches across them, and nothing before them changes
what follows. Pieces that are long enough are remembered. Whether a tokenizer really separates texts
at a special token is tested when the token is first met.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import tokenizers
from numpy.typing import NDArray

IntArray = NDArray[np.int32]

WORTH = 2048  # least characters of a piece that is remembered
MOST_REMEMBERED = 1 << 22  # tokens: 16 MiB
JOINED = 1 << 16  # most characters of short pieces that are joined: a list of ids is made at once
COUNTED = 1 << 16  # most tokens of a piece that are listed where they are only counted now
_PROBES = ("Hello world", " a space first", "\n\nlines", "x", "  ", "#1 (word)", "日本語", "<b>")


class PromptTokens:
    """Tokenises texts piece by piece, without the tokens that a tokenizer adds around them.

    Thread-safe.
    """

    def __init__(self, backend: tokenizers.Tokenizer, most: int = MOST_REMEMBERED) -> None:
        """`most`: tokens that are remembered."""
        self._backend = backend
        self._most = most
        added = [each for each in backend.get_added_tokens_decoder().values() if each.content]
        plain = {each.content: each for each in added if not each.normalized}
        self._plain = frozenset(plain)
        # Whether a text may be cut after the token; None: to be tested when it is first met.
        self._may_cut: dict[str, bool | None] = {
            text: None if each.special and not (each.lstrip or each.rstrip) else False
            for text, each in plain.items()
        }
        self._lengths = sorted({len(text) for text in plain}, reverse=True)
        signs = "".join(sorted({re.escape(text[0]) for text in plain}))
        # Whether a `single_word` token matches depends on the text beside it, so nothing is cut.
        apart = any(each.single_word for each in added)
        self._signs = None if apart or not signs else re.compile(f"[{signs}]")
        self._known: OrderedDict[bytes, IntArray] = OrderedDict()
        self._held = 0  # tokens
        self._lock = threading.Lock()

    def encode(self, text: str, most: float = math.inf) -> tuple[IntArray, int]:
        """Return the ids of `text`, int32 [tokens], and their number. Raises what the library does.

        More than `most` are only counted, and the ids left out: a list of them is made in one call,
        for which all other threads wait.
        """
        pieces = list(self._pieces(text))
        keys = [_digest(piece) if len(piece) >= WORTH else None for piece in pieces]
        found = [self._recall(key) for key in keys]
        missing = [i for i, ids in enumerate(found) if ids is None]
        encodings = (
            self._backend.encode_batch_fast([pieces[i] for i in missing], add_special_tokens=False)
            if missing
            else []
        )
        count = sum(map(len, encodings)) + sum(len(ids) for ids in found if ids is not None)
        for i in reversed(missing):
            encoding = encodings.pop()  # freed one by one, as it takes long
            # Who counts a prompt often sends it next, and then it is known.
            if count <= most or len(encoding) <= COUNTED:
                ids = np.array(encoding.ids, dtype=np.int32)
                found[i] = ids
                self._remember(keys[i], ids)
        if count > most:
            return np.empty(0, dtype=np.int32), count
        return np.concatenate([ids for ids in found if ids is not None]), count

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield the text in pieces; neighbouring short ones are joined."""
        begin = end = 0  # of the short pieces to be joined
        for place in (*self._places(text), len(text)):
            if end > begin and (place - end >= WORTH or place - begin > JOINED):
                yield text[begin:end]
                begin = end
            if place - end >= WORTH:
                yield text[end:place]
                begin = place
            end = place
        if end > begin or not text:
            yield text[begin:]

    def _places(self, text: str) -> Iterator[int]:
        """Yield the positions where a text may be cut."""
        behind = 0  # end of the last token: none begins inside another
        for match in self._signs.finditer(text) if self._signs is not None else ():
            begin = match.start()
            if begin < behind:
                continue
            # The library matches the first token, and the longest one that begins there.
            for length in self._lengths:
                token = text[begin : begin + length]
                if token in self._plain:
                    behind = begin + length
                    if self._is_cut(token):
                        yield behind
                    break

    def _is_cut(self, token: str) -> bool:
        known = self._may_cut[token]
        if known is None:
            known = self._may_cut[token] = _parts(self._backend, token)
        return known

    def _recall(self, key: bytes | None) -> IntArray | None:
        if key is None:
            return None
        with self._lock:
            ids = self._known.get(key)
            if ids is not None:
                self._known.move_to_end(key)
            return ids

    def _remember(self, key: bytes | None, ids: IntArray) -> None:
        if key is None or len(ids) > self._most:
            return
        with self._lock:
            before = self._known.pop(key, None)
            self._held += len(ids) - (0 if before is None else len(before))
            self._known[key] = ids
            while self._held > self._most:
                _, oldest = self._known.popitem(last=False)
                self._held -= len(oldest)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _parts(backend: tokenizers.Tokenizer, token: str) -> bool:
    """Return whether texts before and after a token are tokenised as if each were alone."""

    def ids(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    pairs = itertools.product(_PROBES, _PROBES)
    return all(ids(f"{a}{token}{b}") == ids(f"{a}{token}") + ids(b) for a, b in pairs)
