"""Compiles grammars with llguidance, within limits shared by the shard and the router's check."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tgi_trio.errors import LibraryPanic, ModelLoadError, tell_reason
from tgi_trio.grammars.byte_level import byte_level_tokenizer
from tgi_trio.process.library_panics import raising_panics
from tgi_trio.whole_files import read_file

# Limits on one mask, about 15 ms at llguidance's speed; beyond them only the sequence fails.
# `max_items_in_row` is what objects with several hundred optional properties need.
_LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_items_in_row=8_000,
    max_lexer_states=100_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


def load_tokenizer(path: Path, eos_ids: Iterable[int] = (), vocab_size: int = 0) -> LLTokenizer:
    """Return llguidance's tokenizer for a tokenizer.json; takes a second for a large vocabulary.

    `eos_ids`: ids that end a text (none: those of the file); `vocab_size`: the least number of ids.
    Raises ModelLoadError if the file cannot be used.
    """
    try:
        return _make_tokenizer(read_file(path), list(eos_ids) or None, vocab_size)
    except (OSError, ValueError, LibraryPanic) as error:
        raise ModelLoadError(
            f"{path} cannot be used for grammars: {tell_reason(error, path)}"
        ) from error


@raising_panics
def _make_tokenizer(data: bytes, eos: list[int] | None, vocab_size: int) -> LLTokenizer:
    """Raises ValueError."""
    made = byte_level_tokenizer(data, eos, vocab_size) if eos else None
    if made is not None:
        return made
    text = data.decode()
    try:
        return LLTokenizer(text, n_vocab=vocab_size or None, eos_token=eos)
    except ValueError:  # the file may have more ids than the model
        return LLTokenizer(text, eos_token=eos)


def compile_grammar(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the start of a grammar, with its first mask computed.

    Raises ValueError with llguidance's message, which has the keyword or the position.
    """
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # builds what the masks of all copies share
    raise_error(matcher)
    return matcher


# llguidance's messages that say nothing to a client, by their first words
_OURS: Final = {
    "NoExtensionBias": "no text fits it, maybe because it refers to itself alone",
    "oneOf constraints are not supported.": (
        "`oneOf` with schemas of which several may fit is not supported: use `anyOf`"
    ),
}


def raise_error(matcher: LLMatcher) -> None:
    """Raise ValueError with llguidance's message, or ours, if a matcher has failed."""
    if matcher.is_error():
        told = matcher.get_error().removesuffix("<non-verbose/>").strip()
        raise ValueError(next((_OURS[each] for each in _OURS if told.startswith(each)), told))
