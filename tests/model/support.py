"""Checkpoint folders of headers and zeros, made on the spot."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_trio.model.check import model_spec
from tgi_trio.model.config import RopeScaling, read_config
from tgi_trio.model.specs.t5 import T5Spec
from tgi_trio.model.tensors import decoder_claims, t5_claims

Stored = tuple[str, tuple[int, ...]]  # dtype as safetensors names it, and shape

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
MISSING: Any = object()  # see `changed`
BYTES = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F64": 8,
    "I64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
}  # others: 1


@dataclass(frozen=True)
class Asked:
    """How a model is to be served: what `check_model` reads of the settings."""

    dtype: str = "float32"
    num_shard: int = 1
    quantize: str | None = None
    kv_cache_dtype: str | None = None
    pipeline_stages: int = 1
    activations: int | None = None
    cpu_backend: str = "auto"
    trust_remote_code: bool = False
    rope: RopeScaling | None = None


def write_json(folder: Path, content: object, name: str = "config.json") -> None:
    """Write a new file, whatever was there: one that is cut to nothing first waits for the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(json.dumps(content))


def write_safetensors(file: Path, tensors: Mapping[str, Stored]) -> None:
    """Write a file of zeros as the format's description has it, without its library."""
    header, place = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BYTES.get(dtype, 1)
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.unlink(missing_ok=True)  # as in `write_json`
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(place))


def claimed(folder: Path) -> dict[str, Stored]:
    """Return what a folder's config.json asks for."""
    spec = model_spec(read_config(folder))
    assert spec is not None
    claims = t5_claims(spec) if isinstance(spec, T5Spec) else decoder_claims(spec)
    return {name: ("F32", shape) for name, shape in sorted(claims.needed.items())}


def make_folder(
    folder: Path,
    config: Mapping[str, Any] = LLAMA,
    changes: Mapping[str, Stored | None] | None = None,
) -> Path:
    """Write a whole checkpoint; `changes` add tensors, or take them away where None."""
    write_json(folder, config)
    tensors: dict[str, Stored | None] = {**claimed(folder), **(changes or {})}
    kept = {name: stored for name, stored in tensors.items() if stored is not None}
    write_safetensors(folder / "model.safetensors", kept)
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where something stands in a config, at any depth."""
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in items or (enumerate(value) if isinstance(value, list) else ()):
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a config with another value in a place; MISSING: with none."""
    copy: dict[str, Any] = json.loads(json.dumps(config))
    inside: Any = copy
    for key in path[:-1]:
        inside = inside[key]
    if value is MISSING:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return copy
