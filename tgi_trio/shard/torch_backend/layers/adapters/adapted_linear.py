"""Linear layers with LoRA adapters by row: y = x W^T + b, plus B (A x) of each row's adapter.

Adapters with DoRA or biases also have gains and offsets: gains * y + offsets is added as well.

A row's tokens are multiplied separately from those of other rows, even if these have the same
adapter: the order of a product's sums may depend on its number of rows, and other rows must not
change a bit of a result. Rows of one token, as nearly all are while decoding, form one batched
product of single rows. So do all that an expert multiplies, which tells the table beforehand which
tokens these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.model.adapters.sites import Site
from tgi_trio.shard.adapters.numbers import AdapterNumbers
from tgi_trio.shard.adapters.parts import EmbeddedRows, LookedUp
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.sampling.choosing import choice_positions
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear, WrappedLinear


@dataclass(frozen=True, slots=True)
class TorchPart:
    """An `AdapterPart` in the model's dtype."""

    a: torch.Tensor  # [inputs, r]: transposed
    b: torch.Tensor  # [r, outputs]
    outputs: slice
    gains: torch.Tensor | None  # [outputs]; None: zeros
    offsets: torch.Tensor | None


PackedSites = Mapping[Site, Sequence[TorchPart]]
# A [tokens, r], B [r, width], and with DoRA gains [width]
PackedLookups = tuple[torch.Tensor, ...]
PackedRows = tuple[torch.Tensor, torch.Tensor]  # tokens int64 [n], and their embeddings [n, width]


@dataclass(frozen=True, slots=True)
class _Run:
    """The tokens of a step that use one adapter."""

    adapter: int
    singles: torch.Tensor | None  # int64 [n]: tokens that are their row's only one
    spans: Sequence[slice]  # tokens of each row that has several
    rows: Sequence[slice] = ()  # tokens of each row, several or one, if neighbours are of one row


