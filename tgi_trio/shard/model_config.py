"""What a checkpoint folder says about its model: config.json and generation_config.json.

Read as plain JSON, so that nothing here imports transformers (half a second, and a lot of memory).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.settings import DTYPES

# Names under which families write the longest sequence they were trained for.
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts every part needs, and the whole of config.json for the family that reads more."""

    folder: Path
    model_type: str
    dtype: str  # as the checkpoint says it, "float32" when it says nothing
    vocab_size: int
    max_positions: int  # 0 = unbounded
    eos_ids: tuple[int, ...]
    values: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a config value; a null counts as absent."""
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """Return a config value; raises ModelLoadError when it is absent."""
        value = self.values.get(name)
        if value is None:
            raise ModelLoadError(
                f"{self.folder / 'config.json'} has no {name!r}, which model type "
                f"{self.model_type!r} needs."
            )
        return value


def read_config(folder: Path) -> ModelConfig:
    """Read `folder`; raises ModelLoadError when it is no checkpoint or its JSON is damaged."""
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder; --model-id names a folder or a hub model.")
    values = _read_json(folder / "config.json")
    if values is None:
        raise ModelLoadError(
            f"{folder} has no config.json, so it is no checkpoint as save_pretrained writes it."
        )
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ModelLoadError(f"{folder / 'config.json'} does not say its model_type.")
    generation = _read_json(folder / "generation_config.json") or {}
    text = values.get("text_config") if isinstance(values.get("text_config"), dict) else {}
    merged = {**(text or {}), **values}  # composite models keep their decoder's numbers one down
    return ModelConfig(
        folder=folder,
        model_type=model_type,
        dtype=str(merged.get("dtype") or merged.get("torch_dtype") or "float32"),
        vocab_size=int(merged.get("vocab_size") or 0),
        max_positions=next((int(merged[k]) for k in _POSITION_KEYS if merged.get(k)), 0),
        eos_ids=_eos_ids(generation, merged),
        values=merged,
    )


def compute_dtype(wanted: str | None, config: ModelConfig, *, on_cpu: bool) -> str:
    """Return the dtype to compute in; raises ConfigurationError for one we do not have."""
    name = config.dtype.removeprefix("torch.") if wanted in (None, "auto") else str(wanted)
    if name == "float16" and wanted in (None, "auto") and on_cpu:
        name = "float32"  # CPUs have no float16 arithmetic to speak of
    if name not in DTYPES:
        raise ConfigurationError(
            f"dtype {name!r} cannot be computed in; allowed are {', '.join(DTYPES)} (--dtype)."
        )
    return name


def _eos_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of the first source that names any; transformers looks in the same order."""
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds no JSON object.")
    return content
