"""Has a converted SentencePiece tokenizer read texts as SentencePiece does.

`transformers` 5 converts Llama's tokenizers without a look at what their files say of texts:
whether a space is put in front, whether spaces are removed, which characters become others.

Nor is a space in front what SentencePiece means by it. It puts one before every text. A `Metaspace`
puts none in front of a text that begins with one, so `a` and ` a` are the same tokens. Two of them
in a row do what is meant: spaces are written as `▁` before, so the first one finds no text that
begins with its own sign, a space, and puts one in front; the second one writes that as `▁` as well.
Where spaces are removed, a single one stays at the beginning, in place of that in front.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tgi_trio.router.text.piece_model import read_settings

Json = dict[str, Any]

_SIGN: Final = "\u2581"


def mend_conversion(content: Mapping[str, Any], model: Path) -> Json:
    """Return a tokenizer.json that reads texts as the SentencePiece file says.

    It is returned as it is where the file is none, and where spaces are not a `Metaspace`'s that
    puts one in front. Conversions with a normalizer of their own, as those of T5, follow the file
    but for the space in front.
    """
    found = dict(content)
    first = _only(content.get("pre_tokenizer"), "pretokenizers")
    if not (first.get("type") == "Metaspace" and first.get("replacement") == _SIGN):
        return found
    settings = read_settings(model)
    if first.get("prepend_scheme") not in ("first", "always") or settings is None:
        return found
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SIGN}
    own: Any = content.get("normalizer")
    follows = bool(own) and _only(own, "normalizers") != spaces
    if follows and (settings.removes_spaces or not settings.adds_space):
        return found
    steps: list[Json] = [own] if follows else []
    if settings.characters and not follows:
        table = b64encode(settings.characters).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if settings.removes_spaces:
        steps += [_replace(" {2,}", " "), _replace(rf"[ {_SIGN}]+\z", "")]
    if settings.adds_space:
        # A single one at the beginning takes the place of that in front.
        steps += [] if settings.removes_spaces else [spaces]
        twice = [{**first, "replacement": " "}, {**first, "prepend_scheme": "never"}]
        found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": twice}
    else:
        steps += [_replace(r"\A +", "")] if settings.removes_spaces else []
        found["pre_tokenizer"] = {**first, "prepend_scheme": "never"}
        found["decoder"] = _without_strip(content.get("decoder"))
    found["normalizer"] = {"type": "Sequence", "normalizers": steps} if steps else None
    given = content.get("model") or {}
    if given.get("unk_token") is None and settings.unknown in given.get("vocab", ()):
        # Without one, characters that it does not know would be no tokens at all.
        found["model"] = {**given, "unk_token": settings.unknown}
    return found


def _replace(expression: str, text: str) -> Json:
    return {"type": "Replace", "pattern": {"Regex": expression}, "content": text}


def _without_strip(decoder: Any) -> Any:
    """Return a decoder that leaves the first space of a text."""
    if not isinstance(decoder, Mapping) or decoder.get("type") != "Sequence":
        return decoder
    kept = [each for each in decoder["decoders"] if each.get("type") != "Strip"]
    return {**decoder, "decoders": kept}


def _only(step: Any, name: str) -> Mapping[str, Any]:
    """Return a step of a tokenizer.json, or the one in a sequence of one."""
    while isinstance(step, Mapping) and step.get("type") == "Sequence" and len(step[name]) == 1:
        step = step[name][0]
    return step if isinstance(step, Mapping) else {}