@dataclass
class AdapterTable:
    """The loaded adapters, and which tokens of the present step use which."""

    device: torch.device
    packed: dict[int, PackedSites] = field(default_factory=dict)
    embedded: dict[int, PackedRows] = field(default_factory=dict)  # of adapters that have such
    looked_up: dict[int, PackedLookups] = field(default_factory=dict)  # likewise
    runs: Sequence[_Run] = ()
    chosen: Sequence[_Run] = ()  # of the rows that the head reads
    of_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    gathered: Sequence[_Run] = ()  # of the rows that an expert multiplies next

    def begin(self, plan: StepPlan) -> None:
        """Prepare for the forward pass of `plan`."""
        numbers = np.array([row.sampling.adapter for row in plan.rows])
        counts = np.diff(plan.query_starts)
        self.of_tokens = np.repeat(numbers, counts)
        self.chosen = self._run_of_each(choice_positions(plan, np.flatnonzero(plan.samples)))
        self.gathered = ()
        if not numbers.any():
            self.runs = ()
            return
        runs = []
        for number in sorted({*numbers.tolist()} - {0}):
            own = numbers == number
            single = plan.query_starts[:-1][own & (counts == 1)].astype(np.int64)
            spans = [
                slice(int(plan.query_starts[i]), int(plan.query_starts[i + 1]))
                for i in np.flatnonzero(own & (counts > 1))
            ]
            alone = torch.from_numpy(single).to(self.device) if len(single) else None
            each = [*(slice(i, i + 1) for i in single.tolist()), *spans]
            runs.append(_Run(number, alone, spans, each))
        self.runs = runs

    @property
    def used(self) -> bool:
        return bool(self.runs)

    def __call__(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Implements `ChangeEmbedded`."""
        for number in {run.adapter for run in self.runs} & self.embedded.keys():
            tokens, rows = self.embedded[number]
            own = torch.from_numpy(self.of_tokens == number).to(self.device)
            x = place_embedded(x, token_ids, own, tokens, rows)
        for number in {run.adapter for run in self.runs} & self.looked_up.keys():
            places = torch.from_numpy(np.flatnonzero(self.of_tokens == number)).to(self.device)
            a, b, *gains = self.looked_up[number]
            low = a[token_ids[places]][:, None]  # [n, 1, r]: products of single rows
            delta = torch.bmm(low, b.expand(len(low), *b.shape))[:, 0]
            for gain in gains:
                delta += x[places] * gain
            x = x.index_add(0, places, delta)
        return x

    @contextmanager
    def choosing(self, places: NDArray[np.int64]) -> Iterator[None]:
        """Have the head read the tokens at `places` inside the block."""
        before, self.chosen = self.chosen, self._run_of_each(places)
        try:
            yield
        finally:
            self.chosen = before

    def gather(self, tokens: torch.Tensor) -> None:
        """Note which tokens [n] of the step the next expert multiplies, row by row."""
        if self.runs:
            self.gathered = self._run_of_each(tokens.cpu().numpy())

    def _run_of_each(self, places: NDArray[np.int64]) -> Sequence[_Run]:
        """Return the runs of rows that are these tokens of the step, each row by itself."""
        numbers = self.of_tokens[places]
        return [
            _Run(number, torch.from_numpy(np.flatnonzero(numbers == number)).to(self.device), ())
            for number in sorted({*numbers.tolist()} - {0})
        ]

    def pack(self, numbers: AdapterNumbers, dtype: torch.dtype) -> PackedSites:
        """Return an adapter in the form that linears use. Thread-safe."""
        return {
            site: [
                TorchPart(
                    self._keep(part.a.T, dtype),
                    self._keep(part.b.T, dtype),
                    slice(part.start, part.start + len(part.b)),
                    None if part.gains is None else self._keep(part.gains, dtype),
                    None if part.offsets is None else self._keep(part.offsets, dtype),
                )
                for part in parts
            ]
            for site, parts in numbers.sites.items()
        }

    def pack_rows(self, embedded: EmbeddedRows, dtype: torch.dtype) -> PackedRows:
        """Return embeddings in the form that steps use. Thread-safe."""
        return torch.from_numpy(embedded.tokens).to(self.device), self._keep(embedded.rows, dtype)

    def pack_looked_up(self, pair: LookedUp, dtype: torch.dtype) -> PackedLookups:
        """Return what is added to embeddings in the form that steps use. Thread-safe."""
        kept = self._keep(pair.a, dtype), self._keep(pair.b.T, dtype)
        return kept if pair.gains is None else (*kept, self._keep(pair.gains, dtype))

    def _keep(self, values: Floats, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(dtype).contiguous().to(self.device)


def place_embedded(
    x: torch.Tensor,
    token_ids: torch.Tensor,
    own: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Return `x` [T, width] with an adapter's `rows` [n, width] in place of its `tokens` [n].

    `own`, bool [T]: the step's tokens that have this adapter.
    """
    same = (token_ids[:, None] == tokens) & own[:, None]
    return torch.where(same.any(1)[:, None], rows[same.int().argmax(1)], x)


def packed_bytes(packed: PackedSites) -> int:
    """Return the bytes of an adapter."""
    parts = [part for site in packed.values() for part in site]
    kept = [each for part in parts for each in (part.a, part.b, part.gains, part.offsets)]
    return sum(each.nbytes for each in kept if each is not None)


class AdaptedLinear(WrappedLinear):
    """A linear layer that adds the adapters of a step's rows."""

    __slots__ = ("_site", "_table")

    def __init__(self, base: Linear, site: Site, table: AdapterTable) -> None:
        super().__init__(base)
        self._site = site
        self._table = table

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        table = self._table
        runs = table.chosen if self._site.role == "head" else table.runs
        for run in table.gathered if self._site.of_expert else runs:
            for part in table.packed[run.adapter].get(self._site, ()):
                _add(y, x, run, part)
        return y


def _add(y: torch.Tensor, x: torch.Tensor, run: _Run, part: TorchPart) -> None:
    """Add what an adapter part changes to its slice of the outputs, in place."""
    if run.singles is not None:
        rows = x.index_select(0, run.singles)[:, None]  # [n, 1, inputs]
        count = len(rows)
        low = torch.bmm(rows, part.a.expand(count, *part.a.shape))
        delta = torch.bmm(low, part.b.expand(count, *part.b.shape))[:, 0]
        own = y[:, part.outputs]
        if part.gains is not None and part.offsets is not None:
            before = own.index_select(0, run.singles)
            delta += torch.addcmul(part.offsets, before, part.gains)
        own.index_add_(0, run.singles, delta)
    for span in run.spans:
        delta, own = x[span] @ part.a @ part.b, y[span, part.outputs]
        if part.gains is not None and part.offsets is not None:
            delta += torch.addcmul(part.offsets, own, part.gains)
        own += delta
