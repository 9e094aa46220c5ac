"""LOG_LEVEL, in the forms of text-generation-inference: a level, or a filter by module.

The filter's grammar is that of Rust's `tracing` (`EnvFilter`): directives between commas, each a
level, `module=level` or a module alone. Its modules are mapped to our loggers.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_OFF: Final = logging.CRITICAL + 10  # above every record
_LEVELS: Final[Mapping[str, int]] = {
    "off": _OFF,
    "critical": logging.CRITICAL,
    "fatal": logging.CRITICAL,
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "success": logging.INFO,  # of the model server's logger
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,  # nothing is finer
    # as `tracing` counts them
    "0": _OFF,
    "1": logging.ERROR,
    "2": logging.WARNING,
    "3": logging.INFO,
    "4": logging.DEBUG,
    "5": logging.DEBUG,
}
ALLOWED: Final = (
    "off, error, warn, info, debug, trace, or a filter such as info,tgi_trio.shard=warn"
)

ACCESS: Final = "tgi_trio.access"  # a logger without a module: one line per request
# Whose work a module of text-generation-inference does -> our loggers for the same.
LOGGERS: Final[Mapping[str, tuple[str, ...]]] = {
    "text_generation_router": ("tgi_trio.router", ACCESS),
    "text_generation_launcher": (
        "tgi_trio.launcher",
        "tgi_trio.router.shards.loading_progress",
        "tgi_trio.shard",
    ),
    "text_generation_server": ("tgi_trio.shard",),
    "text_generation_client": ("tgi_trio.router",),
}

_DIRECTIVE: Final = re.compile(  # target, [span{field=value}], =level; each may be missing
    r"(?P<target>[\w:.-]*)(?P<span>\[[^\]]*\])?(?:=(?P<level>\w+))?"
)
_BETWEEN_COMMAS: Final = re.compile(r"(?:\[[^\]]*\]|[^,])+")


@dataclass(frozen=True, slots=True)
class LogLevels:
    """What a filter asks for."""

    levels: Mapping[str, int]  # by logger; "" is the root, "tgi_trio" is ours
    unheard: tuple[str, ...] = ()  # directives that nothing here answers to

    def apply(self) -> None:
        """Set the levels of the loggers of this process."""
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)


def parse_log_levels(text: str) -> LogLevels:
    """Return the levels a filter asks for; what it does not name is at INFO, libraries at WARNING.

    Case does not count. Raises ValueError, with what is allowed, for what is no filter.
    """
    base = logging.INFO
    by_module: dict[str, int] = {}
    unheard = []
    for part in _BETWEEN_COMMAS.findall(text):
        directive = part.strip()
        if not directive:
            continue
        match = _DIRECTIVE.fullmatch(directive)
        if match is None:
            raise ValueError(f"expected {ALLOWED}")
        target, level = match["target"], match["level"]
        if level is None and target.lower() in _LEVELS:
            base = _LEVELS[target.lower()]
            continue
        found = tuple(_loggers(target))
        if (level or "trace").lower() not in _LEVELS or (level is None and not _ours(target)):
            raise ValueError(f"expected {ALLOWED}")
        if match["span"] or not found:
            unheard.append(directive)
        else:
            by_module |= dict.fromkeys(found, _LEVELS[(level or "trace").lower()])
    levels = {"": max(base, logging.WARNING), "tgi_trio": base, **by_module}
    return LogLevels(levels, tuple(unheard))


def _ours(target: str) -> bool:
    return target.startswith(("tgi_trio", "text_generation_"))


def _loggers(target: str) -> Iterator[str]:
    """Yield the loggers that a module's name stands for; `::` and `.` both part its names."""
    name = target.replace("::", ".").strip(".")
    top, *rest = name.split(".")
    if top in LOGGERS:
        yield from LOGGERS[top]
    elif top.startswith("text_generation_router"):  # _v2, _v3: the router's back ends
        yield from LOGGERS["text_generation_router"]
    elif top == "tgi_trio":
        place = Path(__file__).parent.joinpath(*rest)
        if name == ACCESS or place.is_dir() or place.with_suffix(".py").is_file():
            yield name
    elif top in sys.modules or (top and find_spec(top) is not None):
        yield name
