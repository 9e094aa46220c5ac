"""Compares the generated parts of documents with the code: `python -m tools.docs [--write]`."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

from tools.docs.pages import ROOT, Page, pages


def show_difference(page: Page) -> str:
    """Return what would change in a document, as a unified diff."""
    lines = difflib.unified_diff(
        page.old.splitlines(keepends=True),
        page.new.splitlines(keepends=True),
        page.name,
        f"{page.name}, from the code",
    )
    return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 when a document is out of date, with the difference printed; 0 after --write."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the documents anew")
    write = parser.parse_args(arguments).write
    stale = [page for page in pages() if page.old != page.new]
    for page in stale:
        if write:
            (ROOT / page.name).write_text(page.new)
            print(f"{page.name} is written anew")
        else:
            print(show_difference(page), end="")
    if stale and not write:
        print(f"{len(stale)} out of date: python -m tools.docs --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
