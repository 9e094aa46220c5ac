"""Whole events of a replica's stream, and the token ids that they complete.

To a front a replica sends a comment line ahead of each event, `:i 0:17,4`: choice 0 has got the
tokens 17 and 4 (docs/front.md). Clients never see the line; what it says is kept, so that
another replica can be told what a client has. That holds only if a client gets exactly the events
whose ids are kept: half an event is held back, and forgotten when its replica is lost.
"""

from __future__ import annotations

MARK = b":i "  # begins a line of ids
_END = b"\n\n"  # of an event


class BadStream(Exception):
    """What came is no stream of events as replicas write them; the text says why."""


class EventCutter:
    """One client's stream, whichever replicas it comes from."""

    def __init__(self, longest_event: int) -> None:
        """`longest_event`: bytes that may come without completing an event."""
        self._longest = longest_event
        self._rest = b""  # of an event that is not whole
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
        """Go on with another replica: it sends anew what was not whole."""
        self._rest = b""

    def cut(self, data: bytes) -> bytes:
        """Return the events that `data` completes, without their ids.

        Raises BadStream for an event that does not end, and for ids that cannot be read.
        """
        if self._rest:
            data = self._rest + data
        end = data.rfind(_END) + len(_END)
        if end < len(_END):
            end = 0
        self._rest = data[end:]
        if len(self._rest) > self._longest:
            raise BadStream(f"an event of more than {self._longest} bytes")
        whole = data[:end]
        return self._take_ids(whole) if MARK in whole else whole

    def _take_ids(self, events: bytes) -> bytes:
        kept = []
        for event in events.split(_END)[:-1]:
            while event.startswith(MARK):
                line, _, event = event.partition(b"\n")
                self._note(line[len(MARK) :])
            if event:
                kept.append(event + _END)
        return b"".join(kept)

    def _note(self, line: bytes) -> None:
        """Keep what a line says, e.g. `0:17,4` or, as the last of a choice, `0:17!`."""
        for part in line.strip().split(b";"):
            choice, colon, ids = part.partition(b":")
            last = ids.endswith(b"!")
            ids = ids.removesuffix(b"!")
            readable = not ids or ids.replace(b",", b"").isdigit()
            if not (choice.isdigit() and colon and readable):
                raise BadStream(f"ids that cannot be read: {line[:80]!r}")
            known = self._ids.setdefault(choice, bytearray())
            if known and ids:
                known += b","
            known += ids
            if last:
                self._ended.add(choice)
