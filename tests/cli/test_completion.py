"""Completion scripts: what bash would offer."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tgi_trio.cli.commands import COMMANDS
from tgi_trio.cli.completion import completion
from tgi_trio.cli.values import SHELLS


def offered(words: list[str]) -> set[str]:
    """Return what bash offers for the last of `words`."""
    array = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _tgi_trio"
    script = f"{completion('bash')}\n{asked}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_offers_commands_and_flags() -> None:
    names = {command.name for command in COMMANDS}
    assert names <= offered(["tgi-trio", ""])
    assert offered(["tgi-trio", "do"]) == {"download-weights", "doctor"}
    assert offered(["tgi-trio", "serve", "--max-inp"]) == {
        "--max-input-tokens",
        "--max-input-length",
    }
    assert offered(["tgi-trio", "bench", "--cl"]) == {"--clients"}
    assert offered(["tgi-trio", "chat", "--model-id", "folder"]) == set()


@pytest.mark.parametrize("shell", SHELLS)
def test_every_flag_is_in_every_script(shell: str) -> None:
    script = completion(shell)
    for command in COMMANDS:
        assert command.name in script
        assert all(flag.name in script for flag in command.flags)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
