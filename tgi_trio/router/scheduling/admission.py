"""Admission: which waiting sequence goes to the shard next."""

from __future__ import annotations

import enum
from typing import Final

from tgi_trio.router.scheduling.image_pins import ImagePins
from tgi_trio.router.scheduling.isolation import Isolation
from tgi_trio.router.scheduling.kv_memory import KvMemory
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.queue import WaitingQueue
from tgi_trio.router.scheduling.running_batch import RunningBatch
from tgi_trio.router.scheduling.sequence import Sequence

MOST_EVICTED: Final = 4096  # blocks at a time, a few milliseconds; a long prompt wants 60,000
# Blocks of one prompt that are named in a turn, 4 ms, where copies are looked for in the host's
# memory. Of others few are named in the same turn, so that no short prompt waits.
MOST_DIGESTED: Final = 4096
_FEW_DIGESTED: Final = 256


class AdmissionVerdict(enum.Enum):
    """Whether a waiting sequence can be admitted now, or why not."""

    ADMITTED = "admitted"
    NO_ROOM = "no room"  # too few blocks are available
    NOT_COPIED = "not copied"  # what has to go for it is not yet in the host's memory
    MAKING_ROOM = "making room"  # what has to go for it is too much to be evicted at once
    DIGESTING = "digesting"  # its prompt is too long to be looked for in the host's memory at once
    NOT_ITS_TURN = "not its turn"  # enough prompt tokens are to be computed before its own
    NO_PIXELS = "no pixels"  # its images are not decoded yet
    SHARES_SOON = "shares soon"  # another sequence is computing its prefix, which it can then share


_UNREADY: Final = (
    AdmissionVerdict.NOT_COPIED,
    AdmissionVerdict.MAKING_ROOM,
    AdmissionVerdict.DIGESTING,
)


