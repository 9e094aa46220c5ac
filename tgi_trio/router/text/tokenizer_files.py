"""Reads the files of a model folder that describe its tokenizer, besides tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.model.config import read_values
from tgi_trio.router.text.added_tokens import (
    NAMED_TOKENS,
    AddedTokenSpec,
    expect_text,
    list_added_tokens,
    name_own_tokens,
    text_of,
)
from tgi_trio.router.text.default_templates import write_templates
from tgi_trio.router.text.known_code import find_known
from tgi_trio.router.text.sentence_pieces import mend_conversion
from tgi_trio.router.text.tekken import (
    convert_tekken,
    name_special_tokens,
    read_tekken,
)
from tgi_trio.whole_files import SMALL, parse_json, read_file, read_text_file

log = logging.getLogger(__name__)


_CLEANS_UP = "clean_up_tokenization_spaces"
_CORRUPTS = "even_though_it_will_corrupt_output"
_CONVERSION_SECONDS = 300.0
_LARGEST_SOURCE = 64 << 20  # bytes of a file to make a tokenizer from; weights are larger
_VERSION = b"5"  # of what is made; another one makes what is in caches anew
_PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_SLOW_FILES = (
    *_PIECES,
    *("vocab.json", "merges.txt", "vocab.txt", "tekken.json", "*.tiktoken", "tiktoken.model"),
)
_CONFIG_FILES = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "*.py")
_CONVERT = """
import os, sys
source, target, trust = sys.argv[1:]
if trust == "0":  # tokenizers need no torch, which is half of the time; code of others may
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it tells everybody that it misses torch
    sys.modules["torch"] = None
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(source, trust_remote_code=trust == "1").save_pretrained(target)
"""
# `tiktoken` keeps a copy of each file in the folder of temporary files, by its path alone: of one
# that has changed since it would read what was there before.
_CONVERSION_ENV: Final = {
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TIKTOKEN_CACHE_DIR": "",
}


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The contents of tokenizer_config.json and its companions."""

    special_tokens: dict[str, str]  # "bos_token", "image_token" ... -> text; those that are set
    added_tokens: tuple[AddedTokenSpec, ...]  # in the order of their ids
    chat_templates: dict[str, str]  # name -> source; "default" is the usual one
    response_template: dict[str, Any] | None = None  # how transformers parses answers
    cleans_up: bool = False  # decoded text, where tokens are no byte pairs (`clean_up.py`)
    cleans_up_pairs: bool = False  # there as well


def read_tokenizer_config(folder: Path, config_path: Path | None = None) -> TokenizerConfig:
    """Read the configuration of the tokenizer in `folder`; missing files are skipped.

    `config_path` (`--tokenizer-config-path`) replaces the folder's tokenizer_config.json. Raises
    ModelLoadError for a file that is not a JSON object or of another form, and if there is none at
    `config_path`.
    """
    try:
        return _read_tokenizer_config(folder, config_path)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"{config_path or folder / 'tokenizer_config.json'} or a file beside it cannot be "
            f"read as the configuration of a tokenizer: {tell_reason(error)}"
        ) from error


def _read_tokenizer_config(folder: Path, config_path: Path | None) -> TokenizerConfig:
    if config_path is not None:
        config = _read_object(config_path, may_be_missing=False)
    else:
        config = _read_object(folder / "tokenizer_config.json")
    older = _read_object(folder / "special_tokens_map.json")  # transformers before 4.32
    tekken = read_tekken(folder)
    special = {} if tekken is None else name_special_tokens(tekken)
    special |= {
        name: text for name in NAMED_TOKENS if (text := text_of(config.get(name, older.get(name))))
    }
    special = {**name_own_tokens(older), **name_own_tokens(config), **special}
    return TokenizerConfig(
        special_tokens=_with_ids_from_model_config(special, folder, config),
        added_tokens=list_added_tokens(config, older, _read_object(folder / "added_tokens.json")),
        chat_templates=_chat_templates(folder, config) or write_templates(folder, tekken),
        response_template=_object_or_none(config.get("response_template")),
        cleans_up=bool(config.get(_CLEANS_UP)),
        cleans_up_pairs=bool(config.get(f"{_CLEANS_UP}_for_bpe_{_CORRUPTS}")),
    )


def has_tokenizer(folder: Path) -> bool:
    """Return whether there is a tokenizer.json, or files to make one from."""
    return (folder / "tokenizer.json").is_file() or bool(_list_matching(folder, _SLOW_FILES))


def tokenizer_json(
    folder: Path, cache: Path | None = None, trust_remote_code: bool = False
) -> Path:
    """Return the folder's tokenizer.json, after converting an older format into `cache` if needed.

    The conversion runs `transformers` once, in a process of its own, as this process never imports
    it. With `trust_remote_code`, that process runs code that comes with the tokenizer; this process
    never does. Raises ModelLoadError if there is nothing to load or the conversion fails.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        return path
    sources, code = _list_matching(folder, _SLOW_FILES), _code_class(folder)
    known = find_known(folder, code)
    if known is not None:
        sources, code = [known.file], ""
    if code and not sources and not trust_remote_code:
        raise _needs_code(folder, code)
    if code:  # the code may read any file
        sources = sorted(file for file in folder.iterdir() if file.is_file() and _is_small(file))
    if not sources:
        raise ModelLoadError(
            f"{folder} holds no tokenizer: expected tokenizer.json, or files to make it from "
            f"({', '.join(_SLOW_FILES)}). Check the folder named by "
            "--model-id, or name another with --tokenizer-name."
        )
    target = (cache or _default_cache()) / _digest(
        [*sources, *_list_matching(folder, _CONFIG_FILES)]
    )
    path = target / "tokenizer.json"
    if not path.is_file() and known is not None:
        config = _read_object(folder / "tokenizer_config.json")
        _write(known.convert(config, lambda: read_tokenizer_config(folder).special_tokens), target)
    elif not path.is_file() and not code and (tekken := read_tekken(folder)) is not None:
        _write(convert_tekken(tekken), target)
    elif not path.is_file():
        _convert(folder, target, trust_remote_code, code)
    return path


def _write(content: dict[str, Any], target: Path) -> None:
    """Write a tokenizer.json, as whole as `_convert` does."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work, "made")
        made.mkdir()
        (made / "tokenizer.json").write_text(json.dumps(content), "utf-8")
        _put(made, target)


