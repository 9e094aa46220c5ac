"""What a checkpoint folder states about its model: config.json and generation_config.json.

The only reader of these files, for settings, tokenizer, conversions and every backend (a test looks
for others). They are read as plain JSON, so nothing here imports transformers, which takes half a
second and much memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tgi_trio.errors import ModelLoadError
from tgi_trio.model import deepseek_ocr, internvl_chat, nemotron_omni, phi4mm, qwen3_asr
from tgi_trio.model.exact_lengths import exact_length
from tgi_trio.model.wrappers import (
    EXTRA_TOKENS,
    TEXT_TYPES,
    find_thinker,
    text_defaults,
    text_type,
)
from tgi_trio.whole_files import parse_json, read_file

# Keys in which families state the longest sequence they were trained for.
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
# And where some alone do: others' files say something else under that name.
_OWN_POSITION_KEYS = {"bailing_hybrid": "model_max_length"}
# Keys in which types of texts state their tokens, before `vocab_size`.
_OWN_TOKEN_KEYS = {"chatglm": ("padded_vocab_size",), "hunyuan_vl_text": ("org_vocab_size",)}
# Keys of the nested text config in composite models (text and images, speech, ...), in the order in
# which transformers looks for them.
_TEXT_KEYS = ("text_config", "decoder", "generator")
# Keys whose top-level value, if any, wins over that of the nested text config.
_KEYS_OF_THE_WHOLE = ("model_type", "bos_token_id", "eos_token_id", "tie_word_embeddings")
# With what an answer ends beside the stated tokens, where transformers' examples have it as a stop.
_ENDS = {"got_ocr2": "<|im_end|>"}
# What is raised where values of a config.json are of other kinds than are computed with.
NONSENSE = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
MOST = 2**31  # of anything that is counted: larger numbers are none
MOST_LAYERS = 4096
# Keys in which families state how many layers there are, of which a list is made before any tensor
# is looked for.
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_TOWER_KEYS = ("depth", "encoder_layers", "decoder_layers")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Requested rotary scaling, which replaces the checkpoint's."""

    kind: str  # "linear" or "dynamic"
    factor: float  # by how much longer sequences may become


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts that every part needs, and all of config.json for families that need more."""

    folder: Path
    model_type: str
    dtype: str | None  # of the checkpoint, e.g. "bfloat16"; None: not stated
    vocab_size: int  # 0: not stated; includes tokens that are only read
    max_positions: int  # in tokens; 0: unbounded, or not stated
    eos_ids: tuple[int, ...]
    values: Mapping[str, Any]  # config.json, as `read_values` returns it

    def get(self, name: str, default: Any = None) -> Any:
        """Return a config value; null counts as absent."""
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """Return a config value; raises ModelLoadError if it is absent."""
        value = self.values.get(name)
        if value is None:
            raise ModelLoadError(
                f"{self.folder / 'config.json'} has no {name!r}, which model type "
                f"{self.model_type!r} needs."
            )
        return value

    @property
    def wraps_text(self) -> bool:
        """Whether this is a composite model, whose text is one of several parts: `wrappers.py`."""
        return self.model_type in TEXT_TYPES

    @property
    def text_type(self) -> str:
        """The type of the text model: `model_type`, or that of the nested text config."""
        return text_type(self.model_type, _nested_text(self.values))

    @property
    def trained_positions(self) -> int:
        """The longest sequence that config.json states; 0: none.

        Scaled frequencies start from it, even if `max_positions` has been raised.
        """
        return _count_positions(self.folder, self.values)

    def of_text(self) -> ModelConfig:
        """Return the config of a composite model's text: what is stated beside it is not in it.

        As in transformers, which makes the text's configuration of the nested one alone.
        """
        nested = _nested_text(self.values)
        if not self.wraps_text or nested is None:
            return self
        own = {key: self.values[key] for key in _TEXT_KEYS if key in self.values}
        return replace(self, values=own | _text_values(self.values, nested))

    def with_rope(self, scaling: RopeScaling) -> ModelConfig:
        """Return the config with this rotary scaling, and correspondingly longer sequences."""
        stated = {"rope_scaling": {"rope_type": scaling.kind, "factor": scaling.factor}}
        values = {**self.values, **stated}
        for key in _TEXT_KEYS:
            if isinstance(nested := values.get(key), dict):
                values[key] = {**nested, **stated}
        return replace(self, values=values, max_positions=int(self.max_positions * scaling.factor))


def read_config(folder: Path, rope: RopeScaling | None = None) -> ModelConfig:
    """Read `folder`; raises ModelLoadError if it is not a checkpoint or its JSON is damaged.

    `rope`: scaling that replaces the checkpoint's.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder; --model-id names a folder or a hub model.")
    values = read_values(folder)
    if values is None:
        raise ModelLoadError(
            f"{folder} holds no config.json, so it is not a model folder as save_pretrained "
            "writes it"
        )
    model_type = values.get("model_type")
    if model_type is None:
        raise ModelLoadError(f"{folder / 'config.json'} does not say its model_type.")
    _check_layers(folder, values)
    generation = read_json(folder / "generation_config.json") or {}
    ends = _eos_ids(
        folder,
        generation,
        {"eos_token_id": generation.get("thinker_eos_token_id")},  # Qwen3-Omni
        values,
    )
    config = ModelConfig(
        folder=folder,
        model_type=model_type,
        dtype=_dtype(_nested_text(values) or {}) or _dtype(values),
        vocab_size=_count_tokens(folder, values),
        max_positions=_bound_positions(folder, values),
        eos_ids=tuple(dict.fromkeys((*ends, *_code_ends(folder, values)))),
        values=values,
    )
    return config if rope is None else config.with_rope(rope)


