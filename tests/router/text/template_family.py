"""A chat template of a real family, and what is true of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent / "templates"

# Where an answer begins: in a thought, behind one, or where the model may open one itself.
Place = Literal["inside", "closed", "may-open"]
# What becomes of a message of a role.
Fate = Literal["ok", "error", "dropped"]


@dataclass(frozen=True, slots=True)
class Family:
    """One template and what is true of it."""

    name: str  # of the fixture
    format: str  # of its calls
    marks: tuple[str, str] | None = None  # around thoughts
    begun: str = ""  # what a prompt may have begun an answer with
    default: Place | None = None  # without switches
    on: Place | None = None  # with `switch_on`
    off: Place | None = None  # with `switch_off`
    switch_on: Mapping[str, Any] = field(default_factory=dict)
    switch_off: Mapping[str, Any] = field(default_factory=dict)
    middle: Fate = "ok"  # a system message behind the first user turn
    developer: Fate = "ok"  # a developer message at the start
    users: Fate = "ok"  # two user turns in a row
    arguments: Literal["object", "text"] = (
        "object"  # of calls in history; objects where they can be
    )
    calls: Literal["many", "first", "error", "none"] = "many"  # of two calls in one turn
    ids: Literal["any", "mistral", "kimi"] = "any"
    added: tuple[str, ...] = ()  # marks that are tokens of their own
    special: Mapping[str, str] = field(default_factory=dict)  # "bos_token" ...

    @property
    def source(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8")
