"""What the sanitizer has found: each kind of defect once for each place in the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal[
    "bounds",  # a place in no tensor that the kernel was given, or beyond that tensor
    "alignment",  # a place that is no multiple of the size of what lies there
    "hint",  # a number is no multiple of what the compiler is told
    "race",  # two programs of a launch use a place, one writes it, and nothing orders them
    "hazard",  # likewise two lanes of a program, without a barrier between them
    "copies",  # likewise two threads of a program that have copies of a lane
    "order",  # results depend on the order in which programs run
    "unwritten",  # results depend on memory that nothing has written
    "counter",  # what atomics change is not zero before a launch, or not zero behind it
    "pinned",  # memory of the host is overwritten before a copy has read it
    "overlap",  # before its wait a kernel uses what an earlier kernel may still write
]


class Place(NamedTuple):
    """Where a kernel is accessed from."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Finding(NamedTuple):
    """A defect; two are the same if all but `detail` is."""

    kind: Kind
    kernel: str
    argument: str  # of the kernel; empty if there is none
    place: str  # "file:line"; empty if unknown
    what: str
    detail: str = ""  # programs and offsets of the first time

    @property
    def same(self) -> tuple[str, ...]:
        return self[:5]

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        of = f", argument {self.argument}" if self.argument else ""
        return f"{self.kind}: {self.kernel}{of}{where}: {self.what}{self.detail}"


class Expected(NamedTuple):
    """Something that looks like a defect and is none, and why."""

    kind: Kind
    kernel: str
    argument: str
    why: str


@dataclass(slots=True)
class Findings:
    """Collects defects, and how often something harmless was seen."""

    expected: tuple[Expected, ...] = ()
    found: dict[tuple[str, ...], Finding] = field(default_factory=dict)
    notes: dict[tuple[str, ...], Finding] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)  # that were watched, by kernel

    def add(self, finding: Finding) -> None:
        """Keep a defect, or a note if it is expected."""
        known = (finding.kind, finding.kernel, finding.argument)
        if any(each[:3] == known for each in self.expected):
            self.note(finding)
        else:
            self.found.setdefault(finding.same, finding)

    def note(self, finding: Finding) -> None:
        self.notes.setdefault(finding.same, finding)

    def count(self, kernel: str) -> None:
        self.launches[kernel] = self.launches.get(kernel, 0) + 1

    def take(self) -> list[Finding]:
        """Return the defects, and forget them."""
        taken = list(self.found.values())
        self.found.clear()
        return taken
