"""The batch's sequences as arrays, with one entry for each in admission order. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.messages import StateGrant
from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.media.prompt_geometry import PromptGeometry

NO_STOP = 1 << 62  # in `stop`: a token count that no sequence reaches
UNKNOWN = -1  # in `last`: chosen by a step whose result has not been settled

_ONE_TOKEN = np.array((1, 1, -1))  # what a token adds to `computed`, `length`, `remaining`
_FIRST_ROWS = 16  # rows and block table width to start with; both double when they no longer do
_FIRST_WIDTH = 8
_COLUMNS = (
    "id",
    "length",
    "computed",
    "given",
    "granted",
    "last",
    "remaining",
    "minimum",
    "ends",
    "held",
    "in_flight",
    "adapter",
    "delta",
    "current",
    "own",
    "stop",
    "save",
    "kept",
    "blocks",
)


class RowTable:
    """The sequences of a batch, and copies of their fields for planning and settling steps.

    Only the first `len(sequences)` entries of an array are real. Arrays are replaced when they
    grow: nobody may keep one.
    """

    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens of a KV block."""
        self.block_size = block_size
        self.sequences: list[ShardSequence] = []
        self.place_by_id: dict[int, int] = {}  # sequence id -> its place here and in the arrays
        self.moment = 0  # goes up whenever places change
        self.version = 0  # goes up with every command that changes a row
        self.holding = False  # whether any row may be held
        self.counting = False  # whether any row may have a minimum to generate
        self.shaped = False  # whether any row has a geometry
        self.own_ends: frozenset[int] = frozenset()  # tokens that end some row, not only EOS
        self.id = np.zeros(_FIRST_ROWS, np.uint64)
        self.length = np.zeros(_FIRST_ROWS, np.int64)  # tokens, those being chosen included
        self.computed = np.zeros(_FIRST_ROWS, np.int64)
        self.remaining = np.zeros(_FIRST_ROWS, np.int64)  # tokens still to generate at most
        self.given = np.zeros(_FIRST_ROWS, np.int64)  # tokens known at admission: prefill ends
        self.granted = np.zeros(_FIRST_ROWS, np.int64)  # KV tokens its blocks hold
        self.last = np.zeros(_FIRST_ROWS, np.int64)  # id of its last token, or UNKNOWN
        self.minimum = np.zeros(_FIRST_ROWS, np.int64)  # tokens to generate before EOS is allowed
        self.ends = np.zeros(_FIRST_ROWS, np.bool_)  # whether EOS ends it
        self.held = np.zeros(_FIRST_ROWS, np.bool_)  # sits steps out until it is released
        self.in_flight = np.zeros(_FIRST_ROWS, np.bool_)  # in a step that has not been settled
        self.adapter = np.zeros(_FIRST_ROWS, np.int64)  # number; 0: the base model
        self.delta = np.zeros(_FIRST_ROWS, np.int64)  # of rotary positions
        # Of models that keep states, see `StateGrant`.
        self.current = np.zeros(_FIRST_ROWS, np.int64)  # slot with the states behind `computed`
        self.own = np.zeros((_FIRST_ROWS, 2), np.int64)  # its two slots
        self.stop = np.zeros(_FIRST_ROWS, np.int64)  # tokens behind which its states are saved
        self.save = np.zeros(_FIRST_ROWS, np.int64)  # slot for that
        self.kept = np.zeros(_FIRST_ROWS, np.int64)  # leading tokens whose K and V stay
        self.blocks = np.zeros((_FIRST_ROWS, _FIRST_WIDTH), np.int32)  # block tables
        self._ids: tuple[int, NDArray[np.uint64]] = (0, self.id[:0])  # at which moment, and these
        self._stack_moving()

    def add(self, sequence: ShardSequence) -> int:
        """Append a row without blocks; return its place."""
        place = len(self.sequences)
        self._reserve(place + 1)
        self.sequences.append(sequence)
        self.place_by_id[sequence.id] = place
        self.id[place] = sequence.id
        self.length[place] = self.given[place] = sequence.length
        self.computed[place] = sequence.computed
        self.last[place] = sequence.token_ids[sequence.length - 1]
        self.remaining[place] = sequence.remaining
        self.minimum[place] = sequence.min_remaining
        self.ends[place] = not sequence.sampling.ignore_eos
        self.granted[place] = 0
        self.held[place] = self.in_flight[place] = False
        self.adapter[place] = sequence.sampling.adapter
        self.delta[place] = sequence.rotary_delta
        self.shaped |= sequence.geometry is not None
        self.blocks[place] = 0
        self._add_states(place, sequence)
        self.counting |= sequence.min_remaining > 0
        self.own_ends |= frozenset(sequence.sampling.ends)
        self.version += 1
        return place

    def shape(self, place: int, geometry: PromptGeometry) -> None:
        """Set what images change in a row's prompt, before any of it is computed."""
        sequence = self.sequences[place]
        sequence.geometry, sequence.rotary_delta = geometry, geometry.delta
        self.delta[place] = geometry.delta
        self.shaped = True
        self.version += 1

    def _add_states(self, place: int, sequence: ShardSequence) -> None:
        states = sequence.states
        self.stop[place], self.save[place] = NO_STOP, 0
        if states is not None:
            self.own[place] = states.slots
            self.current[place] = states.source or states.slots[1]
            self.kept[place] = states.held_length
            self._find_stop(place, states)
        else:
            self.own[place] = self.current[place] = self.kept[place] = 0

    def _find_stop(self, place: int, states: StateGrant) -> None:
        computed = self.computed[place]
        ahead = ((at, slot) for at, slot in states.saves if at > computed)
        self.stop[place], self.save[place] = next(ahead, (NO_STOP, 0))

    def state_slots(
        self, places: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the slots that rows read and write, if they compute up to `ends` tokens."""
        reads = self.current[places]
        own = self.own[places]
        spare = np.where(reads == own[:, 0], own[:, 1], own[:, 0])
        return reads, np.where(ends == self.stop[places], self.save[places], spare)

    def move_states(self, places: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Note where the states of rows are, whose `computed` has been moved."""
        self.current[places] = slots
        for place in places[self.computed[places] >= self.stop[places]].tolist():
            states = self.sequences[place].states
            if states is not None:
                self._find_stop(place, states)

    def hold(self, place: int, held: bool) -> None:
        """Let a row sit steps out, or no longer."""
        self.held[place] = held
        self.holding = bool(self.held[: len(self.sequences)].any())
        self.version += 1

    def remove(self, places: set[int]) -> list[ShardSequence]:
        """Take rows out and close the gaps; return their sequences."""
        removed = [self.sequences[place] for place in sorted(places)]
        keep = np.array([p for p in range(len(self.sequences)) if p not in places], np.int64)
        for name in _COLUMNS:
            column = getattr(self, name)
            column[: len(keep)] = column[keep]
        self.sequences = [self.sequences[place] for place in keep.tolist()]
        self.place_by_id = {sequence.id: place for place, sequence in enumerate(self.sequences)}
        self.moment += 1
        self.version += 1
        self.holding = bool(self.held[: len(keep)].any())
        self.shaped = self.shaped and any(row.geometry is not None for row in self.sequences)
        if self.own_ends:
            self.own_ends = frozenset(id for row in self.sequences for id in row.sampling.ends)
        self.note_minimums()
        return removed

    def note_minimums(self) -> None:
        """Update `counting`, after a row's minimum may have changed."""
        self.counting = bool((self.minimum[: len(self.sequences)] > 0).any())

    def clear(self) -> list[ShardSequence]:
        """Take all rows out and return their sequences."""
        removed, self.sequences, self.place_by_id = self.sequences, [], {}
        self.moment += 1
        self.version += 1
        self.holding = self.counting = self.shaped = False
        self.own_ends = frozenset()
        return removed

    @property
    def ids(self) -> NDArray[np.uint64]:
        """The rows' ids, read-only: the same array for as long as the rows are the same."""
        moment, ids = self._ids
        rows = len(self.sequences)
        if moment != self.moment or len(ids) != rows:
            ids = self.id[:rows].copy()
            ids.flags.writeable = False
            self._ids = self.moment, ids
        return ids

    def move_first(self, rows: int, last: NDArray[np.int64] | int) -> None:
        """Move the first rows by a token; `last`: these tokens, [rows], or one value for all."""
        moving, more = self._moving, self._one_token
        if rows != len(self.sequences):  # without slices it takes a third of the time
            moving, more = moving[:, :rows], more[:, :rows]
        moving += more
        self.last[:rows] = last

    def places(self, plan: StepPlan) -> NDArray[np.int64]:
        """Return where a plan's rows are now, -1 for those that have left: int64 [R]."""
        if plan.places is not None and plan.moment == self.moment:
            return plan.places
        return np.array([self._place(row) for row in plan.rows], np.int64)

    def _place(self, sequence: ShardSequence) -> int:
        place = self.place_by_id.get(sequence.id, -1)
        return place if place >= 0 and self.sequences[place] is sequence else -1

    def grant(self, place: int, block_ids: Iterable[int]) -> None:
        """Add blocks to a row's table."""
        own = self.sequences[place].block_ids
        have = len(own)
        own.extend(block_ids)
        rows, width = self.blocks.shape
        if len(own) > width:
            wider = np.zeros((rows, max(2 * width, len(own))), np.int32)
            wider[:, :width] = self.blocks
            self.blocks = wider
        self.blocks[place, have : len(own)] = own[have:]
        self.granted[place] = len(own) * self.block_size
        self.version += 1

    def _reserve(self, rows: int) -> None:
        """Make room for `rows` rows in every array."""
        if rows <= len(self.length):
            return
        for name in _COLUMNS:
            old: NDArray[Any] = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros_like(old))))
        self._stack_moving()

    def _stack_moving(self) -> None:
        """Put the columns that move with every token into one array, so that one call moves all.

        That call also adds to entries beyond the rows, which nobody reads.
        """
        self._moving = np.stack((self.computed, self.length, self.remaining))
        self._one_token = np.repeat(_ONE_TOKEN[:, None], len(self.computed), axis=1)
        self.computed, self.length, self.remaining = self._moving

    def check(self) -> None:
        """Raise AssertionError unless arrays, sequences and index agree."""
        if list(self.place_by_id) != [sequence.id for sequence in self.sequences]:
            raise AssertionError("the index does not list the rows in order")
        if self.ids.tolist() != list(self.place_by_id):
            raise AssertionError("ids that are kept are not the rows'")
        for place, sequence in enumerate(self.sequences):
            blocks = sequence.block_ids
            facts = {
                "place": self.place_by_id[sequence.id] == place,
                "length": self.length[place] == sequence.length <= len(sequence.token_ids),
                "computed": self.computed[place] == sequence.computed < sequence.length,
                "granted": self.granted[place] == len(blocks) * self.block_size,
                "within grant": sequence.computed <= self.granted[place],
                "last token": self.last[place] == sequence.token_ids[sequence.length - 1],
                "to generate": self.remaining[place] == sequence.remaining,
                "delta": self.delta[place] == sequence.rotary_delta,
                "minimum": self.minimum[place] == sequence.min_remaining,
                "table": self.blocks[place, : len(blocks)].tolist() == blocks,
                "padding": not self.blocks[place, len(blocks) :].any(),
                "states": sequence.states is None or self._knows_states(place, sequence.states),
                "remaining": sequence.remaining > 0 <= sequence.min_remaining,
            }
            wrong = [name for name, holds in facts.items() if not holds]
            if wrong:
                raise AssertionError(f"sequence {sequence.id}: wrong {', '.join(wrong)}")

    def _knows_states(self, place: int, states: StateGrant) -> bool:
        slots = {*states.slots, states.source, *(slot for _, slot in states.saves)} - {0}
        return self.current[place] in slots and self.computed[place] < self.stop[place]