def _convert(folder: Path, target: Path, trust_remote_code: bool, code: str) -> None:
    if code and trust_remote_code:
        log.warning("%s of %s is run once, in a process of its own, to convert it", code, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written to a folder that is renamed when complete, since two servers may start at the same
    # time.
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        arguments = [str(folder), f"{work}/made", "01"[trust_remote_code]]
        try:
            done = subprocess.run(
                [sys.executable, "-c", _CONVERT, *arguments],
                capture_output=True,
                text=True,
                timeout=_CONVERSION_SECONDS,
                env=os.environ | _CONVERSION_ENV,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _cannot_convert(folder, f"no result within {_CONVERSION_SECONDS:g} s") from error
        if done.returncode != 0 and code and not trust_remote_code:
            raise _needs_code(folder, code)
        if done.returncode != 0:
            raise _cannot_convert(folder, (done.stderr.strip().splitlines() or ["no output"])[-1])
        if not Path(work, "made", "tokenizer.json").is_file():
            whose = code if code and trust_remote_code else "this tokenizer in transformers"
            raise _cannot_convert(
                folder,
                f"there is no fast version of {whose}, and one in Python alone cannot be served",
            )
        _mend(Path(work, "made", "tokenizer.json"), folder)
        _put(Path(work, "made"), target)


def _mend(made: Path, folder: Path) -> None:
    """Have a converted tokenizer read texts as the SentencePiece file that it is of."""
    for source in _list_matching(folder, _PIECES):
        content = parse_json(read_file(made))
        made.write_text(json.dumps(mend_conversion(content, source)), "utf-8")


def _put(made: Path, target: Path) -> None:
    """Move a folder to where another server may have put the same by now."""
    try:
        made.rename(target)
    except OSError:
        if not (target / "tokenizer.json").is_file():
            raise


def _cannot_convert(folder: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"The tokenizer in {folder} has no tokenizer.json and could not be converted: {reason}. "
        "Make one where it works, with AutoTokenizer.from_pretrained(...).save_pretrained(...), "
        "and copy tokenizer.json into the folder."
    )


def _needs_code(folder: Path, code: str) -> ModelLoadError:
    return ModelLoadError(
        f"The tokenizer in {folder} is Python code ({code}) without a tokenizer.json, and such "
        "code is not run unless asked for. Read it; if you trust it, give --trust-remote-code: it "
        "is then run once, in a process of its own, to make a tokenizer.json."
    )


def _code_class(folder: Path) -> str:
    """Return the tokenizer class that the folder has in a Python file; "" if none."""
    table = _read_object(folder / "tokenizer_config.json").get("auto_map")
    named = table.get("AutoTokenizer") if isinstance(table, Mapping) else table
    classes = named if isinstance(named, list) else [named]
    return " and ".join(dict.fromkeys(str(each) for each in classes if each))


def _is_small(file: Path) -> bool:
    return file.stat().st_size <= _LARGEST_SOURCE


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tgi_trio" / "tokenizers"


def _list_matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256(_VERSION)
    for path in paths:
        content = read_file(path)
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def _read_object(path: Path, may_be_missing: bool = True) -> dict[str, Any]:
    if may_be_missing and not path.exists():
        return {}
    try:
        value = parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {tell_reason(error, path)}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _object_or_none(value: Any) -> dict[str, Any] | None:
    return dict(value) if isinstance(value, Mapping) else None


def _with_ids_from_model_config(
    special: dict[str, str], folder: Path, config: Mapping[str, Any]
) -> dict[str, str]:
    """Fill in bos and eos by the ids of config.json if no file has their text (GPT-2)."""
    missing = [name for name in ("bos_token", "eos_token") if name not in special | dict(config)]
    if not missing or not (folder / "tokenizer.json").is_file():
        return special
    model = read_values(folder) or {}
    added = {
        entry["id"]: entry["content"]
        for entry in _read_object(folder / "tokenizer.json").get("added_tokens") or []
    }
    for name in missing:
        token_id = model.get(f"{name}_id")
        first = token_id[0] if isinstance(token_id, list) and token_id else token_id
        if first in added:
            special[name] = added[first]
    return special


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of the first source that has any, in the order of transformers.

    Files of their own come before JSON; JSON files are in TGI's order.
    """
    main = folder / "chat_template.jinja"
    files = {"default": main} if main.is_file() else {}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if files:
        return {name: read_text_file(path, SMALL) for name, path in files.items()}
    sources = (
        _read_object(folder / "chat_template.json"),
        config,
        _read_object(folder / "processor_config.json"),
    )
    return next(
        filter(None, (_name_templates(source.get("chat_template")) for source in sources)), {}
    )


def _name_templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        found = {entry["name"]: entry["template"] for entry in value}
    else:
        found = dict(value) if isinstance(value, Mapping) else {}
    for each in (*found, *found.values()):
        expect_text("a chat template", each)
    return found
