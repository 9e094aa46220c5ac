"""Tokenizers of which a folder has a SentencePiece file, and code of its own that reads it.

That code is not run: what it adds to the file is known here by the name of its class. All of it
reads each part of a text between special tokens by itself, so that a space is put in front of each.
Sources: that code, and tests against SentencePiece.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.router.text.piece_model import (
    NORMAL,
    UNUSED,
    USER_DEFINED,
    PieceModel,
    read_model,
)
from tgi_trio.router.text.sentence_pieces import mend_conversion

Json = dict[str, Any]

FILE: Final = "tokenizer.model"
_SIGN: Final = "\u2581"
_DECODER: Final[Json] = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": _SIGN}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
_METASPACE: Final[Json] = {"type": "Metaspace", "replacement": _SIGN, "split": False}
_FLAGS: Final = ("single_word", "lstrip", "rstrip")
_ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


@dataclass(frozen=True, slots=True)
class PieceKind:
    """What code of its own adds to a SentencePiece file."""

    named: tuple[tuple[str, str], ...] = ()  # special tokens by their roles, unless others are told
    special: tuple[str, ...] = ()  # texts of the tokens behind the file's
    prefix: tuple[str, ...] = ()  # texts begin with these; none: with BOS
    reads_file: bool = True  # as SentencePiece does, or with its pieces and space in front alone


_LLAMA: Final = (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"))
_FIRST_LLAMA: Final = PieceKind(_LLAMA)  # what Llama's first code did, of which theirs is made
# By the class that tokenizer_config.json names.
KINDS: Final[Mapping[str, PieceKind]] = {
    "InternLMTokenizer": _FIRST_LLAMA,  # InternLM (Shanghai AI Laboratory 2023)
    "InternLM2Tokenizer": _FIRST_LLAMA,  # InternLM 2 and 2.5 (2024)
    "InternLM2TokenizerFast": PieceKind(_LLAMA, reads_file=False),
    "OrionTokenizer": _FIRST_LLAMA,  # Orion 14B (OrionStar 2024)
    "BaichuanTokenizer": _FIRST_LLAMA,  # Baichuan 1 and 2 (2023)
    "PanguTokenizer": _FIRST_LLAMA,  # openPangu Embedded (Huawei 2025)
    "ChatGLMTokenizer": PieceKind(  # ChatGLM 2 and 3 (Zhipu AI 2023)
        special=("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *_ROLES), prefix=("[gMASK]", "sop")
    ),
}


def find_kind(folder: Path, code: str) -> PieceKind | None:
    """Return what is known of a folder's tokenizer, None if nothing is, or its file is not there.

    `code`: the class of its own, as `auto_map` names it.
    """
    kind = KINDS.get(code.rpartition(".")[2])
    return kind if kind is not None and (folder / FILE).is_file() else None


def convert_pieces(
    folder: Path, kind: PieceKind, config: Mapping[str, Any], named: Mapping[str, str]
) -> Json:
    """Return the content of tokenizer.json.

    `config`: of tokenizer_config.json; `named`: the texts of special tokens by their roles. Raises
    ModelLoadError for a file of another form, and for one that cannot be read as its code reads it.
    """
    path = folder / FILE
    model = read_model(path)
    if model is None:
        raise ModelLoadError(f"{path} cannot be read as a file of SentencePiece's")
    if (reason := _find_unread(model)) is not None:
        raise _unread(path, reason)
    told = _read_added(folder, config)
    ids = _number(folder, model, kind, told)
    roles = {**dict(kind.named), **named}
    begin = kind.prefix
    if not begin and config.get("add_bos_token", True):
        begin = (roles["bos_token"],)
    end = (roles["eos_token"],) if config.get("add_eos_token", False) else ()
    if missing := [text for text in (*begin, *end) if text not in ids]:
        raise ModelLoadError(f"{path} has no token {missing[0]!r}, which every text is to have")
    whole = [text for text in roles.values() if text in ids]
    if config.get("encode_special_tokens"):
        whole += kind.special
    added = {ids[text]: _describe(ids[text], text, {"special": True}) for text in whole}
    added |= {number: _describe(number, entry["content"], entry) for number, entry in told.items()}
    content = {
        "version": "1.0",
        "added_tokens": [added[number] for number in sorted(added)],
        "normalizer": None,
        "pre_tokenizer": {**_METASPACE, "prepend_scheme": "always"},
        "post_processor": _frame(ids, begin, end),
        "decoder": _DECODER,
        "model": _write_model(model, ids),
    }
    if not kind.reads_file:
        return content | _write_spaces(model)
    found = mend_conversion(content, path)
    _find_defined(path, found, model, {each["content"] for each in added.values()})
    return found


def _write_spaces(model: PieceModel) -> Json:
    """Return what does nothing with texts but for their spaces, and one in front."""
    adds = model.settings.adds_space
    steps: list[Json] = [{"type": "Prepend", "prepend": _SIGN}] if adds else []
    steps += [{"type": "Replace", "pattern": {"String": " "}, "content": _SIGN}]
    decoders = _DECODER["decoders"] if adds else _DECODER["decoders"][:-1]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {**_DECODER, "decoders": decoders},
    }


def _unread(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{path} is not read here as the code that comes with it reads it: {reason}. Make a "
        "tokenizer.json where that code runs, and copy it into the folder."
    )


def _find_unread(model: PieceModel) -> str | None:
    """Return why a file cannot be read as SentencePiece reads it, None if it can."""
    merged = [piece.score for piece in model.pieces if piece.kind == NORMAL and piece.text[1:]]
    if not model.pairs:
        return "its pieces are not made by merging neighbours (BPE)"
    if not model.plain_spaces:
        return "it does not write spaces in front of words"
    if any(piece.kind == UNUSED for piece in model.pieces):
        return "it has pieces that are not used"
    if len({piece.text for piece in model.pieces}) < len(model.pieces):
        return "it has one piece twice"
    if len(set(merged)) < len(merged):
        return "two of its pieces have the same score"
    return None


def _read_added(folder: Path, config: Mapping[str, Any]) -> dict[int, Json]:
    """Return the tokens that tokenizer_config.json numbers. Raises ModelLoadError."""
    try:
        entries = (config.get("added_tokens_decoder") or {}).items()
        found = {int(number): dict(entry) for number, entry in entries}
        if not all(isinstance(entry["content"], str) for entry in found.values()):
            raise TypeError("a token that is no text")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"the added_tokens_decoder of {folder / 'tokenizer_config.json'} cannot be read: "
            f"{error!r}"
        ) from error
    return found


def _number(
    folder: Path, model: PieceModel, kind: PieceKind, told: Mapping[int, Json]
) -> dict[str, int]:
    """Return the id of every token. Raises ModelLoadError if a text has two, or ids a gap."""
    texts = {i: piece.text for i, piece in enumerate(model.pieces)}
    texts |= dict(enumerate(kind.special, len(model.pieces)))
    texts |= {number: entry["content"] for number, entry in told.items()}
    ids = {text: number for number, text in texts.items()}
    if len(ids) < len(texts) or sorted(texts) != list(range(len(texts))):
        raise ModelLoadError(
            f"the added_tokens_decoder of {folder / 'tokenizer_config.json'} numbers tokens that "
            f"{FILE} numbers otherwise, or leaves numbers out"
        )
    return ids


def _describe(number: int, text: str, entry: Mapping[str, Any]) -> Json:
    flags = {name: bool(entry.get(name, False)) for name in ("special", *_FLAGS)}
    return {"id": number, "content": text, "normalized": False} | flags


def _frame(ids: Mapping[str, int], begin: Sequence[str], end: Sequence[str]) -> Json:
    """Return the step that puts tokens in front of texts, and behind them."""
    before, behind = ([_special(text) for text in texts] for texts in (begin, end))
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*before, first, *behind],
        "pair": [*before, first, *behind, *before, second, *behind],
        "special_tokens": {
            text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in (*begin, *end)
        },
    }


def _special(text: str) -> Json:
    return {"SpecialToken": {"id": text, "type_id": 0}}


def _write_model(model: PieceModel, ids: Mapping[str, int]) -> Json:
    return {
        "type": "BPE",
        "unk_token": model.settings.unknown,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "vocab": dict(ids),
        "merges": _list_merges(model, ids),
    }


def _list_merges(model: PieceModel, ids: Mapping[str, int]) -> list[list[str]]:
    """Return pairs that become a piece, by its score; of one piece, by their own ids."""
    normal = [piece for piece in model.pieces if piece.kind == NORMAL and piece.text in ids]
    texts = {piece.text for piece in normal}
    merges: list[list[str]] = []
    for piece in sorted(normal, key=lambda piece: -piece.score):
        cuts = ((piece.text[:i], piece.text[i:]) for i in range(1, len(piece.text)))
        pairs = [(left, right) for left, right in cuts if left in texts and right in texts]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += ([left, right] for left, right in pairs)
    return merges


def _find_defined(path: Path, content: Json, model: PieceModel, added: Collection[str]) -> None:
    """Have pieces that a user defined found as a whole, the longest first; nothing joins them.

    They are cut off, and what is cut off is a token as a whole where it is one. So what is read
    otherwise, the texts of bytes, must not be cut off alone. Raises ModelLoadError.
    """
    ids = content["model"]["vocab"]
    defined = [piece.text for piece in model.pieces if piece.kind == USER_DEFINED]
    defined = [text for text in defined if text in ids and text not in added]
    if not defined:
        return
    normal = [piece.text for piece in model.pieces if piece.kind == NORMAL and piece.text in ids]
    named = {piece.text for piece in model.pieces if piece.kind not in (NORMAL, USER_DEFINED)}
    others = [text for text in ids.keys() & named if text not in added]
    others += _list_unreached(content, normal)
    begins = {text[:2] for text in normal if text[1:]}
    if any(text[:2] in begins or not text[1:] for text in others):
        raise _unread(path, "it has both pieces that a user defined and such as texts never become")
    for text in defined:
        if _changes(text, model):
            raise _unread(path, f"{text!r}, which a user defined, has characters that are replaced")
    steps = content["pre_tokenizer"]
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    cuts = [_split(sorted(defined, key=len, reverse=True), "{}")]
    for begin in sorted({text[0] for text in others}):
        rests = [text[1:] for text in others if text[0] == begin]
        cuts.append(_split(rests, rf"\A{re.escape(begin)}(?=(?:{{}})\z)"))
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, *cuts]}
    content["model"]["ignore_merges"] = True


def _split(texts: Iterable[str], form: str) -> Json:
    expression = form.format("|".join(map(re.escape, texts)))
    return {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }


def _list_unreached(content: Json, normal: Sequence[str]) -> list[str]:
    """Return pieces that their own text does not become, by merging neighbours."""
    import tokenizers  # few starts come this far, and all of them import this module

    given = content["model"]
    merges = [(left, right) for left, right in given["merges"]]
    model = tokenizers.models.BPE(vocab=given["vocab"], merges=merges)
    return [text for text in normal if len(model.tokenize(text)) != 1]


def _changes(text: str, model: PieceModel) -> bool:
    """Return whether a text may become another before pieces are looked for."""
    import tokenizers  # as in `_list_unreached`

    settings = model.settings
    if settings.removes_spaces and (_SIGN in text or " " in text):
        return True
    if not settings.characters:
        return " " in text
    replaced = tokenizers.normalizers.Precompiled(settings.characters)
    return " " in text or replaced.normalize_str(text) != text
