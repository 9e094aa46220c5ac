"""The pictures and tables of docs/ipc.md: the segment, frames, the doorbell's states, fences."""

from __future__ import annotations

from typing import Final

from tgi_trio.ipc import channel, doorbell, endpoints, fence, layout, ring
from tools.docs.markdown import Sections, code, table

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
    return code(rows)


def frame_picture() -> str:
    """Draw frames in a ring, the skip at its end included."""
    return code(
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
            f" above half the ring less {ring.WORD}",
            f"it goes in parts, which have {ring.PART:#x} or'ed to their lengths,",
            f"and the last one {ring.LAST:#x}",
            "head and tail count bytes since the start: head == tail is empty, never wraps",
        ]
    )


def fields() -> str:
    """List every field of the control page."""
    rows = [
        (f"{field.offset:#06x}", f"`{field.name}`", str(field.size), field.writer, field.meaning)
        for field in layout.FIELDS
    ]
    return table(("offset", "field", "bytes", "written by", "meaning"), rows)


def states() -> str:
    """List the wake-up protocol as `doorbell.STATES` has it."""
    rows = [
        (who, does, f"{before} -> {after}", why)
        for who, does, before, after, why in doorbell.STATES
    ]
    return table(("who", "sees or does", "sleeping word", "why"), rows)


def fences() -> str:
    """List the orderings `fence` knows, as its docstring has them."""
    lines = (fence.__doc__ or "").splitlines()
    return "".join(f"{line}\n" for line in lines if line.startswith("|"))


def ends() -> str:
    """List the three ends of a channel and what each reads and writes."""
    rows = [
        ("`router_end.RouterEnd`", "router", "reply", "request", "trio: awaits one descriptor"),
        (f"`channel.{channel.LeaderEnd.__name__}`", "rank 0", "reply", "request", "blocks"),
        (f"`channel.{channel.ShardEnd.__name__}`", "every rank", "request", "reply", "blocks"),
    ]
    return table(("end", "lives in", "reads", "writes", "how it waits"), rows)


SECTIONS: Final[Sections] = {
    "ends": ends,
    "segment": picture,
    "fields": fields,
    "frames-in-a-ring": frame_picture,
    "doorbell-states": states,
    "fences": fences,
}


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
