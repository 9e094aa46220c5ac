"""A `Multiplier` in kernels: all of it is in its type, like that of a `Variant`."""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels.compiler.types import Type
from tgi_trio.shard.cpu_backend.multiplier import Multiplier


class MultiplierType(Type):
    """The type that carries a Multiplier."""

    def __init__(self, multiplier: Multiplier) -> None:
        self.multiplier = multiplier
        super().__init__(name=f"Multiplier({multiplier.name})")

    def attribute(self, name: str) -> Type | int | None:
        """Return a constant of the multiplier, or the one of unpacked weights."""
        value = getattr(self.multiplier, name, None)
        if isinstance(value, Multiplier):
            return MultiplierType(value)
        return int(value) if isinstance(value, int) else None
