"""The calibration text, which shows which inputs matter: from a file, or a default one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.whole_files import read_text_file

# Characters that are tokenised at once: a tokenizer needs a hundred times their memory.
_AT_ONCE = 1 << 16


def read_text(path: Path | None) -> str:
    """Return a file's text; None: Python's own reference, half a million characters of English.

    Raises ConfigurationError for a file that cannot be read as text.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics.values())
    try:
        return read_text_file(path)
    except OSError as error:
        raise ConfigurationError(
            f"--calibration-text {path} cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"--calibration-text {path} cannot be read: it is no UTF-8"
        ) from error


def read_samples(text: str, tokenizer: Path, count: int, length: int) -> list[NDArray[np.int64]]:
    """Return at most `count` pieces of `length` tokens, spread evenly over the text.

    Raises ModelLoadError for a model without a tokenizer, ConfigurationError for too short a text.
    """
    try:
        ids = list(_read_ids(text, Tokenizer.from_file(str(tokenizer))))
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"{tokenizer} cannot be loaded as a tokenizer: {error}") from error
    whole = len(ids) // length
    if not whole:
        raise ConfigurationError(
            f"The calibration text has {len(ids)} tokens, and one sample is {length}: give a "
            "longer one, or less to --sample-tokens."
        )
    flat = np.array(ids[: whole * length], np.int64).reshape(whole, length)
    chosen = np.unique(np.linspace(0, whole - 1, min(count, whole)).astype(int))
    return list(flat[chosen])


def _read_ids(text: str, tokenizer: Tokenizer) -> Iterator[int]:
    for begin in range(0, len(text), _AT_ONCE):
        yield from tokenizer.encode(text[begin : begin + _AT_ONCE], add_special_tokens=False).ids
