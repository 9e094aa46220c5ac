"""Which GGUF file of a folder or a repository is meant, and the model folder that is made of it.

A repository of the hub often has a model in a dozen types: `owner/name:Q4_K_M` says which, and that
file alone is downloaded, or its parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.download import download, list_files
from tgi_trio.hub.names import is_there
from tgi_trio.hub.projectors import (
    NO_PROJECTOR,
    WantedProjector,
    fetch_projector,
    find_local,
    make_folder,
)
from tgi_trio.hub.repository import Repository
from tgi_trio.model.gguf.files import SUFFIX, list_parts, parse_part_name
from tgi_trio.model.pointers import refuse_pointers

# Files beside a model that are none: what sees and hears for it, what drafts for it, and what
# quantising it was weighed by.
_NO_MODELS: Final = re.compile(r"(?:mmproj|imatrix|mtp)[-_.]|.*[-_.](?:mmproj|imatrix)\b", re.I)
_MOST_NAMED: Final = 30  # choices in an error


def split_choice(model_id: str, flag: str) -> tuple[str, str]:
    """Return (name, choice) of a flag's `name:choice`; the choice is "" where there is none."""
    name, colon, choice = model_id.rpartition(":")
    if not colon or not name or not choice or is_there(model_id, flag):
        return model_id, ""
    return name, choice


def local_gguf(
    place: Path,
    choice: str,
    *,
    tokenizer: bool = True,
    projector: WantedProjector = NO_PROJECTOR,
    flag: str,
) -> Path:
    """Return a model folder of a GGUF file, or of one in a folder, which `flag` names.

    Raises ModelLoadError.
    """
    among = place.is_dir()
    if among:
        names = [path.name for path in place.glob(f"*{SUFFIX}")]
        place = place / choose(names, choice, str(place), flag, local=True)
    elif choice:
        raise ModelLoadError(f"{place} is one file, so {choice!r} chooses nothing of it")
    refuse_pointers([place])
    tower = find_local(projector, place, among=among)
    return make_folder(place, tower, projector, tokenizer=tokenizer)


def has_gguf(folder: Path) -> bool:
    """Return whether a folder holds a model as GGUF."""
    return folder.is_dir() and bool(_models(path.name for path in folder.glob(f"*{SUFFIX}")))


def lists_gguf(repository: Repository) -> bool:
    """Return whether a repository of the hub has a model as GGUF; raises ModelLoadError."""
    return bool(_models(list_files(repository)))


def fetch_gguf(
    repository: Repository,
    choice: str,
    *,
    tokenizer: bool = True,
    projector: WantedProjector = NO_PROJECTOR,
) -> Path:
    """Return a model folder of a file of a repository, which is downloaded, with all of its parts.

    Raises ModelLoadError.
    """
    names = list_files(repository)
    first = choose(names, choice, repository.name, repository.flag)
    folder, _, file = first.rpartition("/")
    wanted = [f"{folder}/{part}" if folder else part for part in list_parts(file)]
    model = download(repository, wanted, ()) / first
    tower = fetch_projector(projector, repository, first, names)
    return make_folder(model, tower, projector, tokenizer=tokenizer)


def choose(names: Iterable[str], choice: str, place: str, flag: str, *, local: bool = False) -> str:
    """Return the one file of a model that `choice` names: by its type, or whole.

    Of a split model the first part. Raises ModelLoadError where it is none, or not one alone.
    """
    models = _models(names)
    found = models if not choice else [name for name in models if _is_named(name, choice)]
    exact = [name for name in found if name == choice]
    if len(found := exact or found) == 1:
        return found[0]
    if not models:
        raise ModelLoadError(f"{place} holds no {SUFFIX} file to choose {choice!r} from")
    several = "no" if not found else "several"
    which = f"GGUF files for {choice!r}" if choice else "GGUF files, each a model"
    listed = ", ".join(models[:_MOST_NAMED]) + (", ..." if len(models) > _MOST_NAMED else "")
    example = f"{place}/{models[0]}" if local else f"{place}:{models[0].rpartition('/')[2]}"
    raise ModelLoadError(
        f"{place} holds {several} {which}: {flag} takes one, such as {example}. There are {listed}"
    )


def _models(names: Iterable[str]) -> list[str]:
    """Return the files that are models, of split ones the first part."""
    found = (
        name for name in names
        if name.endswith(SUFFIX) and not _NO_MODELS.match(name.rpartition("/")[2])
    )  # fmt: skip
    parts = ((name, parse_part_name(name.rpartition("/")[2])) for name in found)
    return sorted(name for name, part in parts if part is None or part[1] == 1)


def _is_named(name: str, choice: str) -> bool:
    """Return whether a file's name is the choice, or says it as a word: `model-Q4_K_M.gguf`."""
    file = name.rpartition("/")[2]
    if choice in (name, file):
        return True
    part = parse_part_name(file)
    stem = file.removesuffix(SUFFIX) if part is None else part[0]
    return (
        re.search(rf"(?:^|[-.]|_(?=[a-z]+\d)){re.escape(choice)}$", stem, re.IGNORECASE) is not None
    )
