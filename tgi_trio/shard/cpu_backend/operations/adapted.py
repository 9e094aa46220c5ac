"""The operations of steps with adapters, a second table after that of steps without.

In it, every linear layer that adapters may change has a SHRINK before it and adds their outputs, as
do the products in which the matrix that expands latents is absorbed, head by head. So
a step without adapters is the same, whether adapters are loaded or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.adapters.sites import Site
from tgi_trio.shard.adapters.parts import EmbeddedRows
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32
from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.tables import FACTORS, OPERATION, Buffer, Code, Form
from tgi_trio.shard.cpu_backend.weight_layout import LANES

if TYPE_CHECKING:
    from tgi_trio.shard.cpu_backend.adapter_kernels import AdapterKernels

_PLAIN_ROWS = -2  # stands for a row that there is in the second copy alone
_PRODUCTS = (Code.LINEAR, Code.EXPERTS, Code.ABSORB, Code.EXPAND)  # of sites
# Operations whose results can also be written as numbers for SHRINK.
_WRITE_PLAIN = (
    *(Code.NORM, Code.QUANTISE, Code.PASS_ON, Code.COMPRESS),
    *(Code.SETTLE, Code.MIX, Code.PICK, Code.LOOK_UP),
)


@dataclass(frozen=True, slots=True)
class HeadProducts:
    """Products of each head with a part of the matrix that expands latents: ABSORB, EXPAND."""

    heads: int
    inputs: int  # of a head
    outputs: int
    span: int  # features of a head in a row that it is multiplied with
    of_keys: bool  # or of values


@dataclass(frozen=True, slots=True)
class AdaptedSite:
    """A linear layer that adapters may change, or what it is for one head."""

    site: Site
    row: int  # its first operation in the table
    source: Buffer  # its activations, as floating-point numbers
    inputs: int
    outputs: int
    paired: bool  # 16 rows of gate and 16 of up alternate
    feeder: int  # the operation that writes its activations
    pieces: int  # matrices that the linear layer is made of
    # Of an expert's first linear: the ARRANGE that sorts its activations, and whether that sorts
    # codes, beside which they are needed as numbers.
    arranged: int = -1
    coded: bool = False
    products: HeadProducts | None = None  # of what expands latents
    head: int = 0  # its number, for these


@dataclass(frozen=True, slots=True)
class AddedRows:
    """What an adapter adds to embeddings: B times a token's row of A, scaled as the model's.

    With DoRA they are multiplied by factors before.
    """

    a: NDArray[Any]  # [tokens, r]: float32 or bfloat16
    b: Floats  # [r, width]
    factors: Floats | None = None  # [width]; None: ones

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.a, self.b, self.factors) if each is not None)

    def of(self, ids: NDArray[np.int32]) -> Floats:
        """Return what is added to the embeddings of tokens, [n, width].

        Rank by rank: a library's product would add up in an order that depends on their number.
        """
        total = np.zeros((len(ids), self.b.shape[1]), np.float32)
        for factors, row in zip(to_float32(self.a[ids]).T, self.b, strict=True):
            total += factors[:, None] * row
        return total


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
        pieces = max((site.pieces for site in sites), default=0)
        self._low_of_head = -(-max_rank // LANES) * LANES
        heads = max((site.products.heads for site in sites if site.products), default=0)
        self.low_width = max(-(-pieces * padded // LANES) * LANES, heads * self._low_of_head)
        self._loaded: dict[int, NDArray[np.int64]] = {}  # [sites, 6], by number
        self._embedded: dict[int, EmbeddedRows] = {}  # by number
        self._added: dict[int, AddedRows] = {}  # likewise
        self._has_factors: dict[int, bool] = {}  # whether these have gains or offsets
        self._arranging = {site.arranged for site in sites} - {-1}
        self.first = len(base)  # the first operation of the second copy
        self._order = list(self._copies(base[:end]))
        self.table = np.zeros(self.first + len(self._order), OPERATION)
        self.table[: self.first] = base
        self.mirror()

    @property
    def sorts(self) -> bool:
        """Whether adapters may change experts, whose rows are sorted."""
        return bool(self._arranging)

    def mirror(self) -> None:
        """Update the second copy after the first has changed."""
        table, feeds = self.table, set[int]()
        for place, (row, number) in enumerate(self._order, self.first):
            copy = table[place]
            if row == _PLAIN_ROWS:
                feeds.add(self._arrange_plain(copy, self.sites[number]))
                continue
            if row < 0:
                site = self.sites[number]
                source = site.source
                if site.arranged < 0:
                    feeder = self._feeder(site)
                    if table[feeder]["code"] == Code.QUANTISE:
                        source = Buffer.ACTIVE
                    feeds.add(feeder)
                copy["code"], copy["source"] = Code.SHRINK, source
                copy["inputs"], copy["site"] = site.inputs, number
                copy["wanted_only"] = table[site.row]["wanted_only"]
                copy["by_member"] = site.site.of_expert
                if site.coded:
                    copy["source"] = Buffer.UNCODED
                if site.products is not None:
                    copy["code"], copy["kernel"] = Code.SHRINK_HEADS, table[site.row]["kernel"]
                    copy["heads"], copy["span"] = site.products.heads, site.products.span
                    copy["width"] = self._low_of_head
                copy["expand"] = self.kernels.shrink.address if self.kernels else 0
                continue
            table[place] = table[row]
            if number >= 0:
                copy = table[place]
                copy["site"] = number
                copy["expand"] = self.kernels.expand.address if self.kernels else 0
                copy["by_member"] = self.sites[number].site.of_expert
                if self.sites[number].products is not None:
                    copy["width"] = self._low_of_head
            if row in self._arranging:
                table[place]["by_member"] = 1
        for place, (row, _) in enumerate(self._order, self.first):
            if row in feeds and table[row]["code"] in _WRITE_PLAIN:
                table[place]["forms"] |= Form.PLAIN
                if table[row]["code"] == Code.QUANTISE:
                    table[place]["target"] = Buffer.ACTIVE

    def find(self, row: int) -> int:
        """Return the index in the second copy of an operation in the first."""
        return self.first + next(i for i, (own, _) in enumerate(self._order) if own == row)

    def install(
        self,
        number: int,
        sites: NDArray[np.int64],
        embedded: EmbeddedRows | None = None,
        added: AddedRows | None = None,
    ) -> None:
        """Let steps use an adapter; `sites` as `kernels/adapters.py` reads them.

        `embedded`: what the embeddings of some tokens are with it, scaled; `added`: what it adds to
        those of all.
        """
        if added is not None:
            self._added[number] = added
        if embedded is not None:
            self._embedded[number] = embedded
        self._loaded[number] = sites
        self._has_factors[number] = bool(sites[:, FACTORS:].any())

    def drop(self, number: int) -> None:
        self._loaded.pop(number, None)
        self._has_factors.pop(number, None)
        self._embedded.pop(number, None)
        self._added.pop(number, None)

    def find_embedded(
        self, ids: NDArray[np.int32], adapters: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], Floats] | None:
        """Return the places of a step's tokens whose embeddings are adapters' own, with these.

        int64 [n] and float32 [n, hidden]; None if there are none.
        """
        places, rows = [], []
        for number in {*adapters.tolist()} & self._embedded.keys():
            own = self._embedded[number]
            at = np.flatnonzero((adapters == number) & np.isin(ids, own.tokens))
            places.append(at)
            rows.append(own.rows[np.searchsorted(own.tokens, ids[at])])
        if not any(map(len, places)):
            return None
        return np.concatenate(places), np.concatenate(rows)

    def find_added(
        self, ids: NDArray[np.int32], adapters: NDArray[np.int32]
    ) -> Iterator[tuple[NDArray[np.int64], Floats, Floats | None]]:
        """Yield the places of a step's tokens to whose embeddings adapters add, and what they add.

        int64 [n] and float32 [n, hidden]; and factors [hidden] that these are multiplied by before.
        """
        for number in {*adapters.tolist()} & self._added.keys():
            places = np.flatnonzero(adapters == number)
            added = self._added[number]
            yield places, added.of(ids[places]), added.factors

    def runs(self, adapters: NDArray[np.int32]) -> Runs:
        """Return the runs of a step, whose tokens have these adapters."""
        starts = np.flatnonzero(np.diff(adapters, prepend=-1))
        table = np.zeros((len(starts), 3), np.int64)
        table[:, 0] = starts
        table[:, 1] = np.diff(starts, append=len(adapters))
        numbers = adapters[starts].tolist()
        held = [self._loaded[n] if n else None for n in numbers]
        table[:, 2] = [address(sites) for sites in held]
        of_tokens = np.repeat(np.arange(len(starts), dtype=np.int32), table[:, 1])
        factors = any(self._has_factors[n] for n in numbers if n)
        return Runs(table, of_tokens, factors, held)

    def _arrange_plain(self, copy: np.void, site: AdaptedSite) -> int:
        """Write an ARRANGE of activations as numbers; return the row that writes them."""
        feeder = self.table[site.feeder]
        coded = feeder["code"] == Code.QUANTISE
        copy["code"], copy["facts"] = Code.ARRANGE, self.table[site.arranged]["facts"]
        copy["kernel"] = self.table[site.arranged]["kernel"]
        copy["source"] = Buffer.ACTIVE if coded else Buffer.NORMED
        copy["target"], copy["inputs"] = Buffer.UNCODED, site.inputs
        return site.feeder

    def _feeder(self, site: AdaptedSite) -> int:
        """Return the row that writes a site's activations."""
        own = self.table[site.row]
        is_own = own["code"] == Code.QUANTISE and not own["order"]
        return site.row if is_own else site.feeder

    def _copies(self, base: NDArray[np.void]) -> Any:
        """Yield (row, site) for the second copy; row -1: a SHRINK, -2: an ARRANGE of activations as
        numbers; site -1: not a site's linear.
        """
        numbers: dict[int, int] = {}  # experts or heads have one row, and the first one's number
        for i, site in enumerate(self.sites):
            numbers.setdefault(site.row, i)
        coded = {site.arranged: i for i, site in enumerate(self.sites) if site.coded}
        number, left = -1, 0
        for row, operation in enumerate(base):
            if row in numbers:
                number, left = numbers[row], self.sites[numbers[row]].outputs
                shrinks = True
            if operation["code"] in _PRODUCTS and left > 0:
                if shrinks:
                    yield -1, number
                    shrinks = False
                yield row, number
                left -= int(operation["outputs"])
            else:
                yield row, -1
            if row in coded:
                yield _PLAIN_ROWS, coded[row]
