"""Checks files of tokenizers without loading them, which takes up to a second."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.whole_files import read_file


class _Model(msgspec.Struct):
    vocab: msgspec.Raw  # must be present; not parsed
    type: Literal["BPE", "Unigram", "WordLevel", "WordPiece"] | None = None


class _TokenizerFile(msgspec.Struct):
    model: _Model


def check_tokenizer_json(file: Path) -> None:
    """Raise ModelLoadError for a file that is not a tokenizer: damaged, or something else."""
    try:
        msgspec.json.decode(read_file(file), type=_TokenizerFile)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: msgspec's, and no UTF-8
        raise ModelLoadError(
            f"{file} cannot be loaded as a tokenizer: {tell_reason(error, file)}. Copy it again, "
            "or name another with --tokenizer-name."
        ) from error


def find_difference(one: Path, other: Path) -> str | None:
    """Return where two tokenizers give a token different ids; None if they do not.

    Tokens that only one of them has are no difference, since models of a family differ in their
    spare tokens. Raises ModelLoadError for files that are not tokenizers.
    """
    ours, theirs = _numbers(one), _numbers(other)
    apart = [token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]]
    if apart:
        token = min(apart, key=lambda token: ours[token])
        return f"{token!r} is {ours[token]} for the model, and {theirs[token]} for the other"
    shared = len(ours.keys() & theirs.keys())
    if shared < 0.9 * max(len(ours), len(theirs)):
        return f"of {len(ours)} and {len(theirs)} tokens they share {shared}"
    return None


def _numbers(file: Path) -> dict[str, int]:
    """Return the id of every token of a tokenizer.json."""
    try:
        whole = msgspec.json.decode(read_file(file))
        found = whole["model"]["vocab"]
        if isinstance(found, list):  # Unigram: pieces with their scores, in order
            found = {piece: i for i, (piece, _) in enumerate(found)}
        added = {each["content"]: each["id"] for each in whole.get("added_tokens", ())}
        return {**found, **added}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = tell_reason(error, file)
        raise ModelLoadError(f"{file} cannot be read as a tokenizer: {why}") from error
