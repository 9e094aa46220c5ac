"""The tensors of an adapter, according to its header: a pair of A and B for each module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import CONFIG, AdapterConfig, read_adapter_config
from tgi_trio.model.checkpoint_files import StoredTensor, read_file_header

WEIGHTS: Final = "adapter_model.safetensors"
FLOATS: Final = ("F32", "F16", "BF16")  # supported dtypes
_LONGEST_HEADER: Final = 2 << 20  # bytes; parsing it delays steps, and 2,000 tensors take 300 kB
_PICKLE: Final = "adapter_model.bin"
_NAMED: Final = 8  # most tensors listed in an error message
_HALF: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class Pair:
    """The change of one module's matrix [out, in]: B [out, r] times A [r, in], scaled."""

    module: str  # the model's name for it: "model.layers.0.self_attn.q_proj"
    a: StoredTensor
    b: StoredTensor
    names: tuple[str, str]  # of both in the file
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as described by its files."""

    config: AdapterConfig
    pairs: Mapping[str, Pair]  # by module

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def files(self) -> tuple[Path, Path]:
        """The files that describe it completely."""
        return self.folder / CONFIG, self.folder / WEIGHTS

    @property
    def rank(self) -> int:
        """The largest rank of all modules."""
        return max(pair.rank for pair in self.pairs.values())


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter's configuration and header.

    Raises ModelLoadError that names unsupported fields and tensors, and for a damaged file, with
    the tensor's name.
    """
    if not (folder / CONFIG).is_file():
        raise ModelLoadError(f"{folder} is no folder of an adapter: it holds no {CONFIG}")
    config = read_adapter_config(folder)
    refused, unknown = config.find_refused(), []
    halves: dict[str, dict[str, tuple[str, StoredTensor]]] = {}
    for name, tensor in _read_weights(folder).items():
        match = _HALF.fullmatch(name)
        if match is None:
            unknown.append(f"the tensor {name!r}")
        elif match[2] in halves.setdefault(match[1], {}):
            raise ModelLoadError(f"{folder / WEIGHTS} holds lora_{match[2]} of {match[1]} twice")
        else:
            halves[match[1]][match[2]] = name, tensor
    if len(unknown) > _NAMED:
        unknown[_NAMED:] = [f"{len(unknown) - _NAMED} more tensors"]
    if refused := refused + unknown:
        raise ModelLoadError(
            f"{folder} cannot be served because of {', '.join(refused)}: only LoRA matrices of "
            f"linear layers are. {config.advise()}"
        )
    if not halves:
        raise ModelLoadError(f"{folder / WEIGHTS} holds no tensors")
    return Adapter(config, {module: _pair(config, module, half) for module, half in halves.items()})


def _read_weights(folder: Path) -> dict[str, StoredTensor]:
    path = folder / WEIGHTS
    if path.is_file():
        return read_file_header(path, _LONGEST_HEADER)
    if (folder / _PICKLE).is_file():
        raise ModelLoadError(
            f"{folder} holds {_PICKLE}, a pickle, which may hold a program; only {WEIGHTS} is "
            "read. PEFT writes it: save_pretrained(folder, safe_serialization=True)"
        )
    raise ModelLoadError(f"{folder} holds {CONFIG} but no {WEIGHTS}")


def _pair(config: AdapterConfig, module: str, half: Mapping[str, tuple[str, StoredTensor]]) -> Pair:
    """Return a module's pair; raises ModelLoadError unless both fit each other and the rank."""
    if lacking := [letter for letter in "AB" if letter not in half]:
        raise ModelLoadError(
            f"{config.folder / WEIGHTS} holds no lora_{lacking[0]} of {module}, only the other "
            "matrix"
        )
    (name_a, a), (name_b, b) = half["A"], half["B"]
    for name, tensor in half.values():
        if tensor.dtype not in FLOATS:
            raise ModelLoadError(
                f"{name} of {config.folder} is {tensor.dtype}; served are {', '.join(FLOATS)}"
            )
    rank = config.rank(module)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise ModelLoadError(
            f"{name_a} and {name_b} of {config.folder} are {list(a.shape)} and {list(b.shape)}, "
            f"which does not fit the rank {rank} of {CONFIG}"
        )
    return Pair(module, a, b, (name_a, name_b), config.scale(module))
