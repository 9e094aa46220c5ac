"""What a merged model says of texts: the adapter's tokenizer, chat template and ends, if any.

It is what the adapter is asked with beside others (`router/text/own_files.py` and
`text_processor.py`; a test compares the two). Files that belong together are taken together: those
of a vocabulary, those that configure the tokenizer, and chat templates, wherever they are written.
What the adapter's folder lacks of these is the base's, and what ends an answer of the base ends one
of the adapter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.model.config import read_config
from tgi_trio.whole_files import parse_json, read_file

_CONFIG: Final = "tokenizer_config.json"
_SPECIAL: Final = "special_tokens_map.json"
_PROCESSOR: Final = "processor_config.json"
_GENERATION: Final = "generation_config.json"
_WHOLE: Final = "tokenizer.json"
_TEKKEN: Final = "tekken.json"
# Any of them is a tokenizer.
SOURCES: Final = (
    *(_WHOLE, "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json"),
    *("merges.txt", "vocab.txt", _TEKKEN, "*.tiktoken", "tiktoken.model"),
)
_VOCABULARY: Final = (*SOURCES, "tokenizer.model.*", "added_tokens.json")
_TEMPLATES: Final = (
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
_NAMED: Final = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
_UNNAMED: Final = ("additional_special_tokens", "extra_special_tokens")
_ADDED: Final = "added_tokens_decoder"
_TEMPLATE: Final = "chat_template"
# What transformers reads from config.json if there is no generation_config.json, beside ends.
_OTHER_IDS: Final = (
    *("bos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)

Json = dict[str, Any]


def list_text_files(folder: Path) -> list[Path]:
    """Return the files of a folder that say anything of texts, ordered."""
    beside = (_CONFIG, _SPECIAL, _PROCESSOR, _GENERATION)
    return _list(folder, (*_VOCABULARY, *_TEMPLATES, *beside))


def place_texts(adapter: Path, base: Path, target: Path, tokens: int) -> list[str]:
    """Write what an adapter has of its own to `target`, which has copies of the base's files.

    `tokens`: that the merged model has rows for; 0: not known. Returns words for what is the
    adapter's. Raises ModelLoadError for damaged files and ends that the model has no rows for.
    """
    config = _read(adapter / _CONFIG)
    vocabulary = bool(_list(adapter, SOURCES))
    template = _has_template(adapter, config or {})
    ends = _read_ends(adapter / _GENERATION, tokens)
    if not (vocabulary or config is not None or template or ends):
        return []
    if vocabulary:
        _replace(adapter, target, _VOCABULARY)
    if config is None:
        _complete(adapter, base, target, vocabulary=vocabulary)
    else:
        _replace(adapter, target, (_CONFIG, _SPECIAL))
    _place_template(adapter, base, target, own=template)
    ended = _add_ends(base, target, [*ends, *_find_own_eos(base, target, tokens)])
    told = {
        "the vocabulary": vocabulary,
        "the tokenizer's configuration": config is not None,
        "the chat template": template,
        "some of the ends": ended,
    }
    return [what for what, own in told.items() if own]


def _complete(adapter: Path, base: Path, target: Path, *, vocabulary: bool) -> None:
    """Write the configuration of a tokenizer without one: special tokens are the base's.

    `vocabulary`: it is the adapter's, and knows its added tokens itself.
    """
    before, older = _read(base / _CONFIG) or {}, _read(base / _SPECIAL) or {}
    own = _read(adapter / _SPECIAL) or {}
    if not (vocabulary or own):
        return
    values = {name: before.get(name, older.get(name)) for name in _NAMED}
    values |= {name: own[name] for name in _NAMED if _text(own.get(name))}
    whole = before | {name: value for name, value in values.items() if value is not None}
    if vocabulary:
        whole = {name: value for name, value in whole.items() if name not in (_ADDED, *_UNNAMED)}
        whole |= {name: own[name] for name in _UNNAMED if name in own}
        (target / _SPECIAL).unlink(missing_ok=True)
    if whole != before:
        _write(target / _CONFIG, whole)


def _place_template(adapter: Path, base: Path, target: Path, *, own: bool) -> None:
    """Write the adapter's chat templates, from wherever they are; the base's if it has none."""
    config = _read(target / _CONFIG) or {}
    theirs = (_read((adapter if own else base) / _CONFIG) or {}).get(_TEMPLATE)
    if config.get(_TEMPLATE) != theirs:
        rest = {name: value for name, value in config.items() if name != _TEMPLATE}
        _write(target / _CONFIG, rest if theirs is None else {**rest, _TEMPLATE: theirs})
    if not own:
        return
    _replace(adapter, target, _TEMPLATES)
    processor = _read(target / _PROCESSOR) or {}
    template = (_read(adapter / _PROCESSOR) or {}).get(_TEMPLATE)
    if processor.pop(_TEMPLATE, None) != template:  # the rest is about images
        _write(
            target / _PROCESSOR,
            processor if template is None else {**processor, _TEMPLATE: template},
        )


def _has_template(folder: Path, config: Mapping[str, Any]) -> bool:
    if any(path.suffix == ".jinja" for path in _list(folder, _TEMPLATES)):
        return True
    others = (_read(folder / "chat_template.json") or {}, config, _read(folder / _PROCESSOR) or {})
    found = [each.get(_TEMPLATE) for each in others]
    return any(isinstance(each, str) or (isinstance(each, list | dict) and each) for each in found)


def _add_ends(base: Path, target: Path, ends: list[int]) -> bool:
    """Write the base's ends and these to generation_config.json; return whether any is new."""
    config = read_config(base)
    every = list(dict.fromkeys((*config.eos_ids, *ends)))
    if len(every) == len(set(config.eos_ids)):
        return False
    values = _read(target / _GENERATION)
    if values is None:
        ids = {name: config.values.get(name) for name in _OTHER_IDS}
        values = {name: each for name, each in ids.items() if each is not None}
    _write(target / _GENERATION, {**values, "eos_token_id": every})
    return True


