"""Checks files that flags name, before anything starts."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from tgi_trio.errors import ConfigurationError
from tgi_trio.settings.cluster_secret import read_cluster_secret
from tgi_trio.settings.keys import read_key_file
from tgi_trio.settings.records import Options
from tgi_trio.whole_files import open_at_once, parse_json, read_file

log = logging.getLogger(__name__)


def check_files(options: Options) -> None:
    """Raise ConfigurationError for a file that a flag of `serve` names and that cannot be used."""
    check_key_file(options.api_key_file)
    check_tokenizer_config(options.tokenizer_config_path)
    check_cluster_secret(options.cluster_secret_file)
    check_schedule_file(options.record_schedule)
    check_prefix_folder(options.prefix_cache_path)


def check_key_file(path: Path | None) -> None:
    """Raise ConfigurationError unless `--api-key-file` can be used.

    Warns if every user of the machine may read it.
    """
    if path is None:
        return
    read_key_file(path)
    if path.stat().st_mode & stat.S_IROTH:
        log.warning("--api-key-file %s can be read by every user of this machine", path)


def check_cluster_secret(path: Path | None) -> None:
    """Raise ConfigurationError unless `--cluster-secret-file` can be used.

    Warns if every user of the machine may read it.
    """
    if path is None:
        return
    read_cluster_secret(path)
    if path.stat().st_mode & stat.S_IROTH:
        log.warning("--cluster-secret-file %s can be read by every user of this machine", path)


def check_schedule_file(path: Path | None) -> None:
    """Raise ConfigurationError unless `--record-schedule` can be written.

    It is written to once the model has been loaded, which would then have been for nothing.
    """
    if path is None:
        return
    try:
        open(path, "a", opener=open_at_once).close()
    except OSError as error:
        raise ConfigurationError(
            f"--record-schedule {path} cannot be written: {error.strerror}"
        ) from error


def check_prefix_folder(path: Path | None) -> None:
    """Raise ConfigurationError unless `--prefix-cache-path` is a folder, or can become one.

    It is made once a model has been found, which may have been downloaded for nothing by then.
    """
    if path is None:
        return
    try:
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        why = None if there.is_dir() else f"{there} is no folder"
        if why is None and not os.access(there, os.R_OK | os.W_OK | os.X_OK):
            why = f"{there} cannot be written to by this user"
    except OSError as error:
        why = error.strerror
    if why is not None:
        raise ConfigurationError(f"--prefix-cache-path {path} cannot be used: {why}")


def check_tokenizer_config(path: Path | None) -> None:
    """Raise ConfigurationError unless `--tokenizer-config-path` is a file with a JSON object."""
    if path is None:
        return
    why: str | None = None
    try:
        if not isinstance(parse_json(read_file(path)), dict):
            why = "it must hold a JSON object, as tokenizer_config.json does"
    except OSError as error:
        why = error.strerror
    except ValueError as error:
        why = f"it is no JSON: {error}"
    if why is not None:
        raise ConfigurationError(f"--tokenizer-config-path {path} cannot be read: {why}")
