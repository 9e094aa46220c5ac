"""The secret by which parts of a cluster authenticate each other: one line of a file."""

from __future__ import annotations

from pathlib import Path

from tgi_trio.errors import ConfigurationError
from tgi_trio.whole_files import SMALL, read_text_file

SHORTEST = 16  # least characters


def read_cluster_secret(path: Path) -> bytes:
    """Return the secret in the file of `--cluster-secret-file`, without white space around it.

    It is never shown. Raises ConfigurationError.
    """
    try:
        text = read_text_file(path, SMALL).strip()
    except OSError as error:
        raise ConfigurationError(
            f"--cluster-secret-file {path} cannot be read: {error.strerror}"
        ) from error
    except UnicodeError:
        raise ConfigurationError(
            f"--cluster-secret-file {path} cannot be read: it is no UTF-8"
        ) from None
    if not (text.isascii() and text.isprintable()):
        raise ConfigurationError(
            f"--cluster-secret-file {path} must hold one line of printable ASCII"
        )
    if len(text) < SHORTEST:
        raise ConfigurationError(
            f"--cluster-secret-file {path} holds {len(text)} characters, "
            f"a secret has {SHORTEST} at least: `openssl rand -hex 32` writes one"
        )
    return text.encode()
