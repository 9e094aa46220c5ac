"""From a model's name to a folder that can be served: embedded, local, or downloaded from the hub.

Pickles are converted, adapters merged, and models in several repositories joined on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tgi_trio import demo
from tgi_trio.conversion.adapters import is_adapter, merge_model, read_base
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.composed import compose
from tgi_trio.hub.download import download
from tgi_trio.hub.fetching import UNWANTED, choose_patterns, fetch_repository
from tgi_trio.hub.folders import check_folder, check_heads, has_weights, is_gguf
from tgi_trio.hub.gguf import fetch_gguf, lists_gguf, local_gguf, split_choice
from tgi_trio.hub.library import import_huggingface_hub
from tgi_trio.hub.names import is_there, local_folder, refuse_address
from tgi_trio.hub.projectors import NO_PROJECTOR, WantedProjector
from tgi_trio.hub.repository import Repository, hub_token
from tgi_trio.model.speculators.recognise import base_of_heads, find_kind

log = logging.getLogger("tgi_trio")

FetchBase = Callable[[str, str | None, str], Path]  # (repository, revision, who names it)


@dataclass(frozen=True, slots=True)
class _Hub:
    """How the hub is asked."""

    cache_dir: Path | None
    token: str | None
    progress: bool
    trust_remote_code: bool

    def repository(self, name: str, revision: str | None, flag: str) -> Repository:
        """Return what `flag` names."""
        return Repository(
            name=name,
            revision=revision,
            cache_dir=self.cache_dir,
            token=self.token,
            progress=self.progress,
            flag=flag,
        )

    def fetch(self, name: str, revision: str | None, flag: str) -> Path:
        """Download what `flag` names."""
        return fetch_repository(self.repository(name, revision, flag), self.trust_remote_code)


class Served(NamedTuple):
    """What a model's name stands for."""

    model: Path
    heads: Path | None = None  # a folder of heads that draft for it
    merged: bool = False  # whether an adapter is merged into it


def resolve_model(
    model_id: str | None,
    revision: str | None = None,
    *,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
    auto_convert: bool = True,
    merge_lora: bool = True,
    own_texts: bool = True,
    projector: WantedProjector = NO_PROJECTOR,
    flag: str = "--model-id",
) -> Path:
    """Return the folder of a model alone; see `resolve_served`."""
    return resolve_served(
        model_id,
        revision,
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
        progress=progress,
        auto_convert=auto_convert,
        merge_lora=merge_lora,
        own_texts=own_texts,
        projector=projector,
        flag=flag,
    ).model


