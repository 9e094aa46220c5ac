"""The tensors of an adapter, according to its header: A and B for each module, and what is beside.

With DoRA (Liu et al. 2024, arXiv 2402.09353) a module also has the magnitudes of its outputs; there
may be biases as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import CONFIG, AdapterConfig, read_adapter_config
from tgi_trio.model.adapters.tensor_kinds import (
    WRITTEN_WHOLE,
    TensorKind,
    find_kinds,
    is_repeated,
)
from tgi_trio.model.checkpoint_files import StoredTensor, read_file_header

WEIGHTS: Final = "adapter_model.safetensors"
FLOATS: Final = ("F32", "F16", "BF16", "F64")  # supported dtypes
# Bytes; parsing it delays steps. 2,000 tensors take 300 kB, those of 6,000 experts 5 MB.
_LONGEST_HEADER: Final = 8 << 20
_PICKLE: Final = "adapter_model.bin"
_NAMED: Final = 8  # most tensors listed in an error message
_OF_EXPERTS: Final = re.compile(r"(^|\.)experts(\.base_layer)?$")  # modules of an `ExpertsPair`
_WORDS: Final = {
    TensorKind.A: "lora_A",
    TensorKind.B: "lora_B",
    TensorKind.MAGNITUDE: "lora_magnitude_vector",
    TensorKind.ADDED_BIAS: "bias of lora_B",
    TensorKind.EMBEDDING_A: "lora_embedding_A",
    TensorKind.EMBEDDING_B: "lora_embedding_B",
    TensorKind.BIAS: "bias",
    TensorKind.WEIGHT: "weight",
    TensorKind.ROWS: "trainable_tokens_delta",
}

Named = tuple[str, StoredTensor]  # with its name in the file


@dataclass(frozen=True, slots=True)
class ExpertsPair:
    """The changes of one matrix of each of a layer's experts.

    PEFT's layout for a parameter with three axes, whose first one is the experts': A is
    [experts * r, in] by expert, B [out, r * experts] by rank.
    """

    module: str  # of all experts; ".base_layer" behind it for the first of two such matrices
    a: StoredTensor
    b: StoredTensor
    names: tuple[str, str]  # of both in the file


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Which part of an `ExpertsPair` belongs to one expert."""

    index: int
    count: int  # of experts
    # B is transposed in place of A, and A in place of B: what PEFT before 0.19 writes for matrices
    # stored [out, in], and later releases for those of Llama 4, which are stored [in, out].
    swapped: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """The change of one module's matrix [out, in]: B [out, r] times A [r, in], scaled.

    `vectors`, all [out]: the magnitudes of DoRA, B's bias, and what replaces the module's bias.
    `copies`: the base's own matrix, which PEFT writes beside A and B of a head. `share`: A and B
    are those of all experts. `first`: the row of B that belongs to the first row of the matrix.
    """

    module: str  # the model's name for it: "model.layers.0.self_attn.q_proj"
    a: StoredTensor
    b: StoredTensor
    names: tuple[str, str]  # of both in the file
    scale: float
    vectors: Mapping[TensorKind, Named] = field(default_factory=dict)
    copies: tuple[Named, ...] = ()
    share: ExpertShare | None = None
    first: int = 0

    @property
    def rank(self) -> int:
        return self.a.shape[0] // (1 if self.share is None else self.share.count)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows that replace those of an embedding or a head, `trainable_token_indices` of PEFT.

    PEFT computes a head that has such rows without its bias, as it has been trained.
    """

    module: str
    tokens: tuple[int, ...]  # different ones
    rows: StoredTensor  # [n, width], in the order of `tokens`
    name: str  # of it in the file


@dataclass(frozen=True, slots=True)
class EmbeddingPair:
    """The change of an embedding [tokens, width]: a token's row gets B times its column of A."""

    module: str
    a: StoredTensor  # [r, tokens]
    b: StoredTensor  # [width, r]
    names: tuple[str, str]  # of both in the file
    scale: float
    magnitude: Named | None = None  # [width], with DoRA: of all tokens' numbers at each place
    copies: tuple[Named, ...] = ()  # of the base's own embedding

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class SavedMatrix:
    """The whole of an embedding or a head, `modules_to_save` of PEFT.

    It may have fewer tokens than the base, or more, as `count_tokens` of `rows.py` says.
    """

    module: str
    matrix: StoredTensor  # [tokens, width]
    name: str  # of it in the file
    bias: Named | None = None  # [tokens], of a head


