"""The wheel holds what serving needs, and nothing that only this repository uses."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.test_imports import PACKAGE, edges, modules

ROOT = Path(__file__).parents[1]
KERNELS = "shard.cpu_backend.kernels."
MODEL_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def data_files() -> Iterator[Path]:
    """Yield every tracked file of the package that is no module."""
    done = subprocess.run(
        ["git", "ls-files", "tgi_trio"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in map(Path, done.stdout.splitlines()):
        if name.suffix != ".py":
            yield name.relative_to("tgi_trio")


def test_the_package_alone_is_built() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert settings == {"targets": {"wheel": {"packages": ["tgi_trio"]}}}


def test_beside_modules_there_are_the_model_the_page_and_the_marker_of_types() -> None:
    page = "router/http/ui/"
    others = {str(path) for path in data_files() if not str(path).startswith(page)}
    assert others == {
        "py.typed",
        "demo/README.md",
        "demo/heads/config.json",
        "demo/heads/model.safetensors",
        *(f"demo/model/{name}" for name in MODEL_FILES),
    }


def test_every_module_is_used_by_another_or_is_a_program() -> None:
    """Of `testing`, which is there for tests, nothing else needs to make use."""
    source = "".join(path.read_text() for _, path in modules())
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()
    used = {imported for _, imported in edges()}
    unused = [
        name
        for name, path in modules()
        if name not in used
        and path.name not in ("__init__.py", "__main__.py")
        and name.split(".")[0] != "testing"
        and f'"tgi_trio.{name}"' not in source  # started by its name: `python -m`
        and f'Entry("{name.removeprefix(KERNELS)}",' not in source  # compiled by its name
        and f'_Imported("{name.removeprefix("cli.")}",' not in source  # a command's
        and not any(script.startswith(f"tgi_trio.{name}:") for script in scripts)
        and 'if __name__ == "__main__":' not in path.read_text()  # by a person
    ]
    assert not unused, f"{PACKAGE} has modules that nothing in it uses: {unused}"
