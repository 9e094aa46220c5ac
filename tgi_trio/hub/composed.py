"""One folder for a model whose parts lie in several repositories: links, and a config.json of all.

Everything that reads a model reads a folder. So the parts are found, downloaded where that is
needed, and joined in a cache folder, whose name is made from all of their files.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tgi_trio.conversion.adapters import is_adapter
from tgi_trio.conversion.folder import NEW_INDEX
from tgi_trio.conversion.texts import SOURCES, list_text_files
from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.hub.folders import check_folder, is_gguf
from tgi_trio.hub.names import local_folder
from tgi_trio.model.checkpoint_files import find_safetensors
from tgi_trio.model.config import read_json
from tgi_trio.model.made_folders import OWN, cache_folder, write_folder
from tgi_trio.model.parts import PARTS, TEXT, TOWER, Part, join_configs, name_parts
from tgi_trio.model.wrappers import text_name

log = logging.getLogger("tgi_trio")

FetchPart = Callable[[str, str | None, str], Path]  # (repository, revision, who names it)
_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
_EXTRACTOR: Final = "preprocessor_config.json"
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")  # of no use as they are called


class _Joined(NamedTuple):
    """What a folder is made of."""

    config: bytes
    table: bytes  # of weights
    links: dict[str, Path]


def compose(folder: Path, fetch: FetchPart, *, auto_convert: bool = True) -> Path:
    """Return the folder of a model with all of its parts: `folder` itself, if it has them.

    Parts are those of their repositories' main branches: a revision is of the model's own alone.
    Raises ModelLoadError for a part that is not to be had or that cannot be one.
    """
    config = read_json(folder / _CONFIG) or {}
    named = name_parts(config)
    if not named:
        return folder
    places = {
        part: _find_part(part, name, folder, fetch, auto_convert) for part, name in named.items()
    }
    said = {part: read_json(place / _CONFIG) or {} for part, place in places.items()}
    made = _join(folder, places, json.dumps(join_configs(config, said), indent=2).encode())
    cache = cache_folder("composed")
    target = cache / _digest(made)
    try:
        if not target.is_dir():
            contents = {_CONFIG: made.config, NEW_INDEX: made.table}
            write_folder(target, contents, made.links)
    except OSError as error:
        raise ModelLoadError(
            f"what {folder} and its parts are together cannot be kept in {cache}: "
            f"{tell_reason(error)}. XDG_CACHE_HOME names another place"
        ) from error
    for part, name in named.items():
        log.info("%s is that of %s (%s)", part.section.removesuffix("_config"), name, part.field)
    return target


def _find_part(part: Part, name: str, folder: Path, fetch: FetchPart, auto_convert: bool) -> Path:
    """Return the folder of a part, ready to load; raises ModelLoadError."""
    flag = f"{part.field} of {folder / _CONFIG}"
    try:
        place = local_folder(name, flag)
        if place is None:
            place = fetch(name, None, flag)
        if is_gguf(place) or is_adapter(place):
            kind = "GGUF" if is_gguf(place) else "an adapter"
            raise ModelLoadError(f"{place} holds {kind}, and no weights as safetensors")
        place = check_folder(place, auto_convert=auto_convert)
        kind = str((read_json(place / _CONFIG) or {}).get("model_type"))
        if kind in PARTS:
            raise ModelLoadError(f"{place} is made of several repositories itself ({kind})")
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{part.field} of {folder} names {name}, without which it is not whole: {error}"
        ) from error
    return place


def _join(folder: Path, places: Mapping[Part, Path], config: bytes) -> _Joined:
    """Return what a folder of a model and its parts has; raises ModelLoadError."""
    links = {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.suffix not in _WEIGHTS and not path.name.startswith(".")
    }
    links.pop(_CONFIG, None)
    links.pop(NEW_INDEX, None)
    if TEXT in places:
        links |= _take_texts(folder, places[TEXT])
    if TOWER in places and (found := places[TOWER] / _EXTRACTOR).is_file():
        links.setdefault(_EXTRACTOR, found)
    own = find_safetensors(folder)
    index: dict[str, str] = {}
    for part, place in places.items():
        tensors = {
            name: file
            for name, file in find_safetensors(place).items()
            if name.startswith(part.names)
        }
        if part is TEXT and _has_text(folder, own, tensors, place):
            continue
        index |= _link(tensors, links, part.section.removesuffix("_config") + "-")
    index |= _link(own, links, OWN)
    said = {"metadata": {}, "weight_map": dict(sorted(index.items()))}
    return _Joined(config, json.dumps(said).encode(), links)


def _take_texts(folder: Path, text: Path) -> dict[str, Path]:
    """Return a text's files that the whole lacks: a tokenizer with all that belongs to it, ends."""
    found = {path.name: path for path in list_text_files(text) if path.parent == text}
    if any(any(folder.glob(pattern)) for pattern in SOURCES):
        found = {name: path for name, path in found.items() if name == _GENERATION}
    return {name: path for name, path in found.items() if not (folder / name).exists()}


def _has_text(folder: Path, own: Mapping[str, Path], text: Mapping[str, Path], place: Path) -> bool:
    """Return whether a folder has the weights of its text itself; raises ModelLoadError for some.

    `own`, `text`: the tensors of the folder, and of the one that it names.
    """
    named = {text_name(name) for name in own} & {text_name(name) for name in text}
    if named and len(named) < len(text):
        raise ModelLoadError(
            f"{folder} has {len(named)} of the {len(text)} tensors of its text, and names {place} "
            f"for it ({TEXT.field}): which of both hold is not known. Merge them into one model"
        )
    return bool(named)


def _link(tensors: Mapping[str, Path], links: dict[str, Path], begin: str) -> dict[str, str]:
    """Add links to the files of tensors, and return tensor -> link."""
    links |= {begin + file.name: file.absolute() for file in set(tensors.values())}
    return {name: begin + file.name for name, file in tensors.items()}


def _digest(made: _Joined) -> str:
    """Return a name from all that a folder has; of linked files from paths, sizes and times."""
    digest = hashlib.sha256(made.config + made.table)
    for name, path in sorted(made.links.items()):
        state = path.stat()
        digest.update(f"{name}\0{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]
