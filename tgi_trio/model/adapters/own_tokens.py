"""The tokens that an adapter's own tokenizer adds to those of the model.

Many fine-tunes make a vocabulary larger for a token to pad with, or to a round number. No prompt
and no answer has such a token, so what the adapter has for it is of no use to a server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.whole_files import SMALL, parse_json, read_file, read_text_file

_TOKENIZER: Final = "tokenizer.json"
_SETTINGS: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.jinja"
_OTHERS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")
_LONGEST: Final = 64 << 20  # bytes


def list_own_tokens(
    folder: Path, vocabulary: int, parts: Mapping[str, Any] | None = None
) -> list[str] | None:
    """Return the tokens of an adapter's tokenizer that have ids from `vocabulary` on.

    `parts`: its tokenizer.json, or what is to be looked at of it; None: all. The one to pad with is
    left out, unless it has another use. None: the adapter has no tokenizer. Raises ModelLoadError
    for damaged files.
    """
    whole = _read(folder / _TOKENIZER) if parts is None else parts
    if whole is None:
        return None
    settings = _read(folder / _SETTINGS) or {}
    padding = _text(settings.get("pad_token"))
    used = {_text(settings.get(role)) for role in _OTHERS}
    shown = json.dumps(settings.get("chat_template"), ensure_ascii=False)
    if (folder / _TEMPLATE).is_file():
        shown += read_text_file(folder / _TEMPLATE, SMALL, "replace")
    found = {text for text, number in _list_tokens(whole) if number >= vocabulary}
    return sorted(found if padding in used or padding in shown else found - {padding})


def _list_tokens(whole: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the tokens of a tokenizer with their ids; a list of them is in their order."""
    model = whole.get("model")
    tokens = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(tokens, dict):
        yield from ((text, number) for text, number in tokens.items() if isinstance(number, int))
    elif isinstance(tokens, list):
        for number, entry in enumerate(tokens):
            yield str(entry[0] if isinstance(entry, list) and entry else entry), number
    added = whole.get("added_tokens")
    for each in added if isinstance(added, list) else []:
        if isinstance(each, dict) and isinstance(each.get("id"), int):
            yield _text(each), each["id"]


def _text(token: Any) -> str:
    """Return the text of a token, which files have as it is or in an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _read(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object; None: there is no file. Raises ModelLoadError."""
    try:
        whole = parse_json(read_file(path, _LONGEST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {tell_reason(error, path)}") from error
    if not isinstance(whole, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return whole
