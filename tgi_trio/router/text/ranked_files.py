"""Tokenizers of which a folder has a file of tiktoken's, and code of its own that reads it.

That code is not run: what it adds to the file, a pattern and special tokens, is known here by the
name of its class. Sources: that code, and a test against tiktoken.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.router.text.byte_ranks import AddedToken, Json, write_ranks
from tgi_trio.whole_files import read_file

_ENDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True, slots=True)
class RankedKind:
    """What code of its own adds to a file of byte sequences and their ranks."""

    file: str
    pattern: str  # of pieces
    special: tuple[str, ...] = ()  # texts of the tokens behind the file's
    reserved: int = 0  # number of those, if they are named by their ids
    prefix: tuple[str, ...] = ()  # texts begin with these


# By the class that tokenizer_config.json names.
KINDS: Final[Mapping[str, RankedKind]] = {
    # Kimi K2, Kimi Linear and Moonlight (Moonshot AI 2025)
    "TikTokenTokenizer": RankedKind(
        "tiktoken.model",
        rf"[\p{{Han}}]+|{_BEFORE}{_CAPITALS}*{_SMALL}+{_ENDS}?|{_BEFORE}{_CAPITALS}+{_SMALL}*"
        rf"{_ENDS}?|\p{{N}}{{1,3}}|{_REST}",
        reserved=256,
    ),
    # GLM-4 9B and CodeGeeX 4 (Zhipu AI 2024)
    "ChatGLM4Tokenizer": RankedKind(
        "tokenizer.model",
        rf"{_ENDS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
        special=(
            *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>"),
            *("<|user|>", "<|assistant|>", "<|observation|>", "<|begin_of_image|>"),
            *("<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        ),
        prefix=("[gMASK]", "<sop>"),
    ),
}


def find_kind(folder: Path, code: str) -> RankedKind | None:
    """Return what is known of a folder's tokenizer, None if nothing is, or its file is not there.

    `code`: the class of its own, as `auto_map` names it.
    """
    kind = KINDS.get(code.rpartition(".")[2])
    return kind if kind is not None and (folder / kind.file).is_file() else None


def convert_ranked(folder: Path, kind: RankedKind, config: Mapping[str, Any]) -> Json:
    """Return the content of tokenizer.json. `config`: of tokenizer_config.json.

    Raises ModelLoadError for a file of another form.
    """
    path = folder / kind.file
    try:
        lines = (line.split() for line in read_file(path).splitlines() if line.strip())
        ids = {b64decode(token, validate=True): int(rank) for token, rank in lines}
        named = {int(key): entry for key, entry in config.get("added_tokens_decoder", {}).items()}
        added = {number: _read(number, entry) for number, entry in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{path} or tokenizer_config.json cannot be read as a tokenizer of tiktoken's: "
            f"{tell_reason(error, path)}"
        ) from error
    count = len(ids)
    if sorted(ids.values()) != list(range(count)) or any(bytes([i]) not in ids for i in range(256)):
        raise ModelLoadError(
            f"{path} is no vocabulary of tiktoken's: its {count} tokens are not ranked from 0 on, "
            "or lack a byte"
        )
    texts = kind.special or [f"<|reserved_token_{count + i}|>" for i in range(kind.reserved)]
    for number, text in enumerate(texts, count):
        added.setdefault(number, AddedToken(number, text, special=True))
    known = {token.text for token in added.values()}
    if min(added) < count or len(known) < len(added) or not known.issuperset(kind.prefix):
        raise ModelLoadError(
            f"the added_tokens_decoder of {folder / 'tokenizer_config.json'} names tokens of "
            f"{kind.file}, one text twice, or not those that every text begins with"
        )
    return write_ranks(ids, list(added.values()), kind.pattern, kind.prefix)


def _read(number: int, entry: Mapping[str, Any]) -> AddedToken:
    text = entry["content"]
    if not isinstance(text, str):
        raise TypeError(f"token {number} is {text!r}, which is no text")
    return AddedToken(number, text, bool(entry.get("special", False)))
