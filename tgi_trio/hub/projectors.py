"""Which projector makes a GGUF model see: the file that --mmproj names, or one beside the model.

As in llama.cpp, a repository's projector comes with its model unless it is declined. There it is
the one whose bits are closest to the model's; here F16 comes first, then BF16, whatever the model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.hub.download import download
from tgi_trio.hub.names import is_there
from tgi_trio.hub.repository import Repository
from tgi_trio.model.gguf.files import SUFFIX
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.model.gguf.projectors.table import hears, read_projector
from tgi_trio.model.pointers import refuse_pointers

log = logging.getLogger("tgi_trio")

FLAG: Final = "--mmproj"
_NAME: Final = re.compile(r"mmproj[-_.].*|.*[-_.]mmproj\b.*", re.I)
_TYPES: Final = ("f16", "bf16")  # the first that there is


@dataclass(frozen=True, slots=True)
class WantedProjector:
    """What --mmproj and --no-mmproj say."""

    name: str | None = None  # a path, or a file of the model's folder or repository
    declined: bool = False  # the text alone


NO_PROJECTOR: Final = WantedProjector(declined=True)


def want_projector(name: str | None, declined: bool) -> WantedProjector:
    """Return what the two flags say together; raises ConfigurationError where both are given."""
    if name is not None and declined:
        raise ConfigurationError("--mmproj and --no-mmproj exclude each other: leave one out")
    return WantedProjector(name, declined)


def is_projector_name(name: str) -> bool:
    """Return whether a path is that of a projector, by how such files are called."""
    return name.endswith(SUFFIX) and _NAME.fullmatch(PurePosixPath(name).name) is not None


def choose_projector(names: Iterable[str], model: str) -> str | None:
    """Return the projector among paths that comes with a model of them, None if there is none.

    It lies in the model's folder or in one around it, the nearest first.
    """
    around = PurePosixPath(model).parents
    found = [
        name for name in names
        if is_projector_name(name) and PurePosixPath(name).parent in around
    ]  # fmt: skip
    return min(found, key=lambda name: (-len(PurePosixPath(name).parts), _rank(name)), default=None)


def _rank(name: str) -> tuple[int, str]:
    words = re.split(r"[-_.]", PurePosixPath(name).name.lower())
    found = (place for place, kind in enumerate(_TYPES) if kind in words)
    return next(found, len(_TYPES)), name


def find_local(wanted: WantedProjector, model: Path, *, among: bool) -> Path | None:
    """Return the projector of a local model, None for its text alone.

    `model`: its file; `among`: whether the model was named by the folder, so that one beside it
    comes with it. Raises ModelLoadError where the one that is wanted is not there.
    """
    if wanted.declined:
        return None
    folder = model.parent
    if wanted.name is None:
        names = [path.name for path in folder.iterdir()] if among else []
        found = choose_projector(names, model.name)
        return None if found is None else folder / found
    if is_there(wanted.name, FLAG):
        return _check_file(Path(wanted.name).expanduser())
    if (folder / wanted.name).exists():
        return _check_file(folder / wanted.name)
    raise ModelLoadError(
        f"there is no file {wanted.name}, here or beside {model}: {FLAG} takes a projector, a file "
        "such as mmproj-F16.gguf"
    )


def fetch_projector(
    wanted: WantedProjector, repository: Repository, model: str, names: Iterable[str]
) -> Path | None:
    """Return the projector of a repository's model, which is downloaded; None: the text alone.

    `model`: its file among the repository's `names`. A path of this machine comes before them.
    Raises ModelLoadError where the one that is wanted is not there.
    """
    if wanted.declined:
        return None
    if wanted.name is not None and is_there(wanted.name, FLAG):
        return _check_file(Path(wanted.name).expanduser())
    listed = sorted(names)
    found = choose_projector(listed, model)
    if wanted.name is not None:
        alike = [each for each in listed if wanted.name in (each, PurePosixPath(each).name)]
        if not alike:
            there = [each for each in listed if is_projector_name(each)]
            raise ModelLoadError(
                f"there is no file {wanted.name}, here or in {repository.name}: {FLAG} takes a "
                f"projector. There {_count(there)}"
            )
        found = alike[0]
    return None if found is None else download(repository, [found], ()) / found


def _count(projectors: list[str]) -> str:
    return f"are {', '.join(projectors)}" if projectors else "is none in that repository"


def _check_file(place: Path) -> Path:
    if not place.is_file():
        raise ModelLoadError(
            f"{place} is no file: {FLAG} takes a projector, such as mmproj-F16.gguf"
        )
    refuse_pointers([place])
    return place


def make_folder(
    model: Path, projector: Path | None, wanted: WantedProjector, *, tokenizer: bool
) -> Path:
    """Return a model folder of a file, with a projector if there is one.

    One that nobody has named is left out, with a warning, where it cannot be used. Raises
    ModelLoadError as `gguf_folder` does.
    """
    try:
        folder = gguf_folder(model, tokenizer=tokenizer, projector=projector)
    except ModelLoadError as error:
        if projector is None or wanted.name is not None:
            raise
        folder = gguf_folder(model, tokenizer=tokenizer)
        log.warning("images are not served, the text is: %s", error)
        return folder
    if projector is not None and hears(read_projector(projector)[0]):
        log.warning("sounds are not served: of %s what sees is read alone", projector)
    return folder
