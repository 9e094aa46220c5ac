"""The files that flags name, read before anything starts."""

from __future__ import annotations

import json
import logging
import stat
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tgi_trio.cli.options import FrontOptions
from tgi_trio.cli.values import read_value
from tgi_trio.errors import ConfigurationError
from tgi_trio.settings.cluster_secret import read_cluster_secret
from tgi_trio.settings.records import Options

log = logging.getLogger(__name__)

Keyed = TypeVar("Keyed", Options, FrontOptions)  # what has keys


def read_key_file(options: Keyed) -> Keyed:
    """Return the options with the keys of `--api-key-file` among their keys.

    Each line is one key, white space around it left out; keys are never shown. Raises
    ConfigurationError, for a file without a key as well: it would leave the server open to
    everybody. A file that every user of the machine may read is warned about.
    """
    path = options.api_key_file
    if path is None:
        return options
    try:
        lines = path.read_text().splitlines()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigurationError(f"--api-key-file {path} cannot be read: {error}") from error
    except UnicodeError:
        raise ConfigurationError(f"--api-key-file {path} cannot be read: it is no UTF-8") from None
    try:
        source = f"--api-key-file {path}"
        keys = tuple(read_value("key", source, key) for line in lines if (key := line.strip()))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    if not keys:
        raise ConfigurationError(f"--api-key-file {path} holds no key: write one per line")
    if mode & stat.S_IROTH:
        log.warning("--api-key-file %s can be read by every user of this machine", path)
    return replace(options, api_key=options.api_key + keys)


def check_cluster_secret(path: Path | None) -> None:
    """Raise ConfigurationError unless `--cluster-secret-file` can be used.

    A file that every user of the machine may read is warned about.
    """
    if path is None:
        return
    read_cluster_secret(path)
    if path.stat().st_mode & stat.S_IROTH:
        log.warning("--cluster-secret-file %s can be read by every user of this machine", path)


def check_tokenizer_config(path: Path | None) -> None:
    """Raise ConfigurationError unless `--tokenizer-config-path` names a file of a JSON object."""
    if path is None:
        return
    why: str | None = None
    try:
        if not isinstance(json.loads(path.read_bytes()), dict):
            why = "it must hold a JSON object, as tokenizer_config.json does"
    except OSError as error:
        why = error.strerror
    except ValueError as error:
        why = f"it is no JSON: {error}"
    if why is not None:
        raise ConfigurationError(f"--tokenizer-config-path {path} cannot be read: {why}")