def resolve_drafter(
    name: str,
    *,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Path:
    """Return the folder of what is to draft: heads, or a model; raises as `resolve_served`."""
    folder = local_folder(name, "--draft-model")
    if folder is None:
        hub = _Hub(cache_dir, hub_token(), progress, trust_remote_code)
        folder = hub.fetch(name, None, "--draft-model")
    return check_heads(folder) if find_kind(folder) is not None else check_folder(folder)


def resolve_served(
    model_id: str | None,
    revision: str | None = None,
    *,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
    auto_convert: bool = True,
    merge_lora: bool = True,
    own_tokenizer: bool = True,
    own_texts: bool = True,
    projector: WantedProjector = NO_PROJECTOR,
    flag: str = "--model-id",
) -> Served:
    """Return the folder of a model, ready to load; downloads it where that is needed.

    Heads that draft for a model (Medusa's, an MLP speculator) are served with that model.

    `model_id` is None or `demo.MODEL_ID` for the embedded model, a folder, a GGUF file, or a hub
    repository (`owner/name`) at `revision`; behind a colon it names one of several GGUF files
    there, whose tokenizer is read if it is to be used (`own_tokenizer`). With `auto_convert`
    weights that are only there as pickles are converted, beside them. With `merge_lora` an adapter
    is merged into its base, in our cache (`own_texts`: with its own tokenizer, template and ends);
    without it the adapter's folder is returned. A model whose parts lie in other repositories
    (`hub/composed.py`) is returned with them, a GGUF file with the `projector` that is wanted.
    `progress` shows bars on stderr, `flag` is what errors call the name's place on the command
    line. Blocks meanwhile. Raises ModelLoadError, with what to do about it, for no such model, or
    one that is not served.
    """
    if model_id is None or model_id == demo.MODEL_ID:
        _refuse_projector(projector, "the embedded model")
        return Served(_embedded(revision, flag))

    hub = _Hub(cache_dir, hub_token(), progress, trust_remote_code)
    refuse_address(model_id, flag)
    name, choice = split_choice(model_id, flag)
    folder = local_folder(name, flag)
    if folder is None:
        source = hub.repository(name, revision, flag)
        fetched = None if choice else _fetch_folder(source, trust_remote_code)
        if fetched is None:
            return Served(fetch_gguf(source, choice, tokenizer=own_tokenizer, projector=projector))
        folder = fetched
    elif revision is not None:
        raise ModelLoadError(
            f"{model_id} is a local folder, so it has no revision: leave --revision out"
        )
    elif choice or is_gguf(folder):
        return Served(
            local_gguf(folder, choice, tokenizer=own_tokenizer, projector=projector, flag=flag)
        )
    _refuse_projector(projector, str(folder))
    if find_kind(folder) is None and not is_adapter(folder):
        checked = check_folder(folder, auto_convert=auto_convert)
        return Served(compose(checked, hub.fetch, auto_convert=auto_convert))

    merge = partial(merge_model, own_texts=own_texts) if merge_lora else None
    return _add_base(folder, model_id, hub.fetch, merge, auto_convert=auto_convert)


def _fetch_folder(source: Repository, trust_remote_code: bool) -> Path | None:
    """Return the folder of a repository's model; None where that is a GGUF file."""
    folder = fetch_repository(source, trust_remote_code)
    if not has_weights(folder) and lists_gguf(source):
        return None
    if not folder.is_dir():  # as nothing was wanted of what is there
        raise ModelLoadError(f"the hub repository {source.name} holds none of a model's files")
    return folder


def _refuse_projector(projector: WantedProjector, model: str) -> None:
    if projector.name is not None:
        raise ModelLoadError(
            f"{model} is no GGUF file, so --mmproj has no place: a model's folder has its own "
            "tower, if it sees"
        )


def _embedded(revision: str | None, flag: str) -> Path:
    if revision is not None:
        raise ModelLoadError(
            f"the embedded model has no revision: give {flag} a hub repository, or leave "
            "--revision out"
        )
    return check_folder(demo.model_path())


def _add_base(
    folder: Path,
    model_id: str,
    fetch: FetchBase,
    merge: Callable[[Path, Path], Path] | None,
    *,
    auto_convert: bool,
) -> Served:
    """Return heads, or an adapter, with the model that they are of; see `resolve_served`."""
    if find_kind(folder) is not None:
        heads = check_heads(folder, auto_convert=auto_convert)
        base = _find_base_of_heads(heads, model_id, fetch)
        checked = check_folder(base, auto_convert=auto_convert)
        return Served(compose(checked, fetch, auto_convert=auto_convert), heads)
    base = check_folder(_find_base_of_adapter(folder, model_id, fetch), auto_convert=auto_convert)
    base = compose(base, fetch, auto_convert=auto_convert)
    return Served(folder) if merge is None else Served(merge(folder, base), merged=True)


def _find_base_of_heads(folder: Path, model_id: str, fetch: FetchBase) -> Path:
    """Return the folder of the model that heads draft for; raises ModelLoadError."""
    name, field = base_of_heads(folder), "base_model_name_or_path of config.json"
    base = local_folder(name, field)
    if name == demo.MODEL_ID:
        base = demo.model_path()
    elif base is None:
        base = fetch(name, None, field)
    if find_kind(base) is not None:
        raise ModelLoadError(f"the base of {model_id}, {name}, holds heads itself")
    return base


def _find_base_of_adapter(folder: Path, model_id: str, fetch: FetchBase) -> Path:
    """Return the folder of the model that an adapter changes; raises ModelLoadError."""
    name, revision = read_base(folder)
    field = "base_model_name_or_path of adapter_config.json"
    base = local_folder(name, field)
    if base is None:
        base = fetch(name, revision, field)
    if is_adapter(base):
        raise ModelLoadError(f"the base of {model_id}, {name}, is an adapter itself")
    return base


def resolve_adapter(
    entry: str, *, cache_dir: Path | None = None, progress: bool = True
) -> tuple[str, Path]:
    """Return name and folder of an entry of --lora-adapters; downloads it where that is needed.

    The name alone is a folder or a hub repository, too. Raises ModelLoadError.
    """
    wanted, _, revision = entry.partition("@")
    name, _, place = wanted.partition("=")
    folder = local_folder(place or name, "--lora-adapters")
    if folder is None:
        hub = _Hub(cache_dir, hub_token(), progress, trust_remote_code=False)
        return name, hub.fetch(place or name, revision or None, "--lora-adapters")
    if revision:
        raise ModelLoadError(f"{folder} is a local folder, so it has no revision: {entry}")
    return name, folder


def resolve_tokenizer(
    name: str,
    *,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Path:
    """Return the folder of another model's tokenizer: `name` as it is, or a hub repository's files.

    Raises ModelLoadError.
    """
    folder = local_folder(name, "--tokenizer-name")
    if folder is not None:
        if not folder.is_dir():
            raise ModelLoadError(f"{folder} is not a folder: --tokenizer-name takes one, or a name")
        return folder
    hub = _Hub(cache_dir, hub_token(), progress, trust_remote_code)
    wanted = [
        pattern for pattern in choose_patterns(trust_remote_code) if pattern != "*.safetensors"
    ]
    repository = hub.repository(name, None, "--tokenizer-name")
    return download(repository, wanted, (*UNWANTED, "*.index.json"))


def read_pipeline_tag(model_id: str, revision: str | None, *, timeout: float) -> str | None:
    """Return what the hub says that a repository is for, such as "text-generation".

    None for local folders and the embedded model, without a network, and when the hub does not
    answer. Each wait for the network takes at most `timeout` seconds.
    """
    name, _ = split_choice(model_id, "--model-id")
    if name == demo.MODEL_ID or is_there(name, "--model-id"):
        return None
    hub = import_huggingface_hub()
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        found = hub.model_info(name, revision=revision, timeout=timeout, token=hub_token())
    except Exception as error:  # of whichever HTTP library this version of the package uses
        log.warning("the hub does not say what %s is for: %s", model_id, str(error).split("\n")[0])
        return None
    return None if found.pipeline_tag is None else str(found.pipeline_tag)
