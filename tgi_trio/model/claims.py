"""Which fields of a model's spec a backend computes; everything else is refused.

A backend has a table "record.field" -> `Claim` (`fit/kernel_claims.py` for the CPU kernels,
`fit/decoder.py` for torch). A field that is added to a spec is in neither table, so a model that
uses it is refused by both until they implement it. The same holds for a new value of a field whose
values are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from tgi_trio.model.specs.records import walk_records


@dataclass(frozen=True, slots=True)
class Claim:
    """A field that a backend computes."""

    serves: Callable[[Any], bool]  # whether it computes this value
    refusal: str = ""  # the message for other values; "{}" is replaced by the value


Claims = Mapping[str, Claim]  # by "DecoderSpec.norm", in the order in which they are checked

ANY = Claim(lambda value: True)


def only(*values: Any, refusal: str) -> Claim:
    """Claim the given values of a field."""
    return Claim(lambda value: value in values, refusal)


def multiples(unit: int, refusal: str) -> Claim:
    """Claim the multiples of `unit`."""
    return Claim(lambda value: value % unit == 0, refusal)


def every_field(*records: type[Any]) -> Claims:
    """Claim all values of all fields of some records."""
    return {f"{own.__name__}.{field.name}": ANY for own in records for field in fields(own)}


# For every mixer with a convolution.
CONVOLVED = only("silu", "swish", refusal="activation {!r} behind a convolution is not built")


def find_unclaimed(spec: Any, claims: Claims) -> str | None:
    """Return why a backend with these claims cannot compute a model, or None."""
    records = list(walk_records(spec))
    for key, claim in claims.items():
        kind, _, name = key.partition(".")
        for record in records:
            if type(record).__name__ == kind and not claim.serves(getattr(record, name)):
                return claim.refusal.format(getattr(record, name))
    for record in records:
        for field in fields(record):
            key, value = f"{type(record).__name__}.{field.name}", getattr(record, field.name)
            if key not in claims and value != _default(field):
                return f"{key} is {value!r}, which is not computed here"
    return None


def _default(field: Field[Any]) -> Any:
    """Return a field's default; MISSING, which equals nothing, if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()
