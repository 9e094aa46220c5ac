"""The token in whose places an image's features stand, in vocabularies that may lack it.

llama.cpp feeds features without ids, and its converter drops tokens behind the tokenizer's own,
as Gemma 3's is. Here features stand in a token's places, and any token will do that no text has.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.gguf.tokenizer import CONTROL, Vocabulary

# Tokens that vocabularies keep for later: Gemma's, Llama 3's, Mistral's.
_KEPT: Final = re.compile(r"<unused\d+>|<\|reserved_special_token_\d+\|>|<SPECIAL_\d+>")


def with_placeholder(vocabulary: Vocabulary, token: str, file: Path) -> Vocabulary:
    """Return a vocabulary that has `token` as a special one: in the place of its last unused one
    if it lacks it.

    Raises ModelLoadError where it has no unused one either.
    """
    tokens, types = list(vocabulary.tokens), list(vocabulary.types)
    wanted = (index for index, text in enumerate(tokens) if text == token)
    unused = (index for index in reversed(range(len(tokens))) if _KEPT.fullmatch(tokens[index]))
    for index in (*wanted, *unused)[:1]:
        tokens[index], types[index] = token, CONTROL
        return replace(vocabulary, tokens=tokens, types=types)
    raise ModelLoadError(
        f"the vocabulary of {file} has no {token!r}, in whose places the features of images stand, "
        "and no unused token: --no-mmproj serves the text alone"
    )
