"""A LoRA adapter merged into its base: W + (alpha / r) B A for every matrix that it targets.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; with rsLoRA the factor is
alpha / sqrt(r). Files are those of PEFT: `adapter_config.json` and `adapter_model.safetensors` or
`.bin`. Sums are made in float32 and rounded once to the base's dtype. What is not such a sum (DoRA,
embeddings, modules saved whole, biases) is refused by name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.conversion.convert import view_strided
from tgi_trio.conversion.floats import WIDENED, narrow, widen
from tgi_trio.conversion.folder import model_files
from tgi_trio.conversion.safetensors_file import (
    SafetensorsFile,
    TensorEntry,
    lay_out,
    write_safetensors,
)
from tgi_trio.conversion.torch_file import open_torch_file
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import AdapterConfig, read_adapter_config
from tgi_trio.model.config import read_config

Matrix = NDArray[np.float32]
_KEY: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_TRANSPOSED: Final = ("gpt2", "openai-gpt")  # their Conv1D holds [in, out]
_COPIED: Final = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")


@dataclass(frozen=True)
class Adapter:
    """What an adapter adds."""

    config: AdapterConfig
    pairs: Mapping[str, tuple[Matrix, Matrix]]  # module -> A [r, in], B [out, r]

    def delta(self, module: str) -> Matrix:
        """Return what is added to a module's matrix: float32 [out, in]."""
        a, b = self.pairs[module]
        rank = self.config.rank(module)
        if a.ndim != 2 or b.ndim != 2 or len(a) != rank or b.shape[1] != rank:
            raise ModelLoadError(
                f"the adapter's matrices of {module} are {list(a.shape)} and {list(b.shape)}, "
                f"which does not fit the rank {rank} of adapter_config.json"
            )
        return np.float32(self.config.scale(module)) * (b @ a)


def merge_adapter(adapter: Path, base: Path, target: Path, say: Callable[[str], None]) -> None:
    """Write the folder `target`, which is not there: `base`, an adapter merged into its weights.

    Everything else, the tokenizer too, is the base's. Raises ModelLoadError, naming what cannot be
    merged, and OSError.
    """
    found = read_adapter(adapter)
    config = read_config(base)
    if config.get("quantization_config"):
        raise ModelLoadError(
            f"{base} has quantised weights, which nothing can be added to: name a base in 16 or 32 "
            "bits as base_model_name_or_path of adapter_config.json"
        )
    files = [SafetensorsFile.open(path) for path in model_files(base)]
    owners = _owners(found, [name for file in files for name in file.table])
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    transposed = bool(found.config.values.get("fan_in_fan_out"))
    transposed |= config.model_type in _TRANSPOSED
    for number, file in enumerate(files, 1):
        say(f"merging into {file.path.name}, {number} of {len(files)}")
        entries = [
            _merge_entry(file, name, partial(found.delta, owners[name]), transposed)
            if name in owners
            else file.entry(name)
            for name in file.table
        ]
        write_safetensors(part / file.path.name, lay_out(entries, {}))
    for path in sorted(base.rglob("*.jinja")) + sorted(base.iterdir()):
        if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".bin.index.json"):
            copy = part / path.relative_to(base)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    part.replace(target)


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter; raises ModelLoadError for what cannot be merged, naming it."""
    config = read_adapter_config(folder)
    if refused := config.find_refused():
        raise ModelLoadError(_not_merged(folder, ", ".join(refused)))
    halves: dict[str, dict[str, Matrix]] = {}
    for name, matrix in _adapter_tensors(folder):
        match = _KEY.fullmatch(name)
        if match is None:
            raise ModelLoadError(_not_merged(folder, f"the tensor {name!r}"))
        halves.setdefault(match[1], {})[match[2]] = matrix
    if alone := [module for module, pair in halves.items() if len(pair) < 2]:
        raise ModelLoadError(f"{folder} holds only one of the two matrices of {alone[0]}")
    if not halves:
        raise ModelLoadError(f"{folder} holds an adapter without tensors")
    return Adapter(config, {module: (pair["A"], pair["B"]) for module, pair in halves.items()})


def _not_merged(folder: Path, what: str) -> str:
    return (
        f"{folder} cannot be merged because of {what}: only LoRA matrices of linear layers are. "
        "Merge it with PEFT (merge_and_unload, then save_pretrained) and serve that folder"
    )


def _adapter_tensors(folder: Path) -> Iterator[tuple[str, Matrix]]:
    path = folder / "adapter_model.safetensors"
    if path.is_file():
        file = SafetensorsFile.open(path)
        for name in file.table:
            yield name, file.floats(name)
        return
    with open_torch_file(folder / "adapter_model.bin") as opened:
        for name, tensor in opened.tensors.items():
            if tensor.dtype not in WIDENED or 0 in tensor.shape:
                raise ModelLoadError(f"{name!r} in {opened.path} is {tensor.dtype}, no float")
            yield name, widen(np.ascontiguousarray(view_strided(opened, tensor)), tensor.dtype)


def _owners(adapter: Adapter, names: list[str]) -> dict[str, str]:
    """Return tensor of the base -> module of the adapter.

    A checkpoint of a bare model leaves out the first part of every name, an adapter of one does.
    """
    owners: dict[str, str] = {}
    for module in adapter.pairs:
        wanted = f"{module}.weight"
        short = wanted.partition(".")[2]
        longer = [name for name in names if name.endswith(f".{wanted}")]
        found = wanted if wanted in names else short if short in names else None
        if found is None and len(longer) == 1:
            found = longer[0]
        if found is None:
            raise ModelLoadError(
                f"the adapter changes {module}, and the base has no {wanted}: it is made for "
                "another base, or for a layer that shares its weights with the embedding"
            )
        if found in owners:
            raise ModelLoadError(f"the adapter changes {found} twice")
        owners[found] = module
    return owners


def _merge_entry(
    file: SafetensorsFile, name: str, delta: Callable[[], Matrix], transposed: bool
) -> TensorEntry:
    """Return an entry whose bytes are the sum, made when they are written."""
    entry = file.entry(name)
    if entry.dtype not in WIDENED:
        raise ModelLoadError(f"{name} of the base is {entry.dtype}: nothing can be added to it")

    def parts() -> Iterator[Any]:
        base, added = file.floats(name), delta()
        flipped = base.shape == added.shape[::-1]
        if (flipped and base.shape != added.shape) or (flipped and transposed):
            added = added.T
        if base.shape != added.shape:
            raise ModelLoadError(
                f"{name} of the base is {list(base.shape)}, what the adapter adds "
                f"{list(added.shape)}: it is made for another base"
            )
        total = narrow(base + added, entry.dtype)
        if not np.isfinite(widen(_raw(total), entry.dtype)).all():
            raise ModelLoadError(f"{name} with the adapter is not finite in {entry.dtype}")
        yield np.ascontiguousarray(total).reshape(-1)

    return TensorEntry(entry.name, entry.dtype, entry.shape, entry.size, parts)


def _raw(values: NDArray[Any]) -> NDArray[Any]:
    return values.view({2: np.uint16, 4: np.uint32}[values.itemsize])
