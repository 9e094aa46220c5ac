"""What a model folder's own files say, as far as settings depend on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_trio.errors import ModelLoadError


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a model folder's config says, as far as settings depend on it."""

    path: Path
    model_type: str
    architectures: tuple[str, ...] = ()
    max_positions: int | None = None  # longest sequence in tokens; None: not stated
    tokenizer_max_length: int | None = None  # the tokenizer's idea of the same
    vocab_size: int | None = None
    dtype: str | None = None  # of the checkpoint, e.g. "bfloat16"
    revision_sha: str | None = None  # commit, when the folder is a hub snapshot


def model_facts(
    path: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any] | None = None
) -> ModelFacts:
    """Pick what settings need out of a parsed `config.json`; a text part may be nested."""
    nested = config.get("text_config")
    text: Mapping[str, Any] = {**config, **nested} if isinstance(nested, dict) else config
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")
    longest = (tokenizer_config or {}).get("model_max_length")
    inside_cache = path.parent.name == "snapshots"
    return ModelFacts(
        path=path,
        model_type=str(config.get("model_type") or "unknown"),
        architectures=tuple(config.get("architectures") or ()),
        max_positions=_first_count(text, "max_position_embeddings", "max_seq_len", "n_positions"),
        # transformers writes 1e30 for "no limit"
        tokenizer_max_length=longest if isinstance(longest, int) and 0 < longest < 10**9 else None,
        vocab_size=_first_count(text, "vocab_size"),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        revision_sha=path.name if inside_cache else None,
    )


def read_model_facts(path: Path) -> ModelFacts:
    """Read a model folder. Raises ModelLoadError when its config cannot be used."""
    config = _read_json(path / "config.json")
    if config is None:
        raise ModelLoadError(f"{path} holds no config.json, so it is not a model folder")
    return model_facts(path, config, _read_json(path / "tokenizer_config.json"))


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file, None when there is no such file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return content


def _first_count(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None
