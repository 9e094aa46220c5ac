"""Vocabularies of byte sequences by rank, as tiktoken has them, as the content of a tokenizer.json.

Neighbours are merged that are a token together, the lowest rank first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]

# Which bytes GPT-2's alphabet writes as themselves; others are characters from 256 on.
_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_ALPHABET: Final = {
    byte: chr(byte if byte in _PRINTABLE else 256 + byte - sum(p < byte for p in _PRINTABLE))
    for byte in range(256)
}


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in texts as a whole, before they are split."""

    id: int
    text: str
    special: bool  # not part of decoded texts, unless asked for


def write_ranks(
    ids: Mapping[bytes, int], added: Sequence[AddedToken], pattern: str, prefix: Sequence[str]
) -> Json:
    """Return the content of tokenizer.json.

    `ids`: of byte sequences, which rise with their ranks; every byte is among them. `pattern`:
    the regular expression of pieces. `prefix`: tokens of `added` that texts begin with.
    """
    texts = {token: "".join(map(_ALPHABET.__getitem__, token)) for token in ids}
    named = {each.text: each.id for each in added}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    split |= {"pattern": {"Regex": pattern}}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    as_bytes |= {"use_regex": False}
    begin = [{"SpecialToken": {"id": text, "type_id": 0}} for text in prefix]
    return {
        "version": "1.0",
        "added_tokens": [_describe(each) for each in sorted(added, key=lambda each: each.id)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, as_bytes]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*begin, _sequence("A")],
            "pair": [*begin, _sequence("A"), _sequence("B")],
            "special_tokens": {
                text: {"id": text, "ids": [named[text]], "tokens": [text]} for text in prefix
            },
        },
        "decoder": as_bytes,
        "model": {
            "type": "BPE",
            "ignore_merges": True,  # what is a token as a whole is not made of others
            "vocab": named | {texts[token]: number for token, number in ids.items()},
            "merges": _list_merges(ids, texts),
        },
    }


def _describe(token: AddedToken) -> Json:
    return {
        "id": token.id,
        "content": token.text,
        "special": token.special,
        "normalized": False,
    } | (dict.fromkeys(("single_word", "lstrip", "rstrip"), False))


def _sequence(name: str) -> Json:
    return {"Sequence": {"id": name, "type_id": 0}}


def _list_merges(ids: Mapping[bytes, int], texts: Mapping[bytes, str]) -> list[list[str]]:
    """Return pairs that become a token, by the token's rank; of one token, by their own ranks."""
    merges: list[list[str]] = []
    for token in sorted(ids, key=ids.__getitem__):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += ([texts[left], texts[right]] for left, right in pairs)
    return merges