ReplacedRows = TokenRows | SavedMatrix


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as described by its files."""

    config: AdapterConfig
    pairs: Mapping[str, Pair]  # by module
    experts: Mapping[str, ExpertsPair] = field(default_factory=dict)  # likewise
    replaced_rows: Mapping[str, ReplacedRows] = field(default_factory=dict)  # likewise
    embeddings: Mapping[str, EmbeddingPair] = field(default_factory=dict)  # likewise

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def files(self) -> tuple[Path, Path]:
        """The files that describe it completely."""
        return self.folder / CONFIG, self.folder / WEIGHTS


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter's configuration and header.

    Raises ModelLoadError that names unsupported fields and tensors, and for a damaged file, with
    the tensor's name.
    """
    if not (folder / CONFIG).is_file():
        raise ModelLoadError(f"{folder} is no folder of an adapter: it holds no {CONFIG}")
    config = read_adapter_config(folder)
    refused, unknown = config.find_refused(), []
    modules: dict[str, dict[TensorKind, Named]] = {}
    tensors = _read_weights(folder)
    for name, tensor in tensors.items():
        if is_repeated(name, tensors):
            continue
        kind, module = _classify(config, name)
        if kind is None:
            unknown.append(f"the tensor {name!r}")
        elif kind in modules.setdefault(module, {}):
            raise ModelLoadError(f"{folder / WEIGHTS} holds {_WORDS[kind]} of {module} twice")
        else:
            modules[module][kind] = name, tensor
    for parts in modules.values():
        if parts.keys() == {TensorKind.BIAS}:  # of a norm, or of a linear that is not adapted
            unknown.append(f"the tensor {parts[TensorKind.BIAS][0]!r}")
    if len(unknown) > _NAMED:
        unknown[_NAMED:] = [f"{len(unknown) - _NAMED} more tensors"]
    if refused := refused + unknown:
        raise ModelLoadError(
            f"{folder} cannot be served because of {', '.join(refused)}: only LoRA and DoRA of "
            f"linear layers, LoRA of embeddings and rows of tokens are. {config.advise()}"
        )
    if not modules:
        raise ModelLoadError(f"{folder / WEIGHTS} holds no tensors")
    rows: dict[str, ReplacedRows] = {
        name: _token_rows(config, name, modules.pop(name)) for name in _with_rows(modules)
    }
    rows |= {name: _saved_matrix(config, name, modules.pop(name)) for name in _saved(modules)}
    embeddings = {
        name: _embedding_pair(config, name, modules.pop(name)) for name in _embeddings(modules)
    }
    whole = {name: parts for name, parts in modules.items() if _OF_EXPERTS.search(name)}
    return Adapter(
        config,
        {name: _pair(config, name, modules[name]) for name in modules if name not in whole},
        {name: _experts_pair(config, name, parts) for name, parts in whole.items()},
        rows,
        embeddings,
    )


def _classify(config: AdapterConfig, name: str) -> tuple[TensorKind | None, str]:
    """Return the kind of a tensor and its module; None for what is not served."""
    values = config.values
    announced = {
        TensorKind.A: True,
        TensorKind.B: True,
        TensorKind.EMBEDDING_A: True,
        TensorKind.EMBEDDING_B: True,
        TensorKind.MAGNITUDE: bool(values.get("use_dora")),
        TensorKind.ADDED_BIAS: bool(values.get("lora_bias")),
        TensorKind.BIAS: values.get("bias") in ("all", "lora_only"),
        TensorKind.ROWS: bool(values.get("trainable_token_indices")),
    }
    for kind, module in find_kinds(name):
        saved = kind in (TensorKind.WEIGHT, TensorKind.BIAS) and config.is_saved(module)
        if saved or announced.get(kind, False) or _is_copied(kind, module, name):
            return kind, module
    return None, ""


