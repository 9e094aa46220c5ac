"""Races between the programs of a launch, and between the lanes of a program.

On a device the programs of a launch run in any order and at once. A program's accesses are divided
into phases by its barriers (`tl.debug_barrier`). What it did in earlier phases is known to a
program that acquires, by a scalar atomic of scope gpu, what it has released after that barrier by
another: without the barrier, only the thread that releases knows that its own writes are done, and
the others' may be under way. Everything else is unordered (a happens-before detector with vector
clocks, as by Flanagan and Freund's FastTrack, PLDI 2009, with phases for clocks).

Lanes of a program are different threads unless they have the same place in blocks of one shape and
dtype. Threads of a program are ordered by its barriers alone. (Triton's reductions have barriers as
well, but only some of them.) A block of fewer numbers than threads is loaded by several that have
copies of it, and stored by one of them: the others may come later. That matters where a copy is
used for anything else than what is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_trio.testing.sanitizer.memory import Argument, Flags, Places, Region

_NOBODY: Final = -1
_MANY: Final = -2  # programs have read a place; see the log
_MIXED: Final = -1  # lanes of several places have read a place since the last barrier
_OWN_EVENT: Final = -1  # phase of an atomic that orders itself

Numbers = NDArray[np.int32]


class Access(NamedTuple):
    """Lanes of one load, store or atomic."""

    argument: Argument
    at: Places  # bytes from the beginning of the region
    size: int  # bytes of a number
    lanes: Places
    key: int  # of shape and dtype
    site: int
    alone: bool = False  # no block: one thread of the program does it, and tells the others
    copied: bool = False  # a block of fewer numbers than threads: all of them load it


class Clash(NamedTuple):
    """Two accesses that nothing orders."""

    kind: Literal["race", "hazard", "copies"]
    what: str
    argument: str
    site: int
    other: int  # site of the earlier one
    program: int
    earlier: int  # program
    offset: int
    harmless: bool  # both write the same


@dataclass(slots=True)
class _Shadow:
    """The last accesses of each unit that is written somewhere during a launch."""

    numbers: NDArray[np.int64]  # by unit of the region: its place below; -1: never written
    grain: int
    writer: Numbers
    write_phase: Numbers
    write_lane: NDArray[np.int64]
    write_key: NDArray[np.int64]
    write_site: Numbers
    atomic: Flags
    reader: Numbers
    read_phase: Numbers
    read_lane: NDArray[np.int64]
    read_key: NDArray[np.int64]
    read_site: Numbers
    reads: list[tuple[int, int, int, Places]]  # program, phase, site, places: of those in turn


def _make_shadow(region: Region) -> _Shadow:
    assert region.written is not None
    grain = region.grain
    padded = np.zeros(-(-region.size // grain) * grain, np.bool_)
    padded[: region.size] = region.written
    for begin, end in region.shared:
        padded[begin:end] = False
    units = padded.reshape(-1, grain).any(1)
    count = int(units.sum())
    numbers = np.where(units, np.cumsum(units) - 1, -1)

    def full(value: int) -> Numbers:
        return np.full(count, value, np.int32)

    def wide(value: int) -> NDArray[np.int64]:
        return np.full(count, value, np.int64)

    return _Shadow(
        *(numbers, grain, full(_NOBODY), full(0), wide(0), wide(0), full(0)),
        *(np.zeros(count, np.bool_), full(_NOBODY), full(0), wide(0), wide(0), full(0), []),
    )


@dataclass(slots=True)
class Races:
    """Watches a run of a launch whose writes are known from an earlier run."""

    programs: int
    report: Callable[[Clash], None]
    program: int = 0
    phase: int = 0
    _shadows: dict[int, _Shadow | None] = field(default_factory=dict)
    _known: dict[int, Numbers] = field(default_factory=dict)  # by program: phases of the others
    _released: dict[int, Numbers] = field(default_factory=dict)  # by address
    _pending: list[Numbers] = field(default_factory=list)  # acquired by some of the threads

    def begin(self, program: int) -> None:
        """Note which program runs from here on."""
        self.program, self.phase = program, 0
        self._pending.clear()

    def pass_barrier(self) -> None:
        self.phase += 1
        for clock in self._pending:
            self._learn(clock)
        self._pending.clear()

    def synchronise(self, access: Access, *, acquires: bool, releases: bool) -> None:
        """Note what an atomic makes known, before it is noted as an access itself."""
        for address in np.unique(access.at + access.argument.region.base).tolist():
            told = self._released.get(address)
            if acquires and told is not None:
                if access.alone:
                    self._learn(told.copy())
                else:
                    self._pending.append(told.copy())
            if releases:
                if told is None:
                    told = self._released[address] = np.zeros(self.programs, np.int32)
                known = self._known.get(self.program)
                if known is not None:
                    np.maximum(told, known, out=told)
                told[self.program] = max(int(told[self.program]), self.phase)

    def _learn(self, clock: Numbers) -> None:
        own = self._known.get(self.program)
        if own is None:
            self._known[self.program] = clock
        else:
            np.maximum(own, clock, out=own)

    def read(self, access: Access) -> None:
        """Note a load."""
        if (shadow := self._shadow(access)) is None:
            return
        at, lanes = self._units(shadow, access)
        if not len(at):
            return
        self._meet_writer(shadow, access, at, lanes, "reads what another writes", None)
        reader = shadow.reader[at]
        alone = (reader == _NOBODY) | (reader == self.program)
        alone |= (reader >= 0) & self._is_known(reader, shadow.read_phase[at])
        again = (reader == self.program) & (shadow.read_phase[at] == self.phase)
        apart = (shadow.read_lane[at] != lanes) | (shadow.read_key[at] != access.key)
        shadow.reader[at] = np.where(alone, self.program, _MANY)
        shadow.read_phase[at], shadow.read_site[at] = self.phase, access.site
        shadow.read_lane[at] = np.where(again & apart, _MIXED, lanes)
        shadow.read_key[at] = access.key
        shadow.reads.append((self.program, self.phase, access.site, at))

    def write(self, access: Access, same: Flags | None, *, atomic: bool, event: bool) -> None:
        """Note a store or an atomic.

        `same`: for each lane of a store, whether it writes what is there; `event`: whether an
        atomic releases, and with it itself.
        """
        if (shadow := self._shadow(access)) is None:
            return
        at, lanes, alike = self._spread_units(shadow, access, same)
        if not atomic:
            for address in np.unique(access.at + access.argument.region.base).tolist():
                self._released.pop(address, None)
        what = "changes what another writes" if atomic else "writes what another writes"
        self._meet_writer(shadow, access, at, lanes, what, alike, atomic=atomic)
        self._meet_readers(shadow, access, at, lanes, alike)
        shadow.writer[at], shadow.atomic[at] = self.program, atomic
        shadow.write_phase[at] = _OWN_EVENT if event else self.phase
        shadow.write_lane[at], shadow.write_key[at] = lanes, access.key
        shadow.write_site[at] = access.site

    def _shadow(self, access: Access) -> _Shadow | None:
        region = access.argument.region
        if region.base not in self._shadows:
            made = None if region.written is None else _make_shadow(region)
            self._shadows[region.base] = made
        return self._shadows[region.base]

    def _units(self, shadow: _Shadow, access: Access) -> tuple[Places, Places]:
        at, lanes, _ = self._spread_units(shadow, access, None)
        return at, lanes

    def _spread_units(
        self, shadow: _Shadow, access: Access, same: Flags | None
    ) -> tuple[Places, Places, Flags | None]:
        """Return the shadow's places of all units of an access, and their lanes."""
        parts = max(1, access.size // shadow.grain)
        units = access.at // shadow.grain
        lanes = access.lanes
        if parts > 1:
            units = (units[:, None] + np.arange(parts)).reshape(-1)
            lanes = np.repeat(lanes, parts)
            same = None if same is None else np.repeat(same, parts)
        at = shadow.numbers[units]
        there = at >= 0
        if there.all():
            return at, lanes, same
        return at[there], lanes[there], None if same is None else same[there]

    def _is_known(self, programs: Numbers, phases: Numbers) -> Flags:
        """Return which accesses of other programs are ordered before what this one does."""
        clock = self._known.get(self.program)
        known = 0 if clock is None else clock[np.maximum(programs, 0)]
        found: Flags = phases < known
        return found

    def _meet_writer(
        self,
        shadow: _Shadow,
        access: Access,
        at: Places,
        lanes: Places,
        what: str,
        same: Flags | None,
        atomic: bool = False,
    ) -> None:
        writer, phase = shadow.writer[at], shadow.write_phase[at]
        ordered = self._is_known(writer, phase)
        other = (writer >= 0) & (writer != self.program) & ~ordered
        own = (writer == self.program) & (phase == self.phase)
        if atomic:
            other &= ~shadow.atomic[at]
            own &= ~shadow.atomic[at]
        apart = (shadow.write_lane[at] != lanes) | (shadow.write_key[at] != access.key)
        sites, loads = shadow.write_site, what.startswith("reads")
        self._report(shadow, access, at, other, "race", what, sites, writer, same)
        self._report(shadow, access, at, own & apart, "hazard", what, sites, writer, same)
        if loads and access.copied:
            self._report(shadow, access, at, own & ~apart, "copies", what, sites, writer, same)

    def _meet_readers(
        self, shadow: _Shadow, access: Access, at: Places, lanes: Places, same: Flags | None
    ) -> None:
        what = "writes what another reads"
        reader, phase = shadow.reader[at], shadow.read_phase[at]
        other = (reader >= 0) & (reader != self.program) & ~self._is_known(reader, phase)
        own = (reader == self.program) & (phase == self.phase)
        apart = (shadow.read_lane[at] != lanes) | (shadow.read_key[at] != access.key)
        sites = shadow.read_site
        self._report(shadow, access, at, other, "race", what, sites, reader, same)
        self._report(shadow, access, at, own & apart, "hazard", what, sites, reader, same)
        if access.copied:
            self._report(shadow, access, at, own & ~apart, "copies", what, sites, reader, same)
        many = reader == _MANY
        if not many.any():
            return
        for program, phase_then, site, places in shadow.reads:
            if program == self.program:
                continue
            clock = self._known.get(self.program)
            if clock is not None and phase_then < clock[program]:
                continue
            met = many & np.isin(at, places)
            if met.any():
                sites = np.full(len(shadow.reader), site, np.int32)
                by = np.full(len(at), program, np.int32)
                self._report(shadow, access, at, met, "race", what, sites, by, same)
                return

    def _report(
        self,
        shadow: _Shadow,
        access: Access,
        at: Places,
        met: Flags,
        kind: Literal["race", "hazard", "copies"],
        what: str,
        sites: Numbers,
        programs: Numbers,
        same: Flags | None,
    ) -> None:
        if not met.any():
            return
        harmless = same is not None and bool(same[met].all())
        if same is not None and not harmless:
            met = met & ~same
        first = int(np.flatnonzero(met)[0])
        offset = int(np.searchsorted(np.maximum.accumulate(shadow.numbers), at[first]))
        self.report(
            Clash(
                *(kind, what, access.argument.name, access.site, int(sites[at[first]])),
                *(self.program, int(programs[first]), offset * shadow.grain, harmless),
            )
        )
