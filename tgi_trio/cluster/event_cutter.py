"""Cuts a replica's event stream into whole events, and records the token ids behind them.

A replica sends ids to the front as comment lines (docs/cluster.md): `:i 0:17,4` precedes the last
event of those tokens of choice 0. The front removes these lines and remembers the ids, so that it
can tell another replica where to resume. What it remembers has to match what the client has got:
events without such a line yet are held back, and dropped if their replica is lost.
"""

from __future__ import annotations

MARK = b":i "  # begins a line of ids
_END = b"\n\n"  # of an event


class BadStream(Exception):
    """The data is not an event stream as replicas write it; the text says why."""


class EventCutter:
    """One client's stream, from one replica or from several in succession."""

    def __init__(self, longest: int, has_ids: bool) -> None:
        """`longest`: bytes that may be held back; `has_ids`: whether replicas send ids."""
        self._longest = longest
        self._has_ids = has_ids
        self._rest = bytearray()  # the beginning of an incomplete event
        self._held: list[bytes] = []  # whole events whose ids have not come yet
        self._held_size = 0  # bytes
        self._ids: dict[bytes, bytearray] = {}  # choice -> ids, separated by commas
        self._ended: set[bytes] = set()  # choices that have ended

    @property
    def emitted(self) -> bytes:
        """The ids of all events returned so far, in the form of `x-tgi-emitted`: `0:17,4;1:5!`."""
        return b";".join(
            b"%b:%b%b" % (choice, bytes(ids), b"!" if choice in self._ended else b"")
            for choice, ids in self._ids.items()
        )

    def start_again(self) -> None:
        """Drop what is held back: the replica that resumes the stream sends it again."""
        self._rest.clear()
        self._held.clear()
        self._held_size = 0

    def cut(self, data: bytes) -> bytes:
        """Return the events that the client may get now, without the lines of ids.

        Raises BadStream if too much has to be held back, or if ids cannot be parsed.
        """
        if data.startswith(MARK) and self._has_ids and not (self._rest or self._held):
            line, _, event = data.partition(b"\n")
            if event.find(_END) == len(event) - len(_END) >= 0:  # one event, as most reads bring
                self._note(line[len(MARK) :])
                return event
        rest = self._rest
        begin = max(0, len(rest) - 1)  # where an end may be that was not there before
        rest += data
        end = rest.rfind(_END, begin) + len(_END)
        events = b""
        if end >= len(_END):
            events = bytes(rest[:end])
            del rest[:end]
        if self._has_ids and events:
            events = self._take_ids(events)
        if len(self._rest) + self._held_size > self._longest:
            raise BadStream(f"more than {self._longest} bytes without ids or without an end")
        return events

    def finish(self) -> bytes:
        """Return the events that are still held back; for a stream that ended properly."""
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
        """Record a line's ids, e.g. `0:17,4`; `0:17!` if the choice ends there."""
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
