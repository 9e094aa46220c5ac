"""The agents' programs: which, in which version, where they lie, and why they are not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.compat.npm import NotInstalled, install_packages

# As they were when the tests were written: a newer one may send what nobody has looked at.
VERSIONS: Final = {
    "@anthropic-ai/claude-code": "2.1.197",
    "@openai/codex": "0.169.0",
    "opencode-ai": "1.18.33",
}


def install() -> Path:
    """Install what is missing; return the folder of the packages. Raises NotInstalled."""
    return install_packages("agents", VERSIONS)


def claude(packages: Path) -> Path:
    """Return Claude Code's program. Raises NotInstalled."""
    return _program(packages / "node_modules/@anthropic-ai", "claude-code-*/claude")


def codex(packages: Path) -> Path:
    """Return Codex's program. Raises NotInstalled."""
    return _program(packages / "node_modules/@openai", "codex-*/vendor/*/**/codex")


def opencode(packages: Path) -> Path:
    """Return opencode's program. Raises NotInstalled."""
    return _program(packages / "node_modules", "opencode-*-*/bin/opencode")


def _program(scope: Path, pattern: str) -> Path:
    for path in sorted(scope.glob(pattern)):
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise NotInstalled(f"no program {pattern} in {scope}: npm has none for this machine")
