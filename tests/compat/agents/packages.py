"""The agents' programs: which, in which version, where they lie, and why they are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

# As they were when the tests were written: a newer one may send what nobody has looked at.
VERSIONS: Final = {
    "@anthropic-ai/claude-code": "2.1.197",
    "@openai/codex": "0.169.0",
    "opencode-ai": "1.18.33",
}
_SECONDS: Final = 600


class NotInstalled(Exception):
    """The programs are not there; the message says why."""


def folder() -> Path:
    """Return where the packages of these versions are, or will be: outside the tree."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = "-".join(VERSIONS.values())
    return cache / "tgi-trio" / f"agents-{versions}"


def install() -> Path:
    """Install what is missing; return the folder of the packages. Raises NotInstalled."""
    target = folder()
    if (target / "complete").exists():
        return target
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise NotInstalled("npm and node are not there")
    target.mkdir(parents=True, exist_ok=True)
    named = [f"{name}@{version}" for name, version in VERSIONS.items()]
    # No package may run anything while it is installed; what they bring are whole programs.
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(target)]
    try:
        done = subprocess.run(
            [npm, "install", *flags, *named], capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(f"npm has not installed them in {_SECONDS} s") from error
    if done.returncode:
        last = (done.stderr.strip() or "npm said nothing").splitlines()[-1]
        raise NotInstalled(f"npm could not install them: {last}")
    (target / "complete").touch()
    return target


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
