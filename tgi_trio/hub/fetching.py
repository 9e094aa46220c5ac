"""Which of a hub repository's files are downloaded: what serving needs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tgi_trio.conversion.adapters import is_adapter
from tgi_trio.conversion.folder import find_pickles, list_weights
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.brought_adapters import fetch_adapters
from tgi_trio.hub.download import download
from tgi_trio.hub.names import local_folder
from tgi_trio.hub.repository import Repository, hub_token

# Weights only at the top level: folders hold other formats, and
# consolidated*.safetensors are a second copy under the maker's own names.
WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt")
UNWANTED: Final = ("*/*.safetensors", "*/*.json", "*/*.txt", "consolidated*", "training_args*")
# Pickles are fetched where there is nothing else: not those that trainers keep for themselves.
_NO_WEIGHTS: Final = ("*/*.bin", "*/*.pt", "*optimizer*", "*scheduler*", "*scaler*", "rng_state*")
PICKLES: Final = (".bin", ".pt")


def fetch_repository(repository: Repository, trust_remote_code: bool) -> Path:
    """Download what serving needs, and return its folder; pickles where there is nothing else."""
    wanted = choose_patterns(trust_remote_code)
    found = download(repository, wanted, UNWANTED)
    if is_adapter(found) and not (found / "adapter_model.safetensors").is_file():
        return download(repository, (*wanted, "adapter_model.bin"), UNWANTED)
    if is_adapter(found) or list_weights(found):
        fetch_adapters(repository, found)
        return found
    for extension in PICKLES:
        found = _download_pickles(repository, extension, wanted)
        if find_pickles(found, [extension]):
            break
    return found


def fetch_pickles(
    model_id: str, extension: str, revision: str | None = None, *, cache_dir: Path | None = None,
    progress: bool = True,
) -> Path:  # fmt: skip
    """Return the folder of a model with its pickles of one extension (".bin"), as they are.

    Raises ModelLoadError when there are none.
    """
    folder = local_folder(model_id, "MODEL")
    if folder is None:
        repository = Repository(
            name=model_id, revision=revision, cache_dir=cache_dir, token=hub_token(),
            progress=progress, flag="MODEL",
        )  # fmt: skip
        folder = _download_pickles(repository, extension, choose_patterns(False))
    if not find_pickles(folder, [extension]):
        raise ModelLoadError(f"{model_id} holds no weights with the extension {extension}")
    return folder


def choose_patterns(trust_remote_code: bool) -> tuple[str, ...]:
    """Return patterns of the files that serving needs."""
    return (*WANTED, "*.py") if trust_remote_code else WANTED


def _download_pickles(repository: Repository, extension: str, wanted: tuple[str, ...]) -> Path:
    patterns = [pattern for pattern in wanted if pattern != "*.safetensors"]
    return download(repository, (*patterns, f"*{extension}"), (*UNWANTED, *_NO_WEIGHTS))
