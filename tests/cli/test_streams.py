"""Standard streams that are closed, and readers that leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = """
import json, os, sys
from tgi_trio.__main__ import main
code = main(["completion", "bash"])
print("more", file=sys.stderr)
found = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
inherited = [os.get_inheritable(fd) for fd in range(3)]
with open(sys.argv[1], "w") as file:
    json.dump([code, found, inherited], file)
"""


@pytest.mark.parametrize("closed", ["0<&-", "2>&-", "0<&- 1>&-", "0<&- 1>&- 2>&-"])
def test_streams_that_are_closed_become_dev_null(tmp_path: Path, closed: str) -> None:
    told = tmp_path / "told"
    script = f'exec "$0" -c "$1" "$2" {closed}'
    words = ["bash", "-c", script, sys.executable, MAIN, str(told)]
    subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=120)
    code, found, inherited = json.loads(told.read_text())
    assert code == 0 and inherited == [True] * 3
    for fd, name in enumerate(found):
        assert (name == os.devnull) == (fd == 0 or f"{fd}>" in closed)


def test_nothing_is_opened_before_the_streams() -> None:
    # libffi, which ctypes loads, keeps its own file open, with the number of a closed stream.
    code = "import sys, tgi_trio.__main__; sys.exit('ctypes' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("command", ["doctor", "--version"])
def test_output_without_room_is_said_in_a_line(command: str) -> None:
    words = [sys.executable, "-m", "tgi_trio", command]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, check=False, timeout=120)
    expected = b"tgi-trio: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.parametrize("command", ["doctor", "--help"])
def test_a_reader_that_leaves_is_no_error(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "tgi_trio", command]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, check=False, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
