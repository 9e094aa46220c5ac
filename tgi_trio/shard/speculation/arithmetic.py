"""A backend's arithmetic for speculation heads, behind one interface. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

# [n, features], in the backend's type, an array or a tensor, with operators +, * and [].
Rows: TypeAlias = Any
Ids: TypeAlias = Any  # int64 [n], tokens of such rows
MODEL_HEAD = "head"  # role of the model's own head


class Arithmetic(Protocol):
    """Heads' weights by role (`HeadsSpec`), and the backend's operations on rows."""

    def normalise(self, x: Rows) -> Rows:
        """Apply the model's final norm to rows."""
        ...

    def concatenate(self, parts: Sequence[Rows]) -> Rows:
        """Concatenate along the first axis."""
        ...

    def multiply(self, role: str, x: Rows) -> Rows:
        """Return x W^T + b of a linear layer, or of the model's head (`MODEL_HEAD`)."""
        ...

    def look_up(self, role: str, ids: Ids) -> Rows:
        """Return rows of a table."""
        ...

    def vector(self, role: str) -> Rows: ...

    def silu(self, x: Rows) -> Rows: ...

    def gelu(self, x: Rows) -> Rows:
        """Return x * Phi(x), the exact GELU."""
        ...

    def inverse_rms(self, x: Rows) -> Rows:
        """Return 1 / sqrt(mean(x^2) + 1e-6) of each row [n, 1]."""
        ...

    def best(self, logits: Rows) -> Ids:
        """Return the argmax of each row."""
        ...