def _is_copied(kind: TensorKind, module: str, name: str) -> bool:
    """Return whether PEFT writes a tensor of its own accord, of an embedding or a head."""
    if module.rpartition(".")[2] not in WRITTEN_WHOLE:
        return False
    return kind is TensorKind.WEIGHT or (kind is TensorKind.BIAS and ".base_layer." in name)


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


def _pair(config: AdapterConfig, module: str, parts: Mapping[TensorKind, Named]) -> Pair:
    """Return a module's tensors; raises ModelLoadError unless they fit each other and the rank."""
    wanted = {
        TensorKind.A: True,
        TensorKind.B: True,
        TensorKind.MAGNITUDE: bool(config.values.get("use_dora")),
    }
    wanted[TensorKind.ADDED_BIAS] = bool(config.values.get("lora_bias"))
    _check_parts(config, module, parts, [kind for kind, needed in wanted.items() if needed])
    (name_a, a), (name_b, b) = parts[TensorKind.A], parts[TensorKind.B]
    _check_rank(config, module, parts[TensorKind.A], parts[TensorKind.B])
    kinds = (TensorKind.MAGNITUDE, TensorKind.ADDED_BIAS, TensorKind.BIAS)
    vectors = {kind: parts[kind] for kind in kinds if kind in parts}
    copies = (parts[TensorKind.WEIGHT],) if TensorKind.WEIGHT in parts else ()
    return Pair(module, a, b, (name_a, name_b), config.scale(module), vectors, copies)


def _experts_pair(
    config: AdapterConfig, module: str, parts: Mapping[TensorKind, Named]
) -> ExpertsPair:
    """Return a module's tensors of all experts; raises ModelLoadError unless they fit."""
    _check_parts(config, module, parts, (TensorKind.A, TensorKind.B))
    if more := parts.keys() - {TensorKind.A, TensorKind.B}:
        raise ModelLoadError(
            f"{config.folder / WEIGHTS} holds {_WORDS[more.pop()]} of {module}: of experts, only A "
            f"and B are served. {config.advise()}"
        )
    (name_a, a), (name_b, b) = parts[TensorKind.A], parts[TensorKind.B]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise ModelLoadError(
            f"{name_a} and {name_b} of {config.folder} are {list(a.shape)} and {list(b.shape)}, "
            "which do not fit each other"
        )
    return ExpertsPair(module, a, b, (name_a, name_b))


def _with_rows(modules: Mapping[str, Mapping[TensorKind, Named]]) -> list[str]:
    """Return the modules of which there are rows."""
    return [name for name, parts in modules.items() if TensorKind.ROWS in parts]


def _saved(modules: Mapping[str, Mapping[TensorKind, Named]]) -> list[str]:
    """Return the modules of which there is the matrix, and no A."""
    others = {TensorKind.A, TensorKind.EMBEDDING_A, TensorKind.EMBEDDING_B}
    return [
        name
        for name, parts in modules.items()
        if TensorKind.WEIGHT in parts and others.isdisjoint(parts)
    ]


def _embeddings(modules: Mapping[str, Mapping[TensorKind, Named]]) -> list[str]:
    """Return the modules that have A or B of an embedding."""
    kinds = {TensorKind.EMBEDDING_A, TensorKind.EMBEDDING_B}
    return [name for name, parts in modules.items() if not kinds.isdisjoint(parts)]


