"""Packages from npm, installed once into a cache outside the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_SECONDS: Final = 600


class NotInstalled(Exception):
    """The packages are not there; the message says why."""


def install_packages(name: str, versions: Mapping[str, str]) -> Path:
    """Install what is missing; return the folder with `node_modules`. Raises NotInstalled.

    `name`: of the folder, which has the versions in its name as well.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "tgi-trio" / f"{name}-{'-'.join(versions.values())}"
    if (target / "complete").exists():
        return target
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise NotInstalled("npm and node are not there")
    target.mkdir(parents=True, exist_ok=True)
    named = [f"{package}@{version}" for package, version in versions.items()]
    # No package may run anything while it is installed.
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
