"""What an adapter changes of linears and of embeddings, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.numbers import Floats


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The change of a run of a linear's outputs y, its bias included.

    It is gains * y + offsets + B (A x).
    """

    a: Floats  # [r, inputs of this rank]
    b: Floats  # [outputs, r], scaled
    start: int  # the first of these outputs among the linear's of this rank
    gains: Floats | None = None  # [outputs]; None: zeros
    offsets: Floats | None = None  # [outputs]; None: zeros


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Embeddings of some tokens, in place of the model's: as stored, before they are scaled."""

    tokens: NDArray[np.int64]  # [n], ascending
    rows: Floats  # [n, width]


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What is added to the embedding x of each token, before it is scaled.

    It is gains * x + B a, where a is the token's row of A.
    """

    a: Floats  # [tokens, r]
    b: Floats  # [width, r], scaled
    gains: Floats | None = None  # [width], of DoRA; None: zeros


def join_parts(parts: Sequence[AdapterPart]) -> AdapterPart:
    """Return adjacent parts of one pair as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("b", "gains", "offsets")
        if getattr(first, name) is not None
    }
    return replace(first, **joined)