def read_values(folder: Path) -> dict[str, Any] | None:
    """Return config.json with a nested text config merged into the top level; None: no file.

    The nested values win, since those beside them are the composite's (a test compares with
    transformers' `get_text_config`), except for the model's type, the ids of BOS and EOS, and
    whether the head is tied. Sizes that a nested config leaves out are its type's defaults. Raises
    ModelLoadError if the file cannot be read.
    """
    content = read_json(folder / "config.json")
    if content is None:
        return None
    if not isinstance(kind := content.get("model_type"), str | None):
        raise ModelLoadError(
            f"{folder / 'config.json'} says model_type {kind!r}, which is no text."
        )
    content = find_thinker(content)
    for published in (deepseek_ocr, internvl_chat, nemotron_omni, phi4mm, qwen3_asr):
        content = published.name_as_transformers(content)
    nested = _nested_text(content)
    if nested is None:
        return content
    return {**content, **_text_values(content, nested)}


def _text_values(whole: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says of the text; `nested`: the part of `whole` that is about it."""
    kept = {key: whole[key] for key in _KEYS_OF_THE_WHOLE if whole.get(key) is not None}
    return {**text_defaults(text_type(str(whole.get("model_type")), nested)), **nested, **kept}


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file, or None if there is no such file; raises ModelLoadError."""
    try:
        content = parse_json(read_file(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return content


def _nested_text(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the nested text config, None if the model is not composite."""
    nested = (values[key] for key in _TEXT_KEYS if isinstance(values.get(key), dict))
    return next(nested, None)


def _dtype(values: Mapping[str, Any]) -> str | None:
    name = values.get("dtype") or values.get("torch_dtype")  # the older name
    return str(name).removeprefix("torch.") if name else None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _first_count(
    folder: Path, values: Mapping[str, Any], names: tuple[str, ...], most: int = MOST
) -> int:
    """Return the first of `names` with a positive number, 0 if there is none.

    Raises ModelLoadError for what is no whole number below `most`.
    """
    for name in names:
        value = values.get(name)
        if value is not None and not (_is_whole(value) and value < most):
            raise ModelLoadError(
                f"{folder / 'config.json'} says {name} {value!r}, which is no whole number below "
                f"{most}."
            )
        if value is not None and value > 0:
            return int(value)
    return 0


def _check_layers(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for more layers than there are, in the text or in another part."""
    for name in _LAYER_KEYS:
        _first_count(folder, values, (name,), MOST_LAYERS + 1)
    for part, section in values.items():
        for name in (*_LAYER_KEYS, *_TOWER_KEYS) if isinstance(section, Mapping) else ():
            if _is_whole(count := section.get(name)) and count > MOST_LAYERS:
                where = f"{part}.{name}"
                raise ModelLoadError(
                    f"{folder / 'config.json'} says {where} {count}, which is no whole number "
                    f"below {MOST_LAYERS + 1}."
                )


def _count_positions(folder: Path, values: Mapping[str, Any]) -> int:
    """Return the longest sequence, 0 if it is not stated."""
    own = _OWN_POSITION_KEYS.get(str(values.get("model_type")))
    return _first_count(folder, values, (*_POSITION_KEYS, *([own] if own else [])))


def _bound_positions(folder: Path, values: Mapping[str, Any]) -> int:
    """Return `_count_positions`, or how many of them are computed as the model's own code does."""
    stated, exact = _count_positions(folder, values), exact_length(values)
    return stated if exact is None else min(stated or exact, exact)


def _count_tokens(folder: Path, values: Mapping[str, Any]) -> int:
    """Return the number of tokens with embeddings, 0 if it is not stated."""
    kind = text_type(str(values.get("model_type")), _nested_text(values))
    keys = (*_OWN_TOKEN_KEYS.get(kind, ()), "vocab_size")
    stated = _first_count(folder, values, keys)
    added = _first_count(folder, values, ("additional_vocab_size",)) if kind == "idefics" else 0
    return stated + added + EXTRA_TOKENS.get(kind, 0) if stated else 0


def _eos_ids(folder: Path, *sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of the first source that states any; transformers looks in the same order.

    Negative ones, which no token has, are left out. Raises ModelLoadError for what is no id.
    """
    for source in sources:
        stated = source.get("eos_token_id")
        if stated is None:
            continue
        ids = stated if isinstance(stated, list) else [stated]
        if not all(map(_is_whole, ids)):
            raise ModelLoadError(
                f"{folder} says eos_token_id {stated!r} (generation_config.json or config.json), "
                "which is neither the number of a token nor a list of such."
            )
        return tuple(token for token in ids if token >= 0)
    return ()


def _code_ends(folder: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the id of the token with which a model's own code ends an answer, if it has such."""
    end = internvl_chat.find_end(values) or _ENDS.get(str(values.get("model_type")), "")
    if not end:
        return ()
    told = (read_json(folder / "tokenizer_config.json") or {}).get("added_tokens_decoder")
    numbered = told.items() if isinstance(told, Mapping) else ()
    contents = {number: _content(token) for number, token in numbered}
    found = {content: number for number, content in contents.items() if number.isdecimal()}
    number = found.get(end, (read_json(folder / "added_tokens.json") or {}).get(end))
    return () if number is None else (int(number),)


def _content(token: object) -> object:
    return token.get("content") if isinstance(token, Mapping) else None