def _read_ends(file: Path, tokens: int) -> list[int]:
    """Return `eos_token_id` of an adapter's generation_config.json."""
    found = (_read(file) or {}).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ModelLoadError(f"{file} has `eos_token_id` {found!r}, and needs ids of tokens")
    if tokens and max(ids, default=0) >= tokens:
        raise ModelLoadError(f"{file} has `eos_token_id` {max(ids)}; the model has {tokens} tokens")
    return ids


def _find_own_eos(base: Path, target: Path, tokens: int) -> list[int]:
    """Return the id of the merged tokenizer's `eos_token` if the base's has another."""
    eos = _eos_text(target)
    if eos is None or eos == _eos_text(base):
        return []
    try:
        number = next((number for text, number in _list_tokens(target) if text == eos), None)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"the tokenizer of the adapter is damaged: {error!r}") from error
    if number is None:
        raise ModelLoadError(
            f"the `eos_token` {eos!r} is not a token of the tokenizer, or of one whose files are "
            f"not read here: save {_WHOLE} beside the adapter, or take the model's tokenizer and "
            "template: --adapter-tokenizers base"
        )
    if tokens and number >= tokens:
        raise ModelLoadError(
            f"the `eos_token` {eos!r} is token {number}; the model has {tokens} tokens"
        )
    return [number]


def _eos_text(folder: Path) -> str | None:
    config, older = _read(folder / _CONFIG) or {}, _read(folder / _SPECIAL) or {}
    found = _text(config.get("eos_token", older.get("eos_token")))
    return found or ("</s>" if (folder / _TEKKEN).is_file() else None)


def _list_tokens(folder: Path) -> Iterator[tuple[Any, int]]:
    """Yield the tokens of a tokenizer with their ids, as far as JSON has them; added ones first."""
    whole = _read(folder / _WHOLE) or {}
    for each in whole.get("added_tokens") or ():
        yield each["content"], each["id"]
    vocabulary = (whole.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # with scores, in the order of ids
        yield from ((entry[0], number) for number, entry in enumerate(vocabulary))
    else:
        yield from vocabulary.items()
    for number, each in ((_read(folder / _CONFIG) or {}).get(_ADDED) or {}).items():
        yield _text(each), int(number)
    if not whole:
        for name in ("added_tokens.json", "vocab.json"):
            yield from (_read(folder / name) or {}).items()


def _list(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({p for pattern in patterns for p in folder.glob(pattern) if p.is_file()})


def _replace(adapter: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """Put the adapter's files of these names in the place of all that `target` has of them."""
    for path in _list(target, patterns):
        path.unlink()
    for path in _list(adapter, patterns):
        copy = target / path.relative_to(adapter)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _text(token: Any) -> str | None:
    """Return the text of a token, which files have as it is or in an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _read(path: Path) -> Json | None:
    """Return a file's JSON object; None: there is no file. Raises ModelLoadError."""
    try:
        content = parse_json(read_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {tell_reason(error, path)}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return content


def _write(path: Path, values: Json) -> None:
    path.write_text(json.dumps(values, indent=2))
