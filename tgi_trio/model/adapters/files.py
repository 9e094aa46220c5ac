"""The tensors of an adapter, according to its header: A and B for each module, and what is beside.

With DoRA (Liu et al. 2024, arXiv 2402.09353) a module also has the magnitudes of its outputs; there
may be biases as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import CONFIG, AdapterConfig, read_adapter_config
from tgi_trio.model.adapters.tensor_kinds import Kind, find_kinds
from tgi_trio.model.checkpoint_files import StoredTensor, read_file_header

WEIGHTS: Final = "adapter_model.safetensors"
FLOATS: Final = ("F32", "F16", "BF16")  # supported dtypes
_LONGEST_HEADER: Final = 2 << 20  # bytes; parsing it delays steps, and 2,000 tensors take 300 kB
_PICKLE: Final = "adapter_model.bin"
_NAMED: Final = 8  # most tensors listed in an error message
_WORDS: Final = {
    Kind.A: "lora_A",
    Kind.B: "lora_B",
    Kind.MAGNITUDE: "lora_magnitude_vector",
    Kind.ADDED_BIAS: "bias of lora_B",
    Kind.BIAS: "bias",
    Kind.WEIGHT: "weight",
}

Named = tuple[str, StoredTensor]  # with its name in the file


@dataclass(frozen=True, slots=True)
class Pair:
    """The change of one module's matrix [out, in]: B [out, r] times A [r, in], scaled.

    `vectors`, all [out]: the magnitudes of DoRA, B's bias, and what replaces the module's bias.
    `copies`: the base's own matrix, which PEFT writes beside A and B of a head.
    """

    module: str  # the model's name for it: "model.layers.0.self_attn.q_proj"
    a: StoredTensor
    b: StoredTensor
    names: tuple[str, str]  # of both in the file
    scale: float
    vectors: Mapping[Kind, Named] = field(default_factory=dict)
    copies: tuple[Named, ...] = ()

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
    modules: dict[str, dict[Kind, Named]] = {}
    for name, tensor in _read_weights(folder).items():
        kind, module = _classify(config, name)
        if kind is None:
            unknown.append(f"the tensor {name!r}")
        elif kind in modules.setdefault(module, {}):
            raise ModelLoadError(f"{folder / WEIGHTS} holds {_WORDS[kind]} of {module} twice")
        else:
            modules[module][kind] = name, tensor
    for parts in modules.values():
        if parts.keys() == {Kind.BIAS}:  # of a norm, or of a linear that is not adapted
            unknown.append(f"the tensor {parts[Kind.BIAS][0]!r}")
    if len(unknown) > _NAMED:
        unknown[_NAMED:] = [f"{len(unknown) - _NAMED} more tensors"]
    if refused := refused + unknown:
        raise ModelLoadError(
            f"{folder} cannot be served because of {', '.join(refused)}: only LoRA and DoRA of "
            f"linear layers are. {config.advise()}"
        )
    if not modules:
        raise ModelLoadError(f"{folder / WEIGHTS} holds no tensors")
    return Adapter(config, {name: _pair(config, name, parts) for name, parts in modules.items()})


def _classify(config: AdapterConfig, name: str) -> tuple[Kind | None, str]:
    """Return the kind of a tensor and its module; None for what is not served."""
    values, of_head = config.values, ".lm_head.base_layer." in f".{name}"
    announced = {
        Kind.A: True,
        Kind.B: True,
        Kind.MAGNITUDE: bool(values.get("use_dora")),
        Kind.ADDED_BIAS: bool(values.get("lora_bias")),
        Kind.BIAS: of_head or values.get("bias") in ("all", "lora_only"),
        Kind.WEIGHT: of_head,  # PEFT writes what it finds there
    }
    found = ((kind, module) for kind, module in find_kinds(name) if announced.get(kind, False))
    return next(found, (None, ""))


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


def _pair(config: AdapterConfig, module: str, parts: Mapping[Kind, Named]) -> Pair:
    """Return a module's tensors; raises ModelLoadError unless they fit each other and the rank."""
    wanted = {Kind.A: True, Kind.B: True, Kind.MAGNITUDE: bool(config.values.get("use_dora"))}
    wanted[Kind.ADDED_BIAS] = bool(config.values.get("lora_bias"))
    if lacking := [kind for kind, needed in wanted.items() if needed and kind not in parts]:
        there = " and ".join(_WORDS[kind] for kind in parts)
        raise ModelLoadError(
            f"{config.folder / WEIGHTS} holds no {_WORDS[lacking[0]]} of {module}, only {there}"
        )
    for name, tensor in parts.values():
        if tensor.dtype not in FLOATS:
            raise ModelLoadError(
                f"{name} of {config.folder} is {tensor.dtype}; served are {', '.join(FLOATS)}"
            )
    (name_a, a), (name_b, b) = parts[Kind.A], parts[Kind.B]
    rank = config.rank(module)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise ModelLoadError(
            f"{name_a} and {name_b} of {config.folder} are {list(a.shape)} and {list(b.shape)}, "
            f"which does not fit the rank {rank} of {CONFIG}"
        )
    kinds = (Kind.MAGNITUDE, Kind.ADDED_BIAS, Kind.BIAS)
    vectors = {kind: parts[kind] for kind in kinds if kind in parts}
    copies = (parts[Kind.WEIGHT],) if Kind.WEIGHT in parts else ()
    return Pair(module, a, b, (name_a, name_b), config.scale(module), vectors, copies)