class Admission:
    """Moves sequences from the queue into the batch."""

    def __init__(
        self,
        limits: SchedulingLimits,
        queue: WaitingQueue,
        batch: RunningBatch,
        memory: KvMemory,
        isolation: Isolation,
        pins: ImagePins,
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._batch = batch
        self._memory = memory
        self._isolation = isolation
        self._pins = pins
        self.makes_room = False  # a sequence of the last pass waits for nothing but the next one
        self.behind = 0  # waiting sequences that wait for other prompts rather than for memory
        # (queue's version, available blocks) at the last pass in which nothing but memory lacked;
        # (-1, 0) after other passes.
        self._no_room_at = (-1, 0)

    def admit(self, now: float) -> list[Sequence]:
        """Move the sequences that can be admitted, in queue order, and return them.

        To avoid head-of-line blocking, later sequences may pass one that cannot go yet. To avoid
        starvation there are limits: one that lacks blocks is passed at most `skip_limit` times, one
        whose turn has not come by at most as many prompt tokens as it has itself.
        """
        queue, batch, skip_limit = self._queue, self._batch, self._limits.skip_limit
        self.makes_room = False
        queue.rank(now)
        if self._lacks_room_as_before:
            return []
        admitted: list[Sequence] = []
        without_room: list[Sequence] = []
        without_turn: list[Sequence] = []
        places = self._isolation.places()
        passed = held_back = unready = 0
        skips = 0  # of the one of `without_room` that was passed most often
        room = self._available
        anyone_has_turn = batch.has_turn(1)
        may_go = anyone_has_turn and places != 0 and not self._is_full
        # A copy, since admitted sequences leave the queue. In nearly every step nearly every
        # sequence is passed over at `short_at`, so that path is kept short.
        for sequence in list(queue) if may_go else ():
            if places is not None and sequence not in self._isolation:
                held_back += 1
                continue
            if room <= sequence.short_at:
                verdict = AdmissionVerdict.NO_ROOM  # as before: too little has become available
            else:
                verdict = self._try(sequence, room, without_turn)
            if verdict is AdmissionVerdict.ADMITTED:
                queue.admit(sequence)
                batch.enter(sequence)
                admitted.append(sequence)
                places = self._isolation.places()
                skips += bool(without_room)
                _passes(sequence, without_room, without_turn)
                room = self._available
            else:
                passed += 1
                unready += verdict in _UNREADY
                if verdict is AdmissionVerdict.NO_ROOM or verdict in _UNREADY:
                    without_room.append(sequence)
                    if sequence.skipped > skips:
                        skips = sequence.skipped
                elif verdict is AdmissionVerdict.NOT_ITS_TURN:
                    without_turn.append(sequence)
            if passed > skip_limit or skips >= skip_limit:
                break
            if verdict is not AdmissionVerdict.NO_ROOM:
                anyone_has_turn = batch.has_turn(1, without_turn)
                if not anyone_has_turn or places == 0 or self._is_full:
                    break
        self._remember(
            lacking_room=len(without_room) - unready,
            lacking_turn=len(without_turn),
            seen=passed + held_back,
            anyone_has_turn=anyone_has_turn,
        )
        return admitted

    @property
    def _lacks_room_as_before(self) -> bool:
        version, available = self._no_room_at
        return self._queue.version == version and self._available <= available

    def _remember(
        self, *, lacking_room: int, lacking_turn: int, seen: int, anyone_has_turn: bool
    ) -> None:
        """Keep the results of a pass over the queue, for the step budget and for the next pass.

        `seen`: sequences that were looked at and not admitted. The rest of the queue was not looked
        at; it waits for a turn unless somebody still has one.
        """
        unseen = len(self._queue) - seen
        self.behind = lacking_turn + (0 if anyone_has_turn else unseen)
        only_room_lacks = anyone_has_turn and 0 < lacking_room == seen
        self._no_room_at = (self._queue.version, self._available) if only_room_lacks else (-1, 0)

    @property
    def _is_full(self) -> bool:
        """Whether no further sequence can be admitted, however short."""
        return self._batch.is_full or not self._memory.has_slots

    @property
    def _available(self) -> int:
        """Blocks for new sequences; one for each member of the batch is kept for its growth."""
        headroom = 0 if self._limits.reserve else len(self._batch)
        return self._memory.available - headroom

    def _try(
        self, sequence: Sequence, available: int, without_turn: list[Sequence]
    ) -> AdmissionVerdict:
        """Grant `sequence` its blocks if it can be admitted; `available`: blocks."""
        limits, memory = self._limits, self._memory
        if not memory.digest(sequence, _FEW_DIGESTED if self.makes_room else MOST_DIGESTED):
            self.makes_room = True
            return AdmissionVerdict.DIGESTING
        match = memory.match(sequence)
        if match is not None and match.claimed:
            return AdmissionVerdict.SHARES_SOON
        tokens = sequence.length
        if not self._batch.has_turn(tokens - memory.count_cached(match), without_turn):
            return AdmissionVerdict.NOT_ITS_TURN
        # Members of the batch were extended before: if one still lacks blocks, none is available.
        wanted = sequence.need
        if not limits.reserve:
            wanted = min(wanted, tokens + limits.grant_tokens)
        lacking = memory.price(match, wanted) - available
        if lacking > 0:
            # Try again once half of the lacking blocks have been freed. Trying after every freed
            # block would cost more than it finds; waiting for all of them would be too long, since
            # its prefix may be cached by then.
            sequence.short_at = available + lacking // 2
            return AdmissionVerdict.NO_ROOM
        if self._batch.running and memory.lags(match, wanted, self._batch.growing_blocks):
            return AdmissionVerdict.NOT_COPIED
        free, shared = memory.free, 0 if match is None else len(match.blocks)
        if memory.blocks_for(wanted) - shared - free > MOST_EVICTED:
            memory.make_free(free + MOST_EVICTED, match)
            # Nothing may have gone: the rest of a run of which `match` is a part goes with `admit`.
            if memory.free > free:
                self.makes_room = True
                return AdmissionVerdict.MAKING_ROOM
        if not self._pins.pin(sequence):
            return AdmissionVerdict.NO_PIXELS
        memory.admit(sequence, match, wanted)
        sequence.short_at = -1
        return AdmissionVerdict.ADMITTED


def _passes(sequence: Sequence, without_room: list[Sequence], without_turn: list[Sequence]) -> None:
    """Note that `sequence`, just admitted, has passed those that were looked at before it."""
    for other in without_room:
        other.skipped += 1
    for other in without_turn:
        other.overtaken += sequence.target - sequence.computed
