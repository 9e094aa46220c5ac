"""Downloads from the hub: a snapshot of some of a repository's files, and why there is none."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError

log = logging.getLogger("tgi_trio")

_TOKEN_VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")


@dataclass(frozen=True, kw_only=True)
class Repository:
    """What is to be downloaded, and how."""

    name: str  # owner/name
    revision: str | None = None  # branch, tag, commit or refs/pr/N; None: main
    cache_dir: Path | None = None  # None: huggingface_hub's
    token: str | None = None  # None lets huggingface_hub use a stored login
    progress: bool = True  # bars on stderr
    flag: str = "--model-id"  # which names it, for errors


def hub_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the first token that is set in the environment, without the space around it.

    What writes variables from files often leaves a line's end in them. Raises ModelLoadError for a
    token that no header can carry; the text does not have it.
    """
    for name in _TOKEN_VARIABLES:
        if token := environ.get(name, "").strip():
            if not (token.isascii() and token.isprintable()):
                raise ModelLoadError(f"{name} is no token: it has letters beyond printable ASCII")
            return token
    return None


def import_huggingface_hub() -> Any:
    """Import the package: a third of a second, which most starts do not need to spend.

    It tells the hub nothing of this machine then, unless HF_HUB_DISABLE_TELEMETRY has it do so.
    """
    import huggingface_hub
    from huggingface_hub import constants

    # We promise that nothing is reported to anyone. Not by the variable: that would be everybody's
    # in this process, and comes too late where the package has been imported.
    if "HF_HUB_DISABLE_TELEMETRY" not in os.environ:
        vars(constants)["HF_HUB_DISABLE_TELEMETRY"] = True
    return huggingface_hub


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
        raise ModelLoadError(_explain(error, repository)) from error
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
        raise ModelLoadError(_explain(error, repository)) from error
    except Exception as error:  # of whichever HTTP library this version of the package uses
        log.warning("the hub does not list the files of %s: %s", name, str(error).split("\n")[0])
    folder = download(repository, ["no file is called so"], ())
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _explain(error: Exception, repository: Repository) -> str:
    """Return one paragraph: what went wrong with a download and what to do."""
    from huggingface_hub import constants, errors

    name, flag = repository.name, repository.flag
    with_token = "with the token that is set"
    if not repository.token:
        with_token = "without a token (HF_TOKEN is not set)"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the hub repository {name} is gated and cannot be read {with_token}. Accept its "
            f"terms at {constants.ENDPOINT}/{name}, then set HF_TOKEN to its token"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no hub repository {name} that can be read {with_token}, and no such "
            f"local folder. Check the spelling of {flag}; a private repository needs HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub repository {name} has no revision {repository.revision}: check --revision"
    if isinstance(error, errors.HFValidationError):
        return (
            f"{name!r} is neither a local folder nor the name of a hub repository "
            f"(owner/name): check {flag}"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = f"{constants.ENDPOINT} cannot be reached"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        elif isinstance(error.__cause__, errors.HfHubHTTPError):
            why = (
                f"{constants.ENDPOINT} answered with status {error.__cause__.response.status_code}"
            )
        otherwise = ""
        if flag == "--model-id":
            otherwise = ", or leave it out to serve the embedded model"
        return (
            f"the cache does not hold all of {name} and it cannot be downloaded: {why}. "
            "Connect this machine, or download it on another with `python -m tgi_trio "
            f"download-weights {name}` and copy the folder here for {flag}{otherwise}"
        )
    return f"downloading {name} failed: {type(error).__name__}: {error}"
