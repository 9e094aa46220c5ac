"""One line per module of the package, from the docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import tgi_trio
from tools.docs.markdown import Sections, table

PACKAGE: Final = Path(tgi_trio.__file__).parent
_SENTENCE: Final = re.compile(r".+?[.?](?=\s|$)")


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring; raises ValueError where there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise ValueError(f"{path} has no docstring")
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = _SENTENCE.match(paragraph)
    return (sentence[0] if sentence else paragraph).replace("|", r"\|")


def rooms() -> Iterator[Path]:
    """Yield the package and every package in it, each before those inside."""
    yield from sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


def modules() -> str:
    """Return a table per room: its modules and what each is for."""
    return "\n".join(_room(folder) for folder in rooms())


def _room(folder: Path) -> str:
    name = f"{folder.relative_to(PACKAGE.parent)}/"
    head = f"**`{name}`** {first_sentence(folder / '__init__.py')}\n"
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    if not files:
        return head
    rows = ((f"`{path.name}`", first_sentence(path)) for path in files)
    return f"{head}\n{table(('module', 'what it is'), rows)}"


SECTIONS: Final[Sections] = {"modules": modules}
