"""The operations of steps with adapters, a second table after that of steps without.

In it, every linear layer that adapters may change has a SHRINK before it and adds their outputs. So
a step without adapters is the same, whether adapters are loaded or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.adapters.sites import Site
from tgi_trio.shard.numba_backend.arena import address
from tgi_trio.shard.numba_backend.tables import FACTORS, OPERATION, Buffer, Code, Form
from tgi_trio.shard.numba_backend.weight_layout import LANES

if TYPE_CHECKING:
    from tgi_trio.shard.numba_backend.adapter_kernels import AdapterKernels

_PIECES = 4  # most pieces of a site: query, key, value, and gates of attention


@dataclass(frozen=True, slots=True)
class AdaptedSite:
    """A linear layer that adapters may change."""

    site: Site
    row: int  # its first operation in the table
    source: Buffer  # its activations, as floating-point numbers
    inputs: int
    outputs: int
    paired: bool  # 16 rows of gate and 16 of up alternate
    feeder: int  # the operation that writes its activations


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a step's tokens with the same adapter."""

    table: NDArray[np.int64]  # [runs, 3]: first token, tokens, address of the adapter's sites
    of_tokens: NDArray[np.int32]  # [T]
    factors: bool  # whether any of the adapters has gains or offsets
    held: Any  # keeps alive what the addresses point to


class AdaptedOperations:
    """Both copies of the table, and the loaded adapters."""

    def __init__(
        self, base: NDArray[np.void], end: int, sites: Sequence[AdaptedSite], max_rank: int
    ) -> None:
        """`base[:end]`: the operations of a step; those after `end` are not copied."""
        self.sites = sites
        self.kernels: AdapterKernels | None = None
        padded = -(-(max_rank + 1) // 2) * 2  # pairs of bfloat16
        self.low_width = -(-_PIECES * padded // LANES) * LANES
        self._loaded: dict[int, NDArray[np.int64]] = {}  # [sites, 6], by number
        self.first = len(base)  # the first operation of the second copy
        self._order = list(self._copies(base[:end]))
        self.table = np.zeros(self.first + len(self._order), OPERATION)
        self.table[: self.first] = base
        self.mirror()

    def mirror(self) -> None:
        """Update the second copy after the first has changed."""
        table, feeds = self.table, set[int]()
        for place, (row, number) in enumerate(self._order, self.first):
            copy = table[place]
            if row < 0:
                site = self.sites[number]
                source = site.source
                feeder = self._feeder(site)
                if table[feeder]["code"] == Code.QUANTISE:
                    source = Buffer.ACTIVE
                feeds.add(feeder)
                copy["code"], copy["source"] = Code.SHRINK, source
                copy["inputs"], copy["site"] = site.inputs, number
                copy["wanted_only"] = table[site.row]["wanted_only"]
                copy["expand"] = self.kernels.shrink.address if self.kernels else 0
                continue
            table[place] = table[row]
            if number >= 0:
                copy = table[place]
                copy["site"] = number
                copy["expand"] = self.kernels.expand.address if self.kernels else 0
        for place, (row, _) in enumerate(self._order, self.first):
            if row in feeds and table[row]["code"] in (Code.NORM, Code.QUANTISE, Code.PASS_ON):
                table[place]["forms"] |= Form.PLAIN
                if table[row]["code"] == Code.QUANTISE:
                    table[place]["target"] = Buffer.ACTIVE

    def find(self, row: int) -> int:
        """Return the index in the second copy of an operation in the first."""
        return self.first + next(i for i, (own, _) in enumerate(self._order) if own == row)

    def install(self, number: int, sites: NDArray[np.int64]) -> None:
        """Let steps use an adapter; `sites` as `kernels/adapters.py` reads them."""
        self._loaded[number] = sites

    def drop(self, number: int) -> None:
        self._loaded.pop(number, None)

    def runs(self, adapters: NDArray[np.int32]) -> Runs:
        """Return the runs of a step, whose tokens have these adapters."""
        starts = np.flatnonzero(np.diff(adapters, prepend=-1))
        table = np.zeros((len(starts), 3), np.int64)
        table[:, 0] = starts
        table[:, 1] = np.diff(starts, append=len(adapters))
        held = [self._loaded[n] if n else None for n in adapters[starts].tolist()]
        table[:, 2] = [address(sites) for sites in held]
        of_tokens = np.repeat(np.arange(len(starts), dtype=np.int32), table[:, 1])
        factors = any(sites is not None and bool(sites[:, FACTORS:].any()) for sites in held)
        return Runs(table, of_tokens, factors, held)

    def _feeder(self, site: AdaptedSite) -> int:
        """Return the row that writes a site's activations."""
        own = self.table[site.row]
        is_own = own["code"] == Code.QUANTISE and not own["order"]
        return site.row if is_own else site.feeder

    def _copies(self, base: NDArray[np.void]) -> Any:
        """Yield (row, site) for the second copy; row -1: a SHRINK, site -1: not a site's linear."""
        numbers: Mapping[int, int] = {site.row: i for i, site in enumerate(self.sites)}
        number, left = -1, 0
        for row, operation in enumerate(base):
            if row in numbers:
                number, left = numbers[row], self.sites[numbers[row]].outputs
                shrinks = True
            if operation["code"] == Code.LINEAR and left > 0:
                if shrinks:
                    yield -1, number
                    shrinks = False
                yield row, number
                left -= int(operation["outputs"])
            else:
                yield row, -1
