"""Keys from flags, the environment and a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tgi_trio.cli.keys import with_key_file
from tgi_trio.cli.parser import parse
from tgi_trio.errors import ConfigurationError


def test_keys_come_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    flags = ["--api-key", "a", "--api-key", "b,c", "--api-key-file", str(file)]
    assert with_key_file(parse(flags, {}).options).api_key == ("a", "b,c", "one", "two")
    environ = {"API_KEY": "a, b", "API_KEY_FILE": str(file)}
    assert with_key_file(parse([], environ).options).api_key == ("a", "b", "one", "two")
    assert with_key_file(parse([], {}).options).api_key == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"\xff\xfe", "cannot be read"), (b" \n\n", "holds no key")],
)
def test_a_file_without_keys_is_an_error(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"--api-key-file .*{message}"):
        with_key_file(parse(["--api-key-file", str(file)], {}).options)
