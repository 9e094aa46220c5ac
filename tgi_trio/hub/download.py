"""Downloads from the hub: a snapshot of some of a repository's files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.failures import explain_failure
from tgi_trio.hub.library import import_huggingface_hub
from tgi_trio.hub.repository import Repository

log = logging.getLogger("tgi_trio")


def download(repository: Repository, wanted: Sequence[str], unwanted: Sequence[str]) -> Path:
    """Return the folder of a snapshot that has the files of some patterns.

    Blocks for as long as that takes. HF_HUB_OFFLINE, HF_ENDPOINT and HF_HOME mean what they mean to
    huggingface_hub. Raises ModelLoadError, saying what to do.
    """
    hub = import_huggingface_hub()
    from tqdm.auto import tqdm

    class Quiet(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

    try:
        folder = hub.snapshot_download(
            repository.name,
            revision=repository.revision,
            cache_dir=repository.cache_dir,
            token=repository.token,
            allow_patterns=list(wanted),
            ignore_patterns=list(unwanted),
            tqdm_class=None if repository.progress else Quiet,
        )
    except Exception as error:
        raise ModelLoadError(explain_failure(error, repository)) from error
    return Path(folder)


def list_files(repository: Repository) -> list[str]:
    """Return the paths of a repository's files.

    Where the hub is out of reach, of those that are in the cache. Raises ModelLoadError, saying
    what to do.
    """
    hub = import_huggingface_hub()
    from huggingface_hub import constants, errors

    name, revision = repository.name, repository.revision
    try:
        if not constants.HF_HUB_OFFLINE:
            # Not `list_repo_files`, which tries again for half a minute without a network.
            found = hub.HfApi().model_info(name, revision=revision, token=repository.token)
            return [sibling.rfilename for sibling in found.siblings or ()]
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ModelLoadError(explain_failure(error, repository)) from error
    except Exception as error:  # of whichever HTTP library this version of the package uses
        log.warning("the hub does not list the files of %s: %s", name, str(error).split("\n")[0])
    folder = download(repository, ["no file is called so"], ())
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
