"""Medusa heads' files: those of Medusa's authors and TGI (V1, V2), and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.matrices.references import (
    LinearRef,
    MatrixRef,
    stack_matrices,
    whole_linear,
    whole_units,
)
from tgi_trio.model.speculators.spec import MedusaSpec


@dataclass(frozen=True, slots=True)
class _Names:
    """A format's names for parts of heads; {i}: the head, {j}: the layer."""

    heads: tuple[str, ...]  # keys of config.json
    layers: tuple[str, ...]
    block: str  # its weight is ".weight", its bias ".bias"
    head: str  # {n}: the number of layers


# In Medusa V1 each head has its own matrix after the blocks, in V2 the model's: tensors show which.
_FORMATS: Final = {
    "medusa": _Names(
        ("medusa_num_heads",), ("medusa_num_layers",), "{i}.{j}.linear", "{i}.{n}.weight"
    ),
    "vllm": _Names(
        ("num_heads", "medusa_num_heads"),
        ("num_hidden_layers", "medusa_num_layers"),
        "blocks.{i}.layers.{j}",
        "lm_heads.{i}.weight",
    ),
}


def is_medusa(values: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a folder has Medusa heads without a model."""
    if values.get("model_type") == "medusa":
        return True
    whole = any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*"))
    heads = any(folder.glob("medusa_lm_head.*"))
    return bool(values.get("medusa_num_heads")) and heads and not whole


def read_medusa(
    folder: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    *,
    hidden: int,
    vocabulary: int,
) -> MedusaSpec:
    """Return a folder's heads, for a model with these numbers of hidden features and tokens.

    Raises ModelLoadError, naming what is wrong.
    """
    prefix = "medusa_heads." if any(n.startswith("medusa_heads.") for n in tensors) else ""
    kind = "vllm" if f"{prefix}blocks.0.layers.0.weight" in tensors else "medusa"
    names = _FORMATS[kind]
    heads = _count(folder, values, names.heads)
    layers = _count(folder, values, names.layers, default=1)

    def block(i: int, j: int) -> MatrixRef:
        name = prefix + names.block.format(i=i, j=j)
        bias = f"{name}.bias" if f"{name}.bias" in tensors else ""
        return MatrixRef(f"{name}.weight", hidden, hidden, bias=bias)

    own = [prefix + names.head.format(i=i, n=layers) for i in range(heads)]
    shares = own[0] not in tensors
    blocks = [[block(i, j) for j in range(layers)] for i in range(heads)]
    linears: dict[str, LinearRef] = {
        "first": stack_matrices([each[0] for each in blocks], whole_units(hidden))
    }
    for i, each in enumerate(blocks):
        linears |= {f"{i}.{j}": whole_linear(ref) for j, ref in enumerate(each) if j}
    token_map = ""
    if not shares:
        rows = tensors[own[0]].shape[0]
        if rows != vocabulary:
            token_map = f"{prefix}token_map"
            _check_map(folder, tensors, token_map, rows)
        linears |= {
            f"head {i}": whole_linear(MatrixRef(name, rows, hidden)) for i, name in enumerate(own)
        }
    read = [name for each in blocks for ref in each for name in (ref.name, ref.bias) if name]
    return MedusaSpec(
        folder=folder,
        heads=heads,
        linears=linears,
        tensors=(*read, *(own if not shares else ()), *([token_map] if token_map else ())),
        layers=layers,
        shares_head=shares,
        token_map=token_map,
    )


def _check_map(folder: Path, tensors: Mapping[str, StoredTensor], name: str, rows: int) -> None:
    if name not in tensors or tensors[name].shape != (rows,):
        raise ModelLoadError(
            f"the heads in {folder} have {rows} tokens, which is not the model's vocabulary, and "
            f"no tensor {name!r} [{rows}] says which they are"
        )


def _count(
    folder: Path, values: Mapping[str, Any], keys: tuple[str, ...], default: int | None = None
) -> int:
    found = next((values[key] for key in keys if values.get(key) is not None), default)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 < found <= 64:
        raise ModelLoadError(
            f"{folder / 'config.json'} says {keys[0]} {found!r}; a number from 1 to 64 is needed"
        )
    return found
