"""From a model's name to a folder that can be served: embedded, local, or downloaded from the hub.

Pickles are converted and adapters merged on the way.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from tgi_trio import demo
from tgi_trio.conversion import child
from tgi_trio.conversion.adapters import is_adapter, merge_model, read_base
from tgi_trio.conversion.folder import (
    NEW_INDEX,
    conversion_due,
    find_pickles,
    list_weights,
    read_index,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.brought_adapters import fetch_adapters
from tgi_trio.hub.download import Repository, download, hub_token, import_huggingface_hub
from tgi_trio.hub.gguf import fetch_gguf, has_gguf, lists_gguf, local_gguf, split_choice
from tgi_trio.hub.names import hint_at_models, is_there, local_folder, refuse_address
from tgi_trio.model.pointers import refuse_pointers
from tgi_trio.model.speculators.recognise import base_of_heads, find_kind

log = logging.getLogger("tgi_trio")

# What serving needs. Weights only at the top level: folders hold other formats, and
# consolidated*.safetensors are a second copy under the maker's own names.
WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt")
UNWANTED: Final = ("*/*.safetensors", "*/*.json", "*/*.txt", "consolidated*", "training_args*")
# Pickles are fetched where there is nothing else: not those that trainers keep for themselves.
_NO_WEIGHTS: Final = ("*/*.bin", "*/*.pt", "*optimizer*", "*scheduler*", "*scaler*", "rng_state*")
PICKLES: Final = (".bin", ".pt")

FetchBase = Callable[[str, str | None, str], Path]  # (repository, revision, who names it)


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
        repository = Repository(
            name=name,
            cache_dir=cache_dir,
            token=hub_token(),
            progress=progress,
            flag="--draft-model",
        )
        folder = _fetch(repository, trust_remote_code)
    return check_heads(folder) if find_kind(folder) is not None else check_folder(folder)


def resolve_served(
    model_id: str | None,
    revision: str | None = None,
    *,
    cache_dir: Path | None = None,
    token_from_env: bool = True,
    trust_remote_code: bool = False,
    progress: bool = True,
    auto_convert: bool = True,
    merge_lora: bool = True,
    own_tokenizer: bool = True,
    own_texts: bool = True,
    flag: str = "--model-id",
) -> Served:
    """Return the folder of a model, ready to load; downloads it where that is needed.

    Heads that draft for a model (Medusa's, an MLP speculator) are served with that model.

    `model_id` is None or `demo.MODEL_ID` for the embedded model, a folder, a GGUF file, or a hub
    repository (`owner/name`) at `revision`; behind a colon it names one of several GGUF files
    there, whose tokenizer is read if it is to be used (`own_tokenizer`). With `auto_convert`
    weights that are only there as pickles are converted, beside them. With `merge_lora` an adapter
    is merged into its base, in our cache (`own_texts`: with its own tokenizer, template and ends);
    without it the adapter's folder is returned. `progress` shows bars on stderr, `flag` is what
    errors call the name's place on the command line. Blocks meanwhile. Raises ModelLoadError, with
    what to do about it, for no such model, or one that is not served.
    """
    if model_id is None or model_id == demo.MODEL_ID:
        return Served(_embedded(revision, flag))

    def repository(name: str, revision: str | None, flag: str) -> Repository:
        token = hub_token() if token_from_env else None
        return Repository(
            name=name,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            progress=progress,
            flag=flag,
        )

    refuse_address(model_id, flag)
    name, choice = split_choice(model_id, flag)
    folder = local_folder(name, flag)
    if folder is None:
        source = repository(name, revision, flag)
        if choice:
            return Served(fetch_gguf(source, choice, tokenizer=own_tokenizer))
        folder = _fetch(source, trust_remote_code)
        if not _has_weights(folder) and lists_gguf(source):
            return Served(fetch_gguf(source, choice, tokenizer=own_tokenizer))
        if not folder.is_dir():  # as nothing was wanted of what is there
            raise ModelLoadError(f"the hub repository {name} holds none of a model's files")
    elif revision is not None:
        raise ModelLoadError(
            f"{model_id} is a local folder, so it has no revision: leave --revision out"
        )
    elif choice or _is_gguf(folder):
        return Served(local_gguf(folder, choice, tokenizer=own_tokenizer, flag=flag))
    if find_kind(folder) is None and not is_adapter(folder):
        return Served(check_folder(folder, auto_convert=auto_convert))

    def fetch_base(name: str, revision: str | None, flag: str) -> Path:
        return _fetch(repository(name, revision, flag), trust_remote_code)

    merge = partial(merge_model, own_texts=own_texts) if merge_lora else None
    return _add_base(folder, model_id, fetch_base, merge, auto_convert=auto_convert)


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
        return Served(check_folder(base, auto_convert=auto_convert), heads)
    base = _find_base_of_adapter(folder, model_id, fetch)
    check_folder(base, auto_convert=auto_convert)
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


def check_heads(folder: Path, *, auto_convert: bool = True) -> Path:
    """Return a folder of heads, their pickle converted where there is no more.

    Raises ModelLoadError where it holds none.
    """
    if conversion_due(folder):
        _convert(folder, auto_convert)
    if not list_weights(folder):
        raise ModelLoadError(f"{folder} holds no heads: not one .safetensors, .bin or .pt file")
    return folder


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
        source = Repository(
            name=place or name,
            revision=revision or None,
            cache_dir=cache_dir,
            token=hub_token(),
            progress=progress,
            flag="--lora-adapters",
        )
        return name, _fetch(source, trust_remote_code=False)
    if revision:
        raise ModelLoadError(f"{folder} is a local folder, so it has no revision: {entry}")
    return name, folder


def check_folder(folder: Path, *, auto_convert: bool = True) -> Path:
    """Return `folder` if a model can be loaded from it, pickles converted where there is no more.

    Raises ModelLoadError if not.
    """
    if _is_gguf(folder):
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


def _is_gguf(place: Path) -> bool:
    """Return whether a model is there as GGUF alone."""
    return place.suffix == ".gguf" or (has_gguf(place) and not _has_weights(place))


def _has_weights(folder: Path) -> bool:
    return is_adapter(folder) or bool(list_weights(folder) or find_pickles(folder))


def resolve_tokenizer(
    name: str,
    *,
    cache_dir: Path | None = None,
    token_from_env: bool = True,
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
    token = hub_token() if token_from_env else None
    repository = Repository(
        name=name, cache_dir=cache_dir, token=token, progress=progress, flag="--tokenizer-name"
    )
    wanted = [
        pattern for pattern in _choose_patterns(trust_remote_code) if pattern != "*.safetensors"
    ]
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
        folder = _download_pickles(repository, extension, _choose_patterns(False))
    if not find_pickles(folder, [extension]):
        raise ModelLoadError(f"{model_id} holds no weights with the extension {extension}")
    return folder


def _choose_patterns(trust_remote_code: bool) -> tuple[str, ...]:
    return (*WANTED, "*.py") if trust_remote_code else WANTED


def _fetch(repository: Repository, trust_remote_code: bool) -> Path:
    """Download what serving needs; pickles only where there are no safetensors."""
    wanted = _choose_patterns(trust_remote_code)
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


def _download_pickles(repository: Repository, extension: str, wanted: tuple[str, ...]) -> Path:
    patterns = [pattern for pattern in wanted if pattern != "*.safetensors"]
    return download(repository, (*patterns, f"*{extension}"), (*UNWANTED, *_NO_WEIGHTS))


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