def _embedding_pair(
    config: AdapterConfig, module: str, parts: Mapping[TensorKind, Named]
) -> EmbeddingPair:
    """Return an embedding's tensors; raises ModelLoadError unless they fit each other."""
    wanted = [TensorKind.EMBEDDING_A, TensorKind.EMBEDDING_B]
    if config.values.get("use_dora"):
        wanted.append(TensorKind.MAGNITUDE)
    _check_parts(config, module, parts, wanted)
    if more := parts.keys() - {*wanted, TensorKind.WEIGHT}:
        raise ModelLoadError(
            f"{config.folder / WEIGHTS} holds {_WORDS[more.pop()]} of {module}: of embeddings, "
            f"only A, B and magnitudes are served. {config.advise()}"
        )
    a, b = parts[TensorKind.EMBEDDING_A], parts[TensorKind.EMBEDDING_B]
    _check_rank(config, module, a, b)
    copies = (parts[TensorKind.WEIGHT],) if TensorKind.WEIGHT in parts else ()
    names, magnitude = (a[0], b[0]), parts.get(TensorKind.MAGNITUDE)
    return EmbeddingPair(module, a[1], b[1], names, config.scale(module), magnitude, copies)


def _check_rank(config: AdapterConfig, module: str, a: Named, b: Named) -> None:
    """Raise ModelLoadError unless A [r, ...] and B [..., r] have the module's rank."""
    rank, shapes = config.rank(module), (a[1].shape, b[1].shape)
    if any(len(shape) != 2 for shape in shapes) or (shapes[0][0], shapes[1][1]) != (rank, rank):
        raise ModelLoadError(
            f"{a[0]} and {b[0]} of {config.folder} are {list(shapes[0])} and {list(shapes[1])}, "
            f"which does not fit the rank {rank} of {CONFIG}"
        )


def _saved_matrix(
    config: AdapterConfig, module: str, parts: Mapping[TensorKind, Named]
) -> SavedMatrix:
    """Return a module's matrix; raises ModelLoadError if there is more of it."""
    _check_parts(config, module, parts, (TensorKind.WEIGHT,))
    if more := parts.keys() - {TensorKind.WEIGHT, TensorKind.BIAS}:
        raise ModelLoadError(
            f"{config.folder / WEIGHTS} holds {_WORDS[more.pop()]} of {module} beside its weight: "
            "of what is saved whole, only matrices and biases of heads are served. "
            f"{config.advise()}"
        )
    name, matrix = parts[TensorKind.WEIGHT]
    return SavedMatrix(module, matrix, name, parts.get(TensorKind.BIAS))


def _token_rows(config: AdapterConfig, module: str, parts: Mapping[TensorKind, Named]) -> TokenRows:
    """Return a module's rows; raises ModelLoadError unless they fit the configuration."""
    _check_parts(config, module, parts, (TensorKind.ROWS,))
    if more := parts.keys() - {TensorKind.ROWS, TensorKind.BIAS}:
        raise ModelLoadError(
            f"{config.folder / WEIGHTS} holds {_WORDS[more.pop()]} beside rows of tokens of "
            f"{module}: both together are not served. {config.advise()}"
        )
    name, rows = parts[TensorKind.ROWS]
    tokens = tuple(config.token_indices(module))
    if len(rows.shape) != 2 or rows.shape[0] != len(tokens) or len({*tokens}) != len(tokens):
        raise ModelLoadError(
            f"{name} of {config.folder} is {list(rows.shape)}, and {CONFIG} names {len({*tokens})} "
            f"different tokens of {module}"
        )
    return TokenRows(module, tokens, rows, name)


def _check_parts(
    config: AdapterConfig,
    module: str,
    parts: Mapping[TensorKind, Named],
    wanted: Sequence[TensorKind],
) -> None:
    """Raise ModelLoadError unless the wanted tensors are there, and all have served dtypes."""
    if lacking := [kind for kind in wanted if kind not in parts]:
        there = " and ".join(_WORDS[kind] for kind in parts)
        raise ModelLoadError(
            f"{config.folder / WEIGHTS} holds no {_WORDS[lacking[0]]} of {module}, only {there}"
        )
    for name, tensor in parts.values():
        if tensor.dtype not in FLOATS:
            raise ModelLoadError(
                f"{name} of {config.folder} is {tensor.dtype}; served are {', '.join(FLOATS)}"
            )
