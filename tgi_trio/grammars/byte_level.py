"""Converts tokenizer.json of byte-level BPE (GPT-2, Llama 3, Qwen) for llguidance.

llguidance can read any tokenizer.json itself, with 150,000 tokens in 0.7 s, and holds the GIL
meanwhile. Most of that is for a tokenizer, which it only needs for text that a grammar forces.
Given the tokens as bytes and `BytePairEncoder` for those texts, it takes less than half the time,
and allows the same tokens.

Which tokens are special, and their bytes, follow `toktrie_hf_tokenizers` of llguidance 1.9, except
for added tokens such as `café`: here they stand for themselves, while llguidance reads them in
GPT-2's alphabet, where that `é` is a byte that is not a character.
"""

from __future__ import annotations

import codecs
from itertools import accumulate, pairwise
from typing import Final, Literal

import msgspec
import tokenizers
from llguidance import LLTokenizer, TokenizerWrapper

from tgi_trio.grammars.byte_pairs import BytePairEncoder

_SPECIAL: Final = b"\xff"  # prefix of a token that is not text
# GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100.
_PRINTABLE: Final = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS: Final = [byte for byte in range(256) if byte not in _PRINTABLE]
_ALPHABET: Final = "".join(
    chr(byte if byte in _PRINTABLE else 0x100 + _OTHERS.index(byte)) for byte in range(256)
)
_BYTES: Final = codecs.charmap_build(_ALPHABET)  # character -> byte
# Steps that put a space before a text; llguidance removes it.
_PREPENDING: Final = ('"Prepend"', '"Metaspace"')


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    type: Literal["BPE"]
    vocab: dict[str, int]
    merges: msgspec.Raw
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    ignore_merges: bool = False


class _Steps(msgspec.Struct):
    """A decoder or pre-tokenizer: one step, or a sequence of them."""

    type: str
    decoders: list[_Steps] = []
    pretokenizers: list[_Steps] = []

    def types(self) -> list[str]:
        """Return the type of every step."""
        below = (*self.decoders, *self.pretokenizers)
        return [self.type, *(name for each in below for name in each.types())]


class _File(msgspec.Struct):
    model: _Model
    decoder: _Steps
    pre_tokenizer: msgspec.Raw
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    added_tokens: msgspec.Raw = msgspec.Raw(b"[]")


class _Tokens(TokenizerWrapper):
    """The interface of a tokenizer that llguidance has not read itself."""

    def __init__(self, tokens: list[bytes], eos_id: int, encode: BytePairEncoder) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.special_token_ids = ()  # they are marked in `tokens`
        self.tokens = tokens
        self.eos_token_id = eos_id
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def byte_level_tokenizer(data: bytes, eos_ids: list[int], vocab_size: int) -> LLTokenizer | None:
    """Return llguidance's tokenizer for a tokenizer.json; None if it has to read the file itself.

    `eos_ids`: at least one id that ends a text; `vocab_size`: the least number of ids.
    """
    try:
        file = msgspec.json.decode(data, type=_File)
        added = msgspec.json.decode(file.added_tokens, type=list[_Added])
        steps = msgspec.json.decode(file.pre_tokenizer, type=_Steps).types()
        ranks = _read_ranks(file.model.merges)
    except (ValueError, RecursionError):  # ValueError: msgspec's errors are among these
        return None
    if not _is_plain(file, steps):
        return None
    tokens, cutter = _token_bytes(file.model.vocab, added), _make_cutter(file)
    if tokens is None or cutter is None or max(eos_ids) >= len(tokens):
        return None
    for token_id in range(len(tokens), vocab_size):
        tokens.append(b"%s<[%d]>" % (_SPECIAL, token_id))
    encode = BytePairEncoder(
        cutter,
        _ALPHABET,
        file.model.vocab,
        {each.content: each.id for each in added},
        ranks,
        whole_words_first=file.model.ignore_merges,
    )
    made = LLTokenizer(_Tokens(tokens, eos_ids[0], encode), eos_token=eos_ids)
    return made if made.eos_tokens == eos_ids else None


def _read_ranks(merges: msgspec.Raw) -> dict[str, int]:
    """Return the rank of every merge. Raises ValueError if it is not a list of pairs."""
    try:
        pairs = msgspec.json.decode(merges, type=list[str])
    except msgspec.ValidationError:  # the newer form, in which parts may have spaces
        parts = msgspec.json.decode(merges, type=list[tuple[str, str]])
        pairs = [f"{left} {right}" for left, right in parts]
    return dict(zip(pairs, range(len(pairs)), strict=True))


def _is_plain(file: _File, steps: list[str]) -> bool:
    """Return whether texts become the alphabet's characters, all of them tokens, and are merged."""
    model, decoders = file.model, file.decoder.types()
    return (
        "ByteLevel" in steps
        and "ByteLevel" in decoders
        and "ByteFallback" not in decoders
        and model.vocab.keys() >= set(_ALPHABET)
        and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
        and not any(name in bytes(file.normalizer).decode() for name in _PREPENDING)
        and "Metaspace" not in steps
    )


def _token_bytes(vocab: dict[str, int], added: list[_Added]) -> list[bytes] | None:
    """Return the bytes of every id, from 0 without gaps; None if the ids are not like that."""
    more = [each for each in added if each.content not in vocab]
    if [each.id for each in more] != list(range(len(vocab), len(vocab) + len(more))):
        return None
    if any(vocab.get(each.content, each.id) != each.id for each in added):
        return None
    texts, ids, every = list(vocab), list(vocab.values()), list(range(len(vocab)))
    if ids != every:  # usually they are in order
        texts.sort(key=vocab.__getitem__)
        if [vocab[text] for text in texts] != every:
            return None
    texts += [""] * len(more)
    for each in added:
        texts[each.id] = ""
    try:
        data = codecs.charmap_encode("".join(texts), "strict", _BYTES)[0]
    except UnicodeEncodeError:
        return None
    tokens = [data[begin:end] for begin, end in pairwise(accumulate(map(len, texts), initial=0))]
    for each in added:
        tokens[each.id] = _added_bytes(each, merged=each.content in vocab)
    return tokens


def _added_bytes(token: _Added, *, merged: bool) -> bytes:
    """Return the bytes of an added token: those of its text, after a prefix if it is special.

    `merged`: it is in the vocabulary, so merges of texts can yield it as well.
    """
    text = token.content
    if token.special or (text.startswith("<") and text.endswith(">")):
        return _SPECIAL + text.encode()
    if not merged:
        return text.encode()
    try:
        return codecs.charmap_encode(text, "strict", _BYTES)[0]
    except UnicodeEncodeError:  # not written in the alphabet
        return text.encode()


def _make_cutter(file: _File) -> tokenizers.Tokenizer | None:
    """Return a tokenizer with the file's pre-tokenizer whose tokens are single characters."""
    alphabet = {character: number for number, character in enumerate(_ALPHABET)}
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": file.added_tokens,
        "normalizer": file.normalizer,
        "pre_tokenizer": file.pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": alphabet, "merges": []},
    }
    try:
        return tokenizers.Tokenizer.from_str(msgspec.json.encode(described).decode())
    except Exception:  # the library raises no other; reading the whole file reports the error
        return None
