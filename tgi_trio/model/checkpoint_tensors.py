"""The tensors of a model's folder, whatever the format of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tgi_trio.model.checkpoint_files import StoredTensor, find_safetensors, read_headers
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.gguf.files import find_gguf
from tgi_trio.model.gguf.tensors import read_gguf_tensors
from tgi_trio.model.matrices.ngrams import drop_hashes
from tgi_trio.model.mlx_names import undo_mlx
from tgi_trio.model.published_names import rename_family
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.stacked_experts import flatten_vectors, split_experts
from tgi_trio.model.wrappers import rename_text

SUFFIXES: Final = (".safetensors", ".gguf")  # of weight files


def read_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return every tensor of a model by our name: experts are separate tensors.

    Raises ModelLoadError as `read_headers`, `drop_hashes`, `undo_mlx`, `split_experts` and
    `read_gguf_tensors` do.
    """
    if files := gguf_files(config.folder):
        return read_gguf_tensors(files, config)
    tensors, spec = read_headers(config.folder), decoder_spec(config)
    if spec is None:
        return tensors
    if config.wraps_text:
        tensors = rename_text(tensors)
    tensors = name_embedding(rename_family(tensors, spec.family), spec)
    tensors = undo_mlx(tensors, spec, config.text_type)
    return flatten_vectors(split_experts(drop_hashes(tensors, spec), spec), spec)


def name_embedding(tensors: dict[str, StoredTensor], spec: DecoderSpec) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors with a tied head under its embedding's name, if it lacks that.

    `safetensors.torch.save_model`, and accelerate by it, write shared tensors once, under the first
    of their names; so do transformers read them.
    """
    names = spec.names
    table, head = f"{names.embedding}.weight", f"{names.head}.weight"
    there = {table, table.removeprefix(names.base)} & tensors.keys()
    if there or not spec.tied_head or head not in tensors:
        return tensors
    return {table if name == head else name: stored for name, stored in tensors.items()}


def weight_files(folder: Path) -> list[Path]:
    """Return the files from which a model is loaded; raises as `read_headers` does."""
    return gguf_files(folder) or sorted(set(find_safetensors(folder).values()))


def weight_bytes(folder: Path) -> int:
    """Return the size of a folder's weights on disk."""
    files = (path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}"))
    return sum(path.stat().st_size for path in files)


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder without other weights; [] if it has others."""
    return [] if any(folder.glob("*.safetensors")) else find_gguf(folder)
