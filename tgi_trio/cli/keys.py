"""The API keys of `--api-key-file`."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.errors import ConfigurationError
from tgi_trio.settings import Options


def with_key_file(options: Options) -> Options:
    """Return the options with the keys of the file among their keys; raises ConfigurationError.

    A file that holds no key is an error: it would leave the server open to everybody.
    """
    path = options.api_key_file
    if path is None:
        return options
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"--api-key-file {path} cannot be read: {error}") from error
    keys = tuple(key for line in lines if (key := line.strip()))
    if not keys:
        raise ConfigurationError(f"--api-key-file {path} holds no key: write one per line")
    return replace(options, api_key=options.api_key + keys)
