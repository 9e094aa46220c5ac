"""What is said of a config.json whose values are of other kinds than a family computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import NONSENSE, ModelConfig

# How Python's own ValueErrors begin; all others are ours, and say what is wrong.
_PYTHONS: Final = (
    *("invalid literal for", "could not convert", "cannot convert", "not enough values"),
    *("too many values", "dictionary update", "Exceeds the limit"),
)
_LONGEST: Final = 80  # characters of a value in a message


def describe_nonsense(
    config: ModelConfig,
    error: Exception,
    read: Callable[[ModelConfig], object],
    about: str = "",
) -> ModelLoadError:
    """Return what to raise where `read(config)` has raised one of `NONSENSE`.

    An error of Python's own names no key of the file. So the config is read once more by one that
    remembers which value was read last. `about`: which part of the file cannot be right.
    """
    why = str(error)
    if not isinstance(error, ValueError) or why.startswith(_PYTHONS):
        last = _find_last(config, read)
        why = f"a value cannot be computed with, probably the last one that was read: {last}"
    kind = config.model_type
    if about:
        return ModelLoadError(
            f"{config.folder / 'config.json'} cannot be right about {about} for model type "
            f"{kind!r}: {why}."
        )
    return ModelLoadError(
        f"{config.folder / 'config.json'} cannot be right for model type {kind!r}: {why}."
    )


def _find_last(config: ModelConfig, read: Callable[[ModelConfig], object]) -> str:
    """Return which value was read last before `read` failed, and what it is."""
    seen: list[tuple[str, object]] = []
    with suppress(*NONSENSE):
        read(replace(config, values=_Watched(config.values, "", seen)))
    if not seen:
        return "none"
    ((name, value),) = seen
    text = repr(value)
    return f"{name} is {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}"


class _Watched(dict[str, Any]):
    """An object of the file that notes each of its values which is read."""

    def __init__(
        self, values: Mapping[str, Any], where: str, seen: list[tuple[str, object]]
    ) -> None:
        super().__init__(values)
        self._where = where
        self._seen = seen

    def __getitem__(self, key: str) -> Any:
        return self._note(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; one that is absent is not noted."""
        return self._note(key, super().__getitem__(key)) if key in self else default

    def _note(self, key: str, value: Any) -> Any:
        name = f"{self._where}{key}"
        self._seen[:] = [(name, value)]
        return _Watched(value, f"{name}.", self._seen) if isinstance(value, dict) else value
