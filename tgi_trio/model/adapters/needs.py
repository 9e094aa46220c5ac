"""What a server needs to have room for, by the adapters that it was given at its start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tgi_trio.model.adapters.files import read_adapter
from tgi_trio.model.adapters.sites import EVERYTHING, AdapterScope, map_adapter
from tgi_trio.model.specs.decoder import DecoderSpec


@dataclass(frozen=True, slots=True)
class AdapterNeeds:
    """The largest rank of adapters, and what they may change."""

    rank: int
    scope: AdapterScope


def find_needs(
    folders: Iterable[Path],
    spec: DecoderSpec,
    max_rank: int,
    *,
    grows: bool,
    own: Iterable[Path] = (),
) -> AdapterNeeds:
    """Return what these adapters need; their headers alone are read.

    Of matrices that are saved whole, this does not say how many rows are changed: there is room for
    as many as may be.

    `grows`: others of up to `max_rank` may be loaded later, which may change everything but
    experts, and these only if one of these adapters does: they take most of the room. `own`:
    adapters that the model brings along, of any rank. Raises ModelLoadError as `read_adapter` and
    `map_adapter` do.
    """
    rank = max_rank if grows else 1
    words = set(EVERYTHING.words()) - {"experts"} if grows else set[str]()
    limits = [*((folder, max_rank) for folder in folders), *((folder, None) for folder in own)]
    for folder, limit in limits:
        found = map_adapter(read_adapter(folder), spec, limit)
        rank = max(rank, max_rank if found.compares else found.rank)
        words.update(found.scope.words())
    return AdapterNeeds(rank, AdapterScope.of(words))
