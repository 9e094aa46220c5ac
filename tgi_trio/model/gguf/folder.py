"""A GGUF model as a model folder: config, tokenizer and chat template as files beside its weights.

Everything that reads a model reads a folder, in several processes. So a file's metadata is
translated into such files once, in a cache folder named by what it was made from; the weights are
links. A projector beside it makes it the folder of a model that sees.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.model.gguf.config import make_config
from tgi_trio.model.gguf.files import GgufModel, find_gguf, list_parts, read_model
from tgi_trio.model.gguf.projectors.composite import make_composite
from tgi_trio.model.gguf.projectors.placeholder import with_placeholder
from tgi_trio.model.gguf.projectors.table import is_projector, read_projector
from tgi_trio.model.gguf.tokenizer import (
    end_ids,
    make_tokenizer,
    make_tokenizer_config,
    read_vocabulary,
)
from tgi_trio.model.made_folders import cache_folder, write_folder

# What the link to a projector is called in such a folder: not as the files of the text are.
PROJECTOR: Final = "projector"


def gguf_folder(
    file: Path,
    cache: Path | None = None,
    *,
    tokenizer: bool = True,
    projector: Path | None = None,
) -> Path:
    """Return a model folder for a GGUF file, or for the split model that it is a part of.

    `cache`: the folder for such folders. `tokenizer`: whether to include one. `projector`: the file
    of the tower with which it sees; None: the text alone. Raises ModelLoadError for a file, or a
    model in it, that is not supported.
    """
    folder = file.parent.absolute()
    files = [folder / name for name in list_parts(file.name)]
    if missing := [path.name for path in files if not path.is_file()]:
        raise ModelLoadError(
            f"{folder} lacks {', '.join(missing)}: a split model is served from all of its parts."
        )
    cache = cache or cache_folder("gguf")
    read = files if projector is None else [*files, projector.absolute()]
    target = cache / (_digest(read) + ("" if tokenizer else "-no-tokenizer"))
    try:
        if not target.is_dir():
            links = {path.name: path for path in files}
            links |= {} if projector is None else {PROJECTOR: projector.absolute()}
            write_folder(target, _metadata_files(files, tokenizer, projector), links)
    except OSError as error:
        raise ModelLoadError(
            f"what {file} says of its model cannot be kept in {cache}: {tell_reason(error)}. "
            "XDG_CACHE_HOME names another place"
        ) from error
    return target


def find_projector(folder: Path) -> Path | None:
    """Return the projector of a folder that `gguf_folder` has made, None if it has none."""
    found = folder / PROJECTOR
    if not found.is_file() or not find_gguf(folder):
        return None
    return found.readlink() if found.is_symlink() else found  # as errors name it


def _metadata_files(files: list[Path], tokenizer: bool, projector: Path | None) -> dict[str, bytes]:
    """Return name -> content of a model folder's files besides its weights."""
    model = read_model(files, vocabulary=True)
    _refuse_projector(model, files[0])
    config = make_config(model, files)
    vocabulary = read_vocabulary(model.metadata, files[0])
    ids = {name: vocabulary.role(name) for name in ("bos", "eos")}
    config |= {f"{name}_token_id": each for name, each in ids.items() if each is not None}
    contents: dict[str, Mapping[str, Any]] = {"config.json": config}
    if projector is not None:
        tower, kind = read_projector(projector)
        if (padding := vocabulary.role("padding")) is not None:
            config["pad_token_id"] = padding  # as which layers of Gemma 4 read an image's tokens
        contents = make_composite(model, config, tower, kind, projector)
        if tokenizer:
            vocabulary = with_placeholder(vocabulary, kind.placeholder, files[0])
    large: dict[str, bytes] = {}
    if ends := end_ids(vocabulary):
        contents["generation_config.json"] = {"eos_token_id": ends}
    if tokenizer:
        large["tokenizer.json"] = orjson.dumps(make_tokenizer(vocabulary, files[0]))
        contents["tokenizer_config.json"] = make_tokenizer_config(vocabulary)
    return {name: json.dumps(content).encode() for name, content in contents.items()} | large


def _refuse_projector(model: GgufModel, file: Path) -> None:
    if is_projector(model):
        raise ModelLoadError(
            f"{file} is a projector, the tower of a model that sees, and no model: --model-id "
            "takes the model's own file, --mmproj this one"
        )


def _digest(files: list[Path]) -> str:
    """Return a name for the folder that this version of the package makes from these files."""
    digest = hashlib.sha256()
    for path in files:
        state = path.stat()
        digest.update(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]
