"""One launch of a kernel under the sanitizer: run in several orders, and compared.

The first run finds what the launch writes, and leaves out what strays from its tensors. Then what
it has written is undone and its programs run again: backwards, with their slots far away, watched
for races; shuffled; and, if they read memory that nothing has written, with other numbers in there.
The shuffled run's results stay, so that whatever a test compares has not been computed in order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from tgi_trio.testing.sanitizer.findings import Finding, Findings, Kind, Place
from tgi_trio.testing.sanitizer.memory import Bytes, Memory, Region, any_of, mark
from tgi_trio.testing.sanitizer.races import Access, Clash, Races

_AMONG: Final = {
    "race": "programs",
    "hazard": "lanes of a program",
    "copies": "threads with copies of a lane",
}
OTHER: Final = 0x7F  # of bytes that nothing has written, in another run
Program = tuple[int, int, int]


class Step(NamedTuple):
    """How an access orders programs."""

    acquires: bool = False
    releases: bool = False


@dataclass(slots=True)
class Launch:
    """A kernel's launch; the interpreter's accesses come here."""

    kernel: str
    memory: Memory
    grid: Program
    threads: int  # of a program
    findings: Findings
    sites: list[Place]
    exact: bool = True  # the first run, which checks bounds; the others mask what strays
    far: bool = False  # slots are far away in this run
    races: Races | None = None
    program: Program = (0, 0, 0)
    dependent: bool = False  # it begins before the preceding kernel has ended
    waited: bool = True  # the program has waited for earlier kernels
    let: bool = False  # the program has let the next kernel begin
    let_after: bool = False  # some program has done so after it had waited
    all_let: bool = True  # each program has done so
    all_waited: bool = True
    early_reads: list[Access] = field(default_factory=list)
    early_writes: list[Access] = field(default_factory=list)
    _unwritten: set[tuple[str, int]] = field(default_factory=set)  # argument, site

    # --- accesses ------------------------------------------------------------------------------

    def stray(self, argument: str, site: int, what: str, detail: str, kind: Kind) -> None:
        self.add(kind, argument, site, what, f" (program {self.program}: {detail})")

    def add(self, kind: Kind, argument: str, site: int, what: str, detail: str = "") -> None:
        place = str(self.sites[site]) if site >= 0 else ""
        self.findings.add(Finding(kind, self.kernel, argument, place, what, detail))

    def read(self, access: Access) -> None:
        """Note a load."""
        region = access.argument.region
        region.grain = min(region.grain, access.size)
        self._note_unwritten(access)
        if self.exact and not self.waited:
            self.early_reads.append(access)
        if self.races is not None:
            self.races.read(access)

    def write(self, access: Access, new: Bytes) -> None:
        """Note a store; `new`: [lanes, size], what it writes."""
        self._check_own_lanes(access, new)
        region = access.argument.region
        if self.races is not None:
            old = _gather(region, access)
            same = (old == new).all(1)
            self.races.write(access, same, atomic=False, event=False)
        self._note_write(access)

    def change(self, access: Access, step: Step) -> None:
        """Note an atomic."""
        if self.races is not None:
            self.races.synchronise(access, acquires=step.acquires, releases=step.releases)
            self.races.write(access, None, atomic=True, event=step.releases)
        self._note_unwritten(access)
        self._note_write(access)
        if self.exact:
            access.argument.region.note_count(access.at, access.size)

    def pass_barrier(self) -> None:
        if self.races is not None:
            self.races.pass_barrier()

    def _note_unwritten(self, access: Access) -> None:
        unwritten = access.argument.region.unwritten
        if not self.exact or unwritten is None:
            return
        if any_of(unwritten, access.at, access.size).any():
            self._unwritten.add((access.argument.name, access.site))

    def _note_write(self, access: Access) -> None:
        region = access.argument.region
        region.grain = min(region.grain, access.size)
        region.note_write(access.at, access.size)
        if self.exact:
            if region.unwritten is not None:
                mark(region.unwritten, access.at, access.size, False)
            if not self.waited:
                self.early_writes.append(access)

    def _check_own_lanes(self, access: Access, new: Bytes) -> None:
        """Report lanes of one store that write different numbers to one place."""
        if self.races is not None or len(access.at) < 2:
            return
        order = np.argsort(access.at, kind="stable")
        twice = np.flatnonzero(np.diff(access.at[order]) < access.size)
        if len(twice) and (new[order[twice]] != new[order[twice + 1]]).any():
            what = "lanes of a store write different numbers to one place"
            self.add("hazard", access.argument.name, access.site, what)

    def report(self, clash: Clash) -> None:
        """Add what two accesses have done that nothing orders."""
        what = f"between {_AMONG[clash.kind]} it {clash.what} ({self.sites[clash.other]})"
        detail = f" (programs {clash.earlier} and {clash.program}, byte {clash.offset})"
        place = str(self.sites[clash.site])
        found = Finding(clash.kind, self.kernel, clash.argument, place, what, detail)
        if clash.harmless:
            self.findings.note(found._replace(what=f"{what}, the same"))
        else:
            self.findings.add(found)

    # --- runs ----------------------------------------------------------------------------------

    def run(
        self,
        run_program: Callable[[Program], None],
        *,
        seed: int,
        again: bool = True,
        moved: bool = False,
    ) -> None:
        """Run all programs, and all `again` in other orders.

        `moved`: whether there are slots that can be far away.
        """
        programs = list(_programs(self.grid))
        unwritten = {
            region.base: region.unwritten.copy()
            for region in self.memory.regions
            if region.unwritten is not None
        }
        self._run(programs, run_program)
        self._check_counters()
        first = self._results() if again else {}
        if not first:
            return
        self.exact = False
        if self._unwritten:
            self._vary(unwritten, first, lambda: self._run(programs, run_program))
        self._undo()
        numbered = {program: number for number, program in enumerate(programs)}
        self.races, self.far = Races(len(programs), self.report), moved
        self._run(programs[::-1], run_program, numbered)
        self.races, self.far = None, False
        if len(programs) > 1 or moved:
            far = ", with slots far away," * moved
            self._compare(first, "order", f"programs run backwards{far} leave something else")
        if len(programs) > 2:
            self._undo()
            random.Random(seed).shuffle(programs)
            self._run(programs, run_program)
            self._compare(first, "order", "shuffled programs leave something else")

    def _run(
        self,
        programs: Sequence[Program],
        run_program: Callable[[Program], None],
        numbered: dict[Program, int] | None = None,
    ) -> None:
        for program in programs:
            self.program, self.waited, self.let = program, not self.dependent, False
            if self.races is not None and numbered is not None:
                self.races.begin(numbered[program])
            run_program(program)
            self.all_let &= self.let
            self.all_waited &= self.waited

    def _results(self) -> dict[int, Bytes]:
        """Return the content of all regions that are written, by their base."""
        return {
            region.base: region.content.copy()
            for region in self.memory.regions
            if region.written is not None
        }

    def _check_counters(self) -> None:
        """Report what atomics have changed if it was not zero before the launch, or is not now.

        The next launch counts on from there, and no other order of programs would show it.
        """
        for region in self.memory.regions:
            if region.counted is None or region.before is None:
                continue
            for content, what in (
                (region.before, "begins with a number that is not zero"),
                (region.content, "is not zero again behind the launch"),
            ):
                off = np.flatnonzero(region.counted & (content != 0))
                if len(off):
                    detail = f" ({len(off)} bytes, the first at {off[0]})"
                    self.add("counter", self._name(region, int(off[0])), -1, f"it {what}", detail)

    def _undo(self) -> None:
        for region in self.memory.regions:
            region.restore()

    def _compare(self, first: dict[int, Bytes], kind: Kind, what: str) -> None:
        """Report what a run has left that is not what the first has."""
        for region in self.memory.regions:
            if region.base not in first:
                continue
            differs = region.content != first[region.base]
            for begin, end in region.shared:
                differs[begin:end] = False
            other = np.flatnonzero(differs)
            if len(other):
                detail = f" ({len(other)} bytes, the first at {other[0]})"
                self.add(kind, self._name(region, int(other[0])), -1, what, detail)

    def _vary(
        self, unwritten: dict[int, Any], first: dict[int, Bytes], again: Callable[[], None]
    ) -> None:
        """Report results that change with numbers that nothing has written."""
        self._undo()
        kept = list[tuple[Region, Any, Bytes]]()
        for region in self.memory.regions:
            if (flags := unwritten.get(region.base)) is not None:
                kept.append((region, flags, region.content[flags].copy()))
                region.content[flags] = OTHER
        again()
        for region in self.memory.regions:
            if region.written is None or region.base not in first:
                continue
            differs = (region.content != first[region.base]) & region.written
            if differs.any():
                reads = ", ".join(
                    sorted(f"{name} ({self.sites[at]})" for name, at in self._unwritten)
                )
                what = f"results follow from what nothing has written: {reads}"
                name = self._name(region, int(np.flatnonzero(differs)[0]))
                self.add("unwritten", name, -1, what, f" ({differs.sum()} bytes)")
        for region, flags, content in kept:
            region.content[flags] = content

    def _name(self, region: Region, offset: int) -> str:
        """Return the argument that has a place of a region."""
        own = [each for each in self.memory.arguments if each.region is region]
        near = [each for each in own if each.begin <= offset < each.end]
        return (near or own)[0].name


def _programs(grid: Program) -> Iterator[Program]:
    for x in range(grid[0]):
        for y in range(grid[1]):
            yield from ((x, y, z) for z in range(grid[2]))


def _gather(region: Region, access: Access) -> Bytes:
    """Return the bytes that an access uses: [lanes, size]."""
    found: Bytes = region.content[access.at[:, None] + np.arange(access.size)]
    return found
