"""Keys, of flags and of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tgi_trio.errors import ConfigurationError
from tgi_trio.settings.keys import Keys, read_key_file


def test_keys_come_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two, three \n")
    assert Keys(("a", "b,c"), file).read() == ("a", "b,c", "one", "two, three")
    assert Keys((), file).read() == ("one", "two, three")
    assert Keys(("a",)).read() == ("a",)
    assert Keys().read() == ()
    file.write_text("four")
    assert Keys(("a",), file).read() == ("a", "four")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"hush\xff\xfe", "cannot be read"),
        (b" \n\n", "holds no key"),
        (b"hu\x07sh\n", "expected a key that a header can carry"),
    ],
)
def test_a_file_without_keys_is_an_error(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"--api-key-file .*{message}") as caught:
        read_key_file(file)
    assert "hu" not in str(caught.value)
