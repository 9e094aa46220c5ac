"""Spaces in front of punctuation, which some tokenizers take out of what they have decoded.

It is `clean_up_tokenization_spaces` of tokenizer_config.json, for which transformers 4 wrote true
unless it was told otherwise, for T5, say. As in transformers 5
(`PreTrainedTokenizerBase.clean_up_tokenization`), tokenizers of byte pairs do not, unless
`clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output` says so.
"""

from __future__ import annotations

import re
from typing import Final

from tgi_trio.router.text.detokenizer import Detokenizer

# What is replaced, in this order.
_REPLACED: Final = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")),
    *((" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
# The end of a text that may become a part of what is replaced. All of that begins with a space, and
# what a quotation mark between two spaces becomes depends on what follows the second.
_OPEN: Final = re.compile(r"(?: ')*(?: (?:n'?|'[vr]?)?)?\Z")


def clean_up(text: str) -> str:
    """Return a decoded text without such spaces."""
    for written, kept in _REPLACED:
        text = text.replace(written, kept)
    return text


class CleaningDetokenizer:
    """Another one's text, cleaned up; a few characters more are held back for it."""

    __slots__ = ("_held", "_inner")

    def __init__(self, inner: Detokenizer) -> None:
        self._inner = inner
        self._held = ""

    def push(self, token_id: int) -> str:
        text = self._held + self._inner.push(token_id)
        found = _OPEN.search(text)
        end = len(text) if found is None else found.start()
        self._held = text[end:]
        return clean_up(text[:end])

    def flush(self) -> str:
        text, self._held = self._held + self._inner.flush(), ""
        return clean_up(text)
