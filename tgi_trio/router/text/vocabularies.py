"""Whether two tokenizers have one vocabulary: the section `model` of tokenizer.json.

`python -m tgi_trio.router.text.vocabularies ONE OTHER` prints a `Comparison` as JSON. To parse
large ones takes half a second, for which nothing else of a process runs: so one that serves has
another process do it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.router.text.tokenizer_shape import find_difference
from tgi_trio.whole_files import read_file

# Fields of `model` beside the vocabulary that decide which tokens a text becomes. Libraries write
# "", false or nothing for the same.
_RULES: Final = (
    "type",
    "ignore_merges",
    "byte_fallback",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)
_UNCUT: Final[Mapping[str, Any]] = {"version": "1.0", "truncation": None, "padding": None}


class _Added(msgspec.Struct):
    """What an added token needs to have."""

    id: int
    content: str


def read_apart(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return what a tokenizer.json has beside its `model`, and that as it is written.

    How texts were cut and padded while somebody trained is left out. Raises ModelLoadError for a
    file that is not a tokenizer.
    """
    try:
        parts = msgspec.json.decode(read_file(file), type=dict[str, msgspec.Raw])
        model = bytes(parts.pop("model"))
        whole = {name: msgspec.json.decode(part) for name, part in parts.items()}
        msgspec.convert(whole.get("added_tokens"), list[_Added] | None)
        return {**whole, **_UNCUT}, model
    except (OSError, ValueError, KeyError, RecursionError) as error:
        why = tell_reason(error, file)
        raise ModelLoadError(f"{file} cannot be read as a tokenizer: {why}") from error


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the vocabulary of a tokenizer compares with another."""

    difference: str  # "": texts become the same tokens
    same_ids: bool = True  # what both have has the same ids, and that is most of it


def compare_vocabularies(one: Path, other: Path) -> Comparison:
    """Return how the vocabulary of `other` differs. Raises ModelLoadError.

    Tokens that are only added to it do not count.
    """
    ours, theirs = read_apart(one)[1], read_apart(other)[1]
    if ours == theirs:
        return Comparison("")
    try:
        found = _compare(msgspec.json.decode(ours), msgspec.json.decode(theirs))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{other} cannot be read as a tokenizer: {error!r}") from error
    if not found:
        return Comparison("")
    ids = find_difference(one, other)
    return Comparison(found if ids is None else ids, ids is None)


def _compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    for rule in _RULES:
        if (ours.get(rule) or None) != (theirs.get(rule) or None):
            return f"`{rule}` is {theirs.get(rule)!r}, and {ours.get(rule)!r} for the model"
    if len(ours["vocab"]) != len(theirs["vocab"]):
        return f"it has {len(theirs['vocab'])} tokens, and the model's {len(ours['vocab'])}"
    if not _has_same_tokens(ours["vocab"], theirs["vocab"]):
        return "it has other tokens, or the same with other ids"
    if _list_merges(ours) != _list_merges(theirs):
        return "it has other merges"
    return ""


def _has_same_tokens(ours: Any, theirs: Any) -> bool:
    """Return whether vocabularies are the same: ids by token, or scores in the order of ids.

    A score may be rounded when it is written.
    """
    if isinstance(ours, dict) or isinstance(theirs, dict):
        return bool(ours == theirs)
    return all(
        one == other and math.isclose(score, their, rel_tol=1e-9)
        for (one, score), (other, their) in zip(ours, theirs, strict=True)
    )


def _list_merges(model: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the merges, which are written as pairs, or as texts with a space between."""
    merges = model.get("merges") or ()
    return [tuple(each.split(" ", 1) if isinstance(each, str) else each) for each in merges]


def main(argv: list[str]) -> int:
    """Print the comparison; return the process's exit code."""
    try:
        print(json.dumps(asdict(compare_vocabularies(Path(argv[0]), Path(argv[1])))))
    except ModelLoadError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
