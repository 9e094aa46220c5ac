"""Checks of single numbers that a client may leave out, in TGI's words."""

from __future__ import annotations

from tgi_trio.errors import ValidationError


def value_or(value: float | None, default: float) -> float:
    """Return what was given, or `default` where nothing was."""
    return default if value is None else value


def check_positive(name: str, value: float | None, least: float, most: float) -> None:
    """Raise ValidationError unless a value is absent or in a range of positive numbers."""
    if value is None or least <= value <= most:
        return
    if value > 0.0:
        raise ValidationError(
            f"`{name}` must be >= {least:g} and <= {most:g}, for float32 to hold what is computed "
            f"with it. Given: {value:g}"
        )
    raise ValidationError(f"`{name}` must be strictly positive")


def check_fraction(name: str, value: float | None, *, or_one: bool, or_zero: bool = False) -> None:
    """Raise ValidationError unless a value is absent, or between 0 and 1.

    `or_one`, `or_zero`: or that number.
    """
    if value is None or 0.0 < value < 1.0:
        return
    if not ((or_one and value == 1.0) or (or_zero and value == 0.0)):
        least, most = ">=" if or_zero else ">", "<=" if or_one else "<"
        raise ValidationError(f"`{name}` must be {least} 0.0 and {most} 1.0")
