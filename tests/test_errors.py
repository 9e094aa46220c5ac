"""What errors say of what failed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tgi_trio.errors import tell_reason


def refusal(path: Path) -> OSError:
    with pytest.raises(OSError) as raised:
        path.read_bytes()
    return raised.value


def test_a_system_s_error_is_told_in_words_with_its_file(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert tell_reason(refusal(missing)) == f"No such file or directory: {missing}"
    assert tell_reason(refusal(missing), missing) == "No such file or directory"
    assert tell_reason(refusal(tmp_path), missing) == f"Is a directory: {tmp_path}"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert tell_reason(full) == "No space left on device"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("nobody answers"), "nobody answers"),
        (OSError(errno.EBADF, "Bad file descriptor", 7), "Bad file descriptor"),
        (OSError(errno.ENOENT, "No such file", b"\xff"), "No such file: \udcff"),
        (ValueError("it is nested too deeply"), "it is nested too deeply"),
        (KeyError("weight_map"), "KeyError('weight_map')"),
        (TypeError("'int' object is not iterable"), "TypeError(\"'int' object is not iterable\")"),
        (EOFError(), "EOFError()"),
    ],
)
def test_other_errors_say_what_they_say(error: Exception, told: str) -> None:
    assert tell_reason(error) == told
