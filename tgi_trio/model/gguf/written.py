"""Metadata and tensor names of a GGUF file to be written: the reverse of `config.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.config import ModelConfig, read_json
from tgi_trio.model.gguf.pre_tokenizers import PRE_TOKENIZERS
from tgi_trio.model.gguf.tensors import FAMILY_ROLES, OUTER_ROLES
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.whole_files import SMALL, read_text_file

Values = dict[str, Any]

# Model types that can be written -> their GGUF architecture.
ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Token types, as numbered by the format.
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_ROLES: Final = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}


def find_architecture(config: ModelConfig, spec: DecoderSpec) -> str:
    """Return a model's architecture; raises ConfigurationError for an unsupported one."""
    found = ARCHITECTURES.get(config.model_type)
    if found is None:
        raise ConfigurationError(
            f"Model type {config.model_type!r} is not written as GGUF; written are "
            f"{', '.join(ARCHITECTURES)}."
        )
    window = max(layer.window for layer in spec.layers)
    if 0 < window < (config.max_positions or 0):
        raise ConfigurationError(
            f"The model sees windows of {window} tokens, which a file of the architecture "
            f"{found!r} cannot say."
        )
    return found


def model_metadata(config: ModelConfig, spec: DecoderSpec, architecture: str) -> Values:
    """Return a file's metadata, without that of the tokenizer.

    Raises ConfigurationError for a rotary scaling that cannot be written.
    """
    layer = spec.layers[0]
    rotary = layer.rotary
    assert rotary is not None  # every architecture that is written rotates
    metadata: Values = {
        "context_length": config.max_positions,
        "embedding_length": spec.hidden_size,
        "block_count": len(spec.layers),
        "feed_forward_length": spec.mlp_width,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "rope.dimension_count": rotary.dim,
        "rope.freq_base": float(rotary.theta),
        "vocab_size": spec.vocab_size,
    }
    if rotary.kind in ("linear", "yarn"):
        metadata["rope.scaling.type"] = rotary.kind
        metadata["rope.scaling.factor"] = float(rotary.parameters["factor"])
        original = rotary.parameters.get("original_max_position_embeddings")
        if original:
            metadata["rope.scaling.original_context_length"] = int(original)
    elif rotary.kind not in ("default", "llama3"):
        raise ConfigurationError(f"The rotary scaling {rotary.kind!r} is not written as GGUF.")
    return {
        "general.architecture": architecture,
        "general.name": config.folder.name,
        **{f"{architecture}.{key}": value for key, value in metadata.items() if value is not None},
    }


def rotary_divisors(spec: DecoderSpec) -> list[float] | None:
    """Return the divisors of Llama 3's frequencies, None for other models."""
    rotary = spec.layers[0].rotary
    if rotary is None or rotary.kind != "llama3":
        return None
    metadata = rotary.parameters
    low, high = float(metadata["low_freq_factor"]), float(metadata["high_freq_factor"])
    original, factor = (
        float(metadata["original_max_position_embeddings"]),
        float(metadata["factor"]),
    )
    divisors = []
    for place in range(0, rotary.dim, 2):
        turns = original * rotary.theta ** (-place / rotary.dim) / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - kept) / factor + kept))
    return divisors


def name_tensors(spec: DecoderSpec) -> dict[str, str]:
    """Return the file's name of every module of a model, both without ".weight" and ".bias"."""
    names = spec.names
    found = {getattr(names, field): role for role, field in OUTER_ROLES.items()}
    for index in range(len(spec.layers)):
        prefix = names.layer.format(index)
        for role, fields in FAMILY_ROLES.items():
            for field in fields:
                if own := getattr(names, field):
                    found[prefix + own] = f"blk.{index}.{role}"
    return {own: role for own, role in found.items() if own}


def vocabularies(folder: Path) -> list[Values]:
    """Return candidates for a tokenizer's metadata; the right one is found by trying them.

    Raises ConfigurationError for a tokenizer that is not BPE.
    """
    metadata = read_json(folder / "tokenizer.json") or {}
    model = metadata.get("model") or {}
    if model.get("type") != "BPE":
        raise ConfigurationError(
            f"{folder / 'tokenizer.json'} is no BPE, and other tokenizers are not written as GGUF."
        )
    common = _tokens(folder, metadata, model)
    if model.get("byte_fallback"):
        scores = [float(-place) for place in range(len(common["tokenizer.ggml.tokens"]))]
        return [common | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    common |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
    return [common | {"tokenizer.ggml.pre": pre} for pre in PRE_TOKENIZERS]


def _tokens(folder: Path, metadata: Mapping[str, Any], model: Mapping[str, Any]) -> Values:
    """Return the metadata that both kinds of vocabulary have."""
    added = {token["content"]: token for token in metadata.get("added_tokens", [])}
    ids = dict(model["vocab"]) | {text: token["id"] for text, token in added.items()}
    count = max(ids.values()) + 1
    tokens = [f"[PAD{place}]" for place in range(count)]
    types = [5] * count  # unused, for ids without a token
    for text, number in ids.items():
        tokens[number] = text
        types[number] = _type(text, added, model)
    config = read_json(folder / "tokenizer_config.json") or {}
    values: Values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    for word, key in _ROLES.items():
        text = config.get(key)
        text = text.get("content") if isinstance(text, dict) else text
        if text in ids:
            values[f"tokenizer.ggml.{word}_token_id"] = ids[text]
    first = json.dumps(metadata.get("post_processor"))
    bos = config.get("bos_token")
    begins = bool(config.get("add_bos_token")) or (
        isinstance(bos, str) and json.dumps(bos) in first
    )
    values["tokenizer.ggml.add_bos_token"] = begins
    template = config.get("chat_template") or _template_file(folder)
    if isinstance(template, str):
        values["tokenizer.chat_template"] = template
    elif isinstance(template, list):
        for each in template:
            ending = "" if each["name"] == "default" else f".{each['name']}"
            values[f"tokenizer.chat_template{ending}"] = each["template"]
    return values


def _template_file(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    return read_text_file(path, SMALL) if path.is_file() else None


def _type(text: str, added: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    if text in added:
        return _CONTROL if added[text].get("special") else 4
    if text == model.get("unk_token"):
        return _UNKNOWN
    is_byte = bool(model.get("byte_fallback")) and text[:3] == "<0x" and text[-1:] == ">"
    return _BYTE if is_byte else _NORMAL
