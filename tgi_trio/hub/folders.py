"""Whether a folder can be served as it is, or with its pickles converted."""

from __future__ import annotations

import logging
import os
import shlex
from pathlib import Path

from tgi_trio.conversion import child
from tgi_trio.conversion.adapters import is_adapter
from tgi_trio.conversion.folder import (
    NEW_INDEX,
    conversion_due,
    find_pickles,
    list_weights,
    read_index,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.gguf import has_gguf
from tgi_trio.hub.names import hint_at_models
from tgi_trio.model.pointers import refuse_pointers

log = logging.getLogger("tgi_trio")


def check_heads(folder: Path, *, auto_convert: bool = True) -> Path:
    """Return a folder of heads, their pickle converted where there is no more.

    Raises ModelLoadError where it holds none.
    """
    if conversion_due(folder):
        _convert(folder, auto_convert)
    if not list_weights(folder):
        raise ModelLoadError(f"{folder} holds no heads: not one .safetensors, .bin or .pt file")
    return folder


def check_folder(folder: Path, *, auto_convert: bool = True) -> Path:
    """Return `folder` if a model can be loaded from it, pickles converted where there is no more.

    Raises ModelLoadError if not.
    """
    if is_gguf(folder):
        raise ModelLoadError(
            f"{folder} holds weights as GGUF, which no adapter is merged into: name the model's "
            "original .safetensors weights as the adapter's base"
        )
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder, which holds a model's files")
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"{folder} holds no config.json, so it is not a model folder as save_pretrained "
            f"writes it{hint_at_models(folder)}"
        )
    refuse_pointers([*(list_weights(folder) or find_pickles(folder)), folder / "tokenizer.json"])
    if conversion_due(folder):
        _convert(folder, auto_convert)
    weights = {path.name for path in list_weights(folder)}
    if missing := sorted(set(read_index(folder / NEW_INDEX).values()) - weights):
        raise ModelLoadError(
            f"{folder} is incomplete: {NEW_INDEX} names {', '.join(missing)}, "
            f"which {'is' if len(missing) == 1 else 'are'} not there. Download or copy it again"
        )
    if not weights:
        raise ModelLoadError(f"{folder} holds no weights: not one .safetensors, .bin or .pt file")
    return folder


def is_gguf(place: Path) -> bool:
    """Return whether a model is there as GGUF alone."""
    return place.suffix == ".gguf" or (has_gguf(place) and not has_weights(place))


def has_weights(folder: Path) -> bool:
    """Return whether a model or an adapter is there, as safetensors or as pickles."""
    return is_adapter(folder) or bool(list_weights(folder) or find_pickles(folder))


def _convert(folder: Path, auto_convert: bool) -> None:
    """Write a folder's pickles as safetensors; raises ModelLoadError."""
    if not auto_convert:
        raise ModelLoadError(
            f"{folder} has its weights in pickle files (.bin, .pt) alone, and only .safetensors is "
            "served: leave --no-auto-convert out, and they are converted without being run"
        )
    if not os.access(folder, os.W_OK):
        copy = shlex.quote(f"{folder.resolve().name}-safetensors")
        raise ModelLoadError(
            f"{folder} has its weights in pickle files (.bin, .pt) alone, and cannot be written "
            "to. Convert a copy and serve that:\n"
            f"  cp -rL {shlex.quote(str(folder))} {copy} && "
            f"python -m tgi_trio download-weights {copy}"
        )
    log.info("the weights of %s are pickles: they are converted, none is run", folder)
    child.convert(folder, find_pickles(folder))
