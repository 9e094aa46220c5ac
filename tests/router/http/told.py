"""A stream as a front gets it: events, and the token ids that its client has with them."""

from __future__ import annotations

import re

from tests.router.http.served import without_receipts


class Told:
    """What a front has of a stream: whole groups of events, and the ids of each."""

    def __init__(self, body: bytes) -> None:
        self.groups: list[tuple[bytes, str]] = []  # events as the client gets them, what they told
        events, told = b"", ""
        assert body.endswith(b"\n\n")
        for event in body[:-2].split(b"\n\n"):
            line = re.match(rb":i ([^\n]*)\n", event)
            events += event[line.end() if line else 0 :] + b"\n\n"
            if line is not None:
                told = line[1].decode()
                self.groups.append((events, told))
                events = b""
        assert events == b"", "an event without ids has one with them behind it"

    def client(self, count: int | None = None) -> bytes:
        """Return what a client has got of the first `count` groups."""
        events = without_receipts(b"".join(events for events, _ in self.groups[:count]))
        return re.sub(rb'"completed_at":\d+', b"", events)

    def emitted(self, count: int) -> str:
        """Return the header for the rest."""
        ids: dict[str, list[str]] = {}
        ended = set()
        for _, told in self.groups[:count]:
            choice, _, text = told.partition(":")
            ids.setdefault(choice, []).extend(filter(None, text.removesuffix("!").split(",")))
            if told.endswith("!"):
                ended.add(choice)
        return ";".join(f"{c}:{','.join(each)}{'!' * (c in ended)}" for c, each in ids.items())
