"""LoRA adapters given as models: their bases, and the cache of merged models.

A merged model is cached under a name made from its sources, so that an adapter is merged again
after further training. No third-party import here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Final

from tgi_trio.conversion import child
from tgi_trio.conversion.folder import list_weights
from tgi_trio.conversion.texts import list_text_files
from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.whole_files import parse_json, read_file

CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")


def is_adapter(folder: Path) -> bool:
    """Return whether a folder contains an adapter and no model."""
    return (folder / CONFIG).is_file() and not list_weights(folder)


def read_base(adapter: Path) -> tuple[str, str | None]:
    """Return the base's name (folder or repository) and revision; raises ModelLoadError."""
    try:
        config = parse_json(read_file(adapter / CONFIG))
        name, revision = config.get("base_model_name_or_path"), config.get("revision")
    except (OSError, ValueError, AttributeError) as error:
        why = tell_reason(error, adapter / CONFIG)
        raise ModelLoadError(f"{adapter / CONFIG} cannot be read: {why}") from error
    if not isinstance(name, str) or not name:
        raise ModelLoadError(
            f"{adapter / CONFIG} does not say which model the adapter belongs to: write it there "
            "as base_model_name_or_path, a folder or a repository"
        )
    return name, revision if isinstance(revision, str) and revision else None


def merge_model(
    adapter: Path, base: Path, cache: Path | None = None, *, own_texts: bool = True
) -> Path:
    """Return the folder of `base` with the adapter merged into it; merges them first if needed.

    `cache`: the directory of such folders; `own_texts`: whether the model has the tokenizer, chat
    template and ends of the adapter's folder. Raises ModelLoadError that names what cannot be
    merged.
    """
    weights = next((adapter / name for name in _WEIGHTS if (adapter / name).is_file()), None)
    if weights is None:
        raise ModelLoadError(f"{adapter} holds {CONFIG} but none of {', '.join(_WEIGHTS)}")
    cache = cache or _default_cache()
    texts = list_text_files(adapter) if own_texts else []
    target = cache / _digest(adapter, [adapter / CONFIG, weights], texts, base)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{target.name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                child.merge(adapter, base, target, own_texts=own_texts)
    except OSError as error:
        raise ModelLoadError(
            f"the merged model cannot be kept in {cache}: {tell_reason(error)}. XDG_CACHE_HOME "
            "names another place"
        ) from error
    return target


def _digest(adapter: Path, weights: list[Path], texts: list[Path], base: Path) -> str:
    """Return a name from the content of an adapter's files, and what is known of a base's.

    Of these: paths, sizes and times.
    """
    digest = hashlib.sha256()
    for path in (*weights, *texts):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        if path in texts:
            digest.update(f"{path.relative_to(adapter)}\0".encode())
    for path in sorted(p for p in {*base.iterdir(), *list_text_files(base)} if p.is_file()):
        place, state = path.resolve(), path.stat()
        digest.update(f"{path.name}\0{place}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tgi_trio" / "merged"
