"""Whether a file can be a tokenizer.json, without loading it: that takes up to a second."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tgi_trio.errors import ModelLoadError


class _Model(msgspec.Struct):
    vocab: msgspec.Raw  # looked for, not read
    type: Literal["BPE", "Unigram", "WordLevel", "WordPiece"] | None = None


class _TokenizerFile(msgspec.Struct):
    model: _Model


def check_tokenizer_json(file: Path) -> None:
    """Raise ModelLoadError for a file that is no tokenizer at all: damaged, or something else."""
    try:
        msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
    except (OSError, ValueError) as error:  # ValueError: msgspec's own, and what is no UTF-8
        raise ModelLoadError(
            f"{file} cannot be loaded as a tokenizer: {error}. Copy it again, or name another with "
            "--tokenizer-name."
        ) from error
