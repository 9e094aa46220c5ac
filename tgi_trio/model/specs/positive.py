"""A check of the sizes in specs: a part of none of something is no part, and divides by zero."""

from __future__ import annotations


def check_positive(part: str, spec: object, *fields: str) -> None:
    """Raise ValueError unless all these fields of the spec of a `part` of a model are 1 or more."""
    sizes = {name: int(getattr(spec, name)) for name in fields}
    if min(sizes.values()) < 1:
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"{part} cannot have {told}: each is 1 or more")
