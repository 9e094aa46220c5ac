"""Tokenizers with code of their own whose work is known here, so that it is not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tgi_trio.router.text import piece_files, ranked_files

Json = dict[str, Any]
NamedTokens = Callable[[], Mapping[str, str]]  # reads the texts of special tokens by their roles


@dataclass(frozen=True, slots=True)
class KnownCode:
    """The file that a tokenizer's code reads, and what makes a tokenizer.json of it."""

    file: Path
    # From tokenizer_config.json and NamedTokens to the content; raises ModelLoadError.
    convert: Callable[[Mapping[str, Any], NamedTokens], Json]


def find_known(folder: Path, code: str) -> KnownCode | None:
    """Return what is known of a folder's tokenizer, None if nothing is, or its file is not there.

    `code`: the class of its own, as `auto_map` names it.
    """
    if (ranked := ranked_files.find_kind(folder, code)) is not None:
        by_rank = partial(ranked_files.convert_ranked, folder, ranked)
        return KnownCode(folder / ranked.file, lambda config, _named: by_rank(config))
    if (pieces := piece_files.find_kind(folder, code)) is not None:
        by_piece = partial(piece_files.convert_pieces, folder, pieces)
        return KnownCode(folder / piece_files.FILE, lambda config, named: by_piece(config, named()))
    return None
