"""Hunyuan VL: of how many parts a rotary position is, as its config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig

HUNYUAN_VL: Final = "hunyuan_vl"
_LEAST: Final = 3  # the column, the row and the number of an image
MOST_PARTS: Final = 5  # published is 4, with the place


def read_sections(config: ModelConfig) -> tuple[int, ...]:
    """Return how many pairs of a head's dimensions turn by each part of a position.

    (): config.json does not say it, which is enough for texts. The files that Tencent published
    call it `xdrope_section`. Raises ModelLoadError for what is no list of three to five whole
    numbers, and where both names are there and say different things.
    """
    said = (config.get(name) for name in ("rope_parameters", "rope_scaling"))
    told: dict[str, Any] = {}
    for each in said:
        told |= each if isinstance(each, Mapping) else {}
    names = ("mrope_section", "xdrope_section")
    found = [_read_counts(name, told[name]) for name in names if told.get(name) is not None]
    if found and found[0] != found[-1]:
        raise ModelLoadError(
            f"{config.folder / 'config.json'} says mrope_section {list(found[0])}, but "
            f"xdrope_section {list(found[-1])}."
        )
    return found[0] if found else ()


def count_parts(config: ModelConfig) -> int:
    """Return of how many parts a rotary position is; raises ModelLoadError where none are said."""
    sections = read_sections(config)
    if not sections:
        raise ModelLoadError(
            f"{config.folder / 'config.json'} has no mrope_section (nor xdrope_section) in its "
            f"rope_parameters, which images of model type {config.model_type!r} need; "
            "--rope-scaling replaces what older files say of it."
        )
    return len(sections)


def _read_counts(name: str, value: object) -> tuple[int, ...]:
    """Return whole numbers, which may be written as 16.0; raises ModelLoadError."""
    given = value if isinstance(value, list) else []
    whole = [
        int(count)
        for count in given
        if isinstance(count, int | float)
        and not isinstance(count, bool)
        and 0 <= count == count // 1
    ]
    if len(whole) < len(given) or not _LEAST <= len(whole) <= MOST_PARTS:
        raise ModelLoadError(
            f"{name} must be a list of {_LEAST} to {MOST_PARTS} whole numbers, not {value!r}."
        )
    return tuple(whole)
