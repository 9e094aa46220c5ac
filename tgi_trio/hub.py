"""From a model's name to a folder with its files: embedded, local, or downloaded from the hub."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tgi_trio import demo
from tgi_trio.errors import ModelLoadError

# What serving needs. Weights only at the top level: folders hold other formats, and
# consolidated*.safetensors are a second copy under the maker's own names.
WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt")
UNWANTED: Final = ("*/*.safetensors", "*/*.json", "*/*.txt", "consolidated*", "training_args*")

_TOKEN_VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")


def resolve_model(
    model_id: str | None,
    revision: str | None = None,
    *,
    cache_dir: Path | None = None,
    token_from_env: bool = True,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Path:
    """Return the folder of a model, ready to load; downloads it where that is needed.

    `model_id` is None or `demo.MODEL_ID` for the embedded model, a folder, or a hub repository
    (`owner/name`) at `revision`. Blocks for as long as the download takes; `progress` shows bars
    on stderr. HF_HUB_OFFLINE, HF_ENDPOINT and HF_HOME mean what they mean to huggingface_hub.
    Raises ModelLoadError, with what to do about it, when there is no such model or it cannot be
    served.
    """
    if model_id is None or model_id == demo.MODEL_ID:
        return check_folder(demo.model_path())
    folder = Path(model_id).expanduser()
    if folder.exists():
        if revision is not None:
            raise ModelLoadError(
                f"{model_id} is a local folder, so it has no revision: leave --revision out"
            )
        return check_folder(folder)
    if model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1:
        raise ModelLoadError(f"there is no folder {model_id}: --model-id takes a folder or a name")
    patterns = (*WANTED, "*.py") if trust_remote_code else WANTED
    token = _token(os.environ) if token_from_env else None
    return check_folder(_download(model_id, revision, cache_dir, token, patterns, progress))


def check_folder(folder: Path) -> Path:
    """Return `folder` if a model can be loaded from it; raises ModelLoadError if not."""
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder")
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"{folder} holds no config.json, so it is not a model folder as save_pretrained "
            "writes it"
        )
    weights = {path.name for path in folder.glob("*.safetensors")}
    if missing := sorted(_indexed_files(folder) - weights):
        raise ModelLoadError(
            f"{folder} is incomplete: model.safetensors.index.json names {', '.join(missing)}, "
            f"which {'is' if len(missing) == 1 else 'are'} not there. Download or copy it again"
        )
    if weights:
        return folder
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelLoadError(_pickled(str(folder)))
    raise ModelLoadError(f"{folder} holds no weights: not one .safetensors file")


def conversion_command(model: str) -> str:
    """Return the shell command that writes `model` (folder or repository) as safetensors."""
    words = shlex.join([model, Path(model).name + "-safetensors"])
    return (
        'python -c "import sys, transformers as t; source, target = sys.argv[1:]; '
        "t.AutoModelForCausalLM.from_pretrained(source, dtype='auto').save_pretrained(target); "
        f't.AutoTokenizer.from_pretrained(source).save_pretrained(target)" {words}'
    )


def _pickled(model: str) -> str:
    return (
        f"{model} has its weights in pickle files (.bin, .pt), which can run code when they are "
        "loaded; only .safetensors is served. If you trust it, convert it once and serve the new "
        f"folder:\n  {conversion_command(model)}"
    )


def _indexed_files(folder: Path) -> set[str]:
    """Return the weight files that the folder's index, if any, names."""
    index = folder / "model.safetensors.index.json"
    try:
        content = json.loads(index.read_bytes())
        return {str(name) for name in content["weight_map"].values()}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} cannot be read as an index of weights: {error!r}") from error


def _token(environ: Mapping[str, str]) -> str | None:
    """Return the first token that is set. None lets huggingface_hub use a stored login."""
    return next((environ[name] for name in _TOKEN_VARIABLES if environ.get(name)), None)


def _download(
    model_id: str,
    revision: str | None,
    cache_dir: Path | None,
    token: str | None,
    patterns: tuple[str, ...],
    progress: bool,
) -> Path:
    # We promise that nothing is reported to anyone; huggingface_hub reads this when imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # Imported here: it costs a third of a second, and most starts do not need it.
    import huggingface_hub
    from tqdm.auto import tqdm

    class Quiet(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

    try:
        folder = huggingface_hub.snapshot_download(
            model_id,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            allow_patterns=list(patterns),
            ignore_patterns=list(UNWANTED),
            tqdm_class=None if progress else Quiet,
        )
    except Exception as error:
        raise ModelLoadError(_explain(error, model_id, revision, token)) from error
    found = Path(folder)
    if not any(found.glob("*.safetensors")) and (found / "config.json").is_file():
        raise ModelLoadError(
            f"the hub repository {model_id} has no .safetensors weights. " + _pickled(model_id)
        )
    return found


def _explain(error: Exception, model_id: str, revision: str | None, token: str | None) -> str:
    """Return one paragraph: what went wrong with a download and what to do."""
    from huggingface_hub import constants, errors

    with_token = "with the token that is set" if token else "without a token (HF_TOKEN is not set)"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the hub repository {model_id} is gated and cannot be read {with_token}. Accept its "
            f"terms at {constants.ENDPOINT}/{model_id}, then set HF_TOKEN to its token"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no hub repository {model_id} that can be read {with_token}, and no such "
            "local folder. Check the spelling of --model-id; a private repository needs HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub repository {model_id} has no revision {revision}: check --revision"
    if isinstance(error, errors.HFValidationError):
        return (
            f"{model_id!r} is neither a local folder nor the name of a hub repository "
            "(owner/name): check --model-id"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = f"{constants.ENDPOINT} cannot be reached"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        elif isinstance(error.__cause__, errors.HfHubHTTPError):
            why = (
                f"{constants.ENDPOINT} answered with status {error.__cause__.response.status_code}"
            )
        return (
            f"the cache does not hold all of {model_id} and it cannot be downloaded: {why}. "
            "Connect this machine, or download it on another with `python -m tgi_trio "
            f"download-weights {model_id}` and copy the folder here for --model-id, "
            "or leave --model-id out to serve the embedded model"
        )
    return f"downloading {model_id} failed: {type(error).__name__}: {error}"
