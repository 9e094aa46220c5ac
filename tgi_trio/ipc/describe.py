"""Keeps docs/ipc.md true: its pictures and tables come from the code.

`python -m tgi_trio.ipc.describe` prints the generated blocks; `--write` puts them between their
markers in docs/ipc.md. A test compares the two.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tgi_trio.ipc import channel, doorbell, endpoints, fence, layout, ring

DOCUMENT = Path("docs/ipc.md")
_WIDTH = 74  # inner width of the picture


def picture() -> str:
    """Draw the segment, line by line of the control page."""
    ring_size = f"{endpoints.DEFAULT_RING_BYTES >> 20} MiB unless set otherwise"
    rows = [_rule(), _row("control page", f"{layout.CONTROL_BYTES} bytes"), _rule()]
    lines: dict[int, list[layout.Field]] = {}
    for field in layout.FIELDS:
        lines.setdefault(field.offset // layout.LINE, []).append(field)
    for number, fields in lines.items():
        names = " ".join(field.name for field in fields)
        writer = "/".join(dict.fromkeys(field.writer for field in fields))
        for part, text in enumerate(_wrap(names, 48)):
            where = f"{number * layout.LINE:#06x}  {text}" if part == 0 else f"        {text}"
            rows.append(_row(where, f"written by {writer}" if part == 0 else ""))
    rows += [
        _rule(),
        _row(f"{layout.CONTROL_BYTES:#06x}  request ring: router -> shard", ring_size),
        _rule(),
        _row("then    reply ring: shard -> router", ring_size),
        _rule(),
    ]
    return _code(rows)


def frame_picture() -> str:
    """Draw frames in a ring, the skip at its end included."""
    return _code(
        [
            "tail (reader)                      head (writer, stored last)",
            "  |                                  |",
            "  v                                  v",
            "  [length|payload, padded to 8][length|payload][ free ... ][SKIP| unused ]",
            "                                                            ^",
            "                      the next frame does not fit before the end: it starts at 0",
            "",
            f"length, SKIP: one {ring.WORD}-byte word; SKIP = {ring.SKIP:#x}",
            f"a frame of 5 bytes takes {ring.pad_size(5)}, an empty one {ring.pad_size(0)};"
            f" the largest is half the ring less {ring.WORD}",
            "head and tail count bytes since the start: head == tail is empty, never wraps",
        ]
    )


def fields() -> str:
    """List every field of the control page."""
    rows = [
        (f"{field.offset:#06x}", f"`{field.name}`", str(field.size), field.writer, field.meaning)
        for field in layout.FIELDS
    ]
    return _table(("offset", "field", "bytes", "written by", "meaning"), rows)


def states() -> str:
    """List the wake-up protocol as `doorbell.STATES` has it."""
    rows = [
        (who, does, f"{before} -> {after}", why)
        for who, does, before, after, why in doorbell.STATES
    ]
    return _table(("who", "sees or does", "sleeping word", "why"), rows)


def fences() -> str:
    """List the orderings `fence` knows, as its docstring has them."""
    lines = (fence.__doc__ or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def ends() -> str:
    """List the three ends of a channel and what each reads and writes."""
    rows = [
        ("`router_end.RouterEnd`", "router", "reply", "request", "trio: awaits one descriptor"),
        (f"`channel.{channel.LeaderEnd.__name__}`", "rank 0", "reply", "request", "blocks"),
        (f"`channel.{channel.ShardEnd.__name__}`", "every rank", "request", "reply", "blocks"),
    ]
    return _table(("end", "lives in", "reads", "writes", "how it waits"), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "picture": picture,
    "frame picture": frame_picture,
    "fields": fields,
    "states": states,
    "fences": fences,
    "ends": ends,
}


def refresh(document: str) -> str:
    """Return `document` with every generated block made anew; raises ValueError for a lost one."""
    for name, render in BLOCKS.items():
        begin, end = f"<!-- generated: {name} -->", "<!-- end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        block = f"{begin}\n{render()}\n{end}"
        document, found = pattern.subn(block.replace("\\", r"\\"), document)
        if found != 1:
            raise ValueError(f"{DOCUMENT} has {found} blocks {begin}; there must be one")
    return document


def main() -> None:
    """Print the blocks, or refresh the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"refresh {DOCUMENT}")
    if parser.parse_args().write:
        DOCUMENT.write_text(refresh(DOCUMENT.read_text()))
        return
    for name, render in BLOCKS.items():
        print(f"{name}\n{render()}\n")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines)


def _code(lines: Sequence[str]) -> str:
    return "\n".join(["```text", *lines, "```"])


def _rule() -> str:
    return "+" + "-" * (_WIDTH + 2) + "+"


def _row(left: str, right: str) -> str:
    return f"| {left}{right.rjust(_WIDTH - len(left))} |"


def _wrap(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


if __name__ == "__main__":
    main()
