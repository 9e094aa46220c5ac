"""Whole events of a replica's stream, and the token ids that they complete.

A replica tells a front of ids by comment lines (docs/cluster.md): `:i 0:17,4` stands before the
last event that those tokens of choice 0 bring. Clients never see the line; what it says is kept, so
that another replica can be told what a client has. That holds only if a client gets exactly the
events whose ids are kept: what has no such line yet is held back, and forgotten when its replica is
lost.
"""

from __future__ import annotations

MARK = b":i "  # begins a line of ids
_END = b"\n\n"  # of an event


class BadStream(Exception):
    """What came is no stream of events as replicas write them; the text says why."""


class EventCutter:
    """One client's stream, whichever replicas it comes from."""

    def __init__(self, longest: int, told: bool) -> None:
        """`longest`: bytes that may be held back; `told`: the replicas tell of ids."""
        self._longest = longest
        self._told = told
        self._rest = b""  # of an event that is not whole
        self._held: list[bytes] = []  # whole events that no line has come for
        self._held_size = 0  # bytes
        self._ids: dict[bytes, bytearray] = {}  # choice -> ids, by commas
        self._ended: set[bytes] = set()  # choices that get nothing more

    @property
    def emitted(self) -> bytes:
        """What has been completed so far, as `x-tgi-emitted` has it: `0:17,4;1:5!`."""
        return b";".join(
            b"%b:%b%b" % (choice, bytes(ids), b"!" if choice in self._ended else b"")
            for choice, ids in self._ids.items()
        )

    def start_again(self) -> None:
        """Go on with another replica: it sends anew what was held back."""
        self._rest = b""
        self._held.clear()
        self._held_size = 0

    def cut(self, data: bytes) -> bytes:
        """Return the events that are a client's by now, without their ids.

        Raises BadStream for too much that has to be held back, and for ids that cannot be read.
        """
        if data.startswith(MARK) and self._told and not (self._rest or self._held):
            line, _, event = data.partition(b"\n")
            if event.find(_END) == len(event) - len(_END) >= 0:  # one event, as most reads bring
                self._note(line[len(MARK) :])
                return event
        if self._rest:
            data = self._rest + data
        end = data.rfind(_END) + len(_END)
        if end < len(_END):
            end = 0
        self._rest = data[end:]
        events = data[:end]
        if self._told and events:
            events = self._take_ids(events)
        if len(self._rest) + self._held_size > self._longest:
            raise BadStream(f"more than {self._longest} bytes without ids or without an end")
        return events

    def finish(self) -> bytes:
        """Return the events that no line has come for; the stream has ended as it should."""
        held = b"".join(self._held)
        self.start_again()
        return held

    def _take_ids(self, events: bytes) -> bytes:
        kept: list[bytes] = []
        for event in events.split(_END)[:-1]:
            if not event.startswith(b":"):
                self._held.append(event + _END)
                self._held_size += len(event) + len(_END)
                continue
            if event.startswith(MARK):
                line, _, event = event.partition(b"\n")
                self._note(line[len(MARK) :])
            kept += self._held
            self._held.clear()
            self._held_size = 0
            if event:
                kept.append(event + _END)
        return b"".join(kept)

    def _note(self, line: bytes) -> None:
        """Keep what a line says, e.g. `0:17,4` or, as the last of a choice, `0:17!`."""
        choice, colon, ids = line.strip().partition(b":")
        last = ids.endswith(b"!")
        if last:
            ids = ids[:-1]
        readable = ids.isdigit() or (colon and (not ids or ids.replace(b",", b"").isdigit()))
        if not (readable and choice.isdigit()):
            raise BadStream(f"ids that cannot be read: {line[:80]!r}")
        known = self._ids.get(choice)
        if known is None:
            known = self._ids[choice] = bytearray()
        elif known and ids:
            known += b","
        known += ids
        if last:
            self._ended.add(choice)
