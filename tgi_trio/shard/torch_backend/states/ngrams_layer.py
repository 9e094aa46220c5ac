"""The n-gram embeddings of a layer; see `NgramsSpec`.

On a device, gates are one launch, and of decodes hashes and the convolution are one each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch.nn import functional

from tgi_trio.model.specs.ngrams import NgramsSpec
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.layers.streams.gated_streams import StreamNorm
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.steps import StateSteps
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

_LEAST: Final = 1e-6  # least size of a product whose root is taken
_MOST: Final = 1 << 15  # largest hidden size that a program holds
_BLOCK: Final = 1024  # channels of a program


class NgramsLayer:
    """Adds embeddings of the n-grams that end in each token to its hidden states."""

    def __init__(
        self,
        ngrams: NgramsSpec,
        *,
        table: torch.Tensor,
        inner: Linear,
        query_norm: StreamNorm,
        key_norm: StreamNorm,
        kernel_norm: StreamNorm,
        kernel: torch.Tensor,
        ranks: Gathering | None,
        invariant: bool = False,
    ) -> None:
        """`table` [rows, numbers of a head on this rank]; `kernel` [channels, taps].

        `invariant`: decodes are convolved as prompts are; see `batch_invariance.py`.
        """
        self._ngrams = ngrams
        self._table = table
        self._inner = inner
        self._norms = query_norm, key_norm, kernel_norm
        self._convolution = CausalConvolution(kernel, dilation=ngrams.order)
        self._ranks = ranks
        self._invariant = invariant
        self._count = query_norm.count
        by_size = (ngrams.order - 1, -1)
        self._factors = torch.tensor(ngrams.factors).to(table.device)
        self._rows = torch.tensor(ngrams.rows).view(by_size).to(table.device)
        self._firsts = torch.tensor(ngrams.firsts).view(by_size).to(table.device)

    def add(
        self,
        streams: torch.Tensor,
        token_ids: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        steps: StateSteps,
    ) -> torch.Tensor:
        """Return hidden states [T, count * hidden] with the n-grams of `token_ids` [T] added.

        `states` and `steps` as for `MixerLayer.mix`.
        """
        rows = self.find_rows(token_ids, states["tokens"], steps)
        both = self._inner(functional.embedding(rows, self._table).flatten(1))
        if self._ranks is not None:
            both = self._ranks.all_reduce(both)
        launches = runs_kernels(streams.device) and both.shape[1] <= _MOST * (self._count + 1)
        gate = self._launch_gate if launches else self._gate
        gated, normed = gate(both, streams)
        if launches and steps.decodes and not self._invariant:
            return self._launch_spread(streams, gated, normed, states["ngrams"], steps)
        spread = self._convolution(normed, states["ngrams"], steps)
        added: torch.Tensor = gated + functional.silu(spread)
        return streams + added

    def _gate(self, both: torch.Tensor, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gated values and their norm, [T, count * hidden] each.

        `both` [T, (count + 1) * hidden]: keys, then the value.
        """
        query_norm, key_norm, kernel_norm = self._norms
        key, value = both.tensor_split((streams.shape[1],), dim=-1)
        hidden = value.shape[1]
        product = (key_norm(key) * query_norm(streams)).unflatten(-1, (-1, hidden)).sum(dim=-1)
        product = product / hidden**0.5
        gate = (product.abs().clamp_min(_LEAST).sqrt() * product.sign()).sigmoid()
        gated = (gate.unsqueeze(-1) * value.unsqueeze(-2)).flatten(-2)
        return gated, kernel_norm(gated)

    def _launch_gate(
        self, both: torch.Tensor, streams: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `_gate` does, in a kernel."""
        from tgi_trio.shard.torch_backend.kernels.states import ngrams  # imports Triton

        query_norm, key_norm, kernel_norm = self._norms
        gated, normed = torch.empty_like(streams), torch.empty_like(streams)
        size = streams.shape[1] // self._count
        padded = next_power_of_2(size)
        ngrams.gate_ngrams[(len(streams), self._count)](
            *(gated, normed, both, streams),
            *(key_norm.weight, query_norm.weight, kernel_norm.weight),
            *(key_norm.eps, query_norm.eps, kernel_norm.eps),
            size**0.5,
            _LEAST,
            both.stride(0),
            SIZE=size,
            PADDED=padded,
            COUNT=self._count,
            num_warps=count_warps(padded),
        )
        return gated, normed

    def _launch_spread(
        self,
        streams: torch.Tensor,
        gated: torch.Tensor,
        normed: torch.Tensor,
        tails: torch.Tensor,
        steps: StateSteps,
    ) -> torch.Tensor:
        """Return decodes' hidden states with what their n-grams add, in a kernel."""
        from tgi_trio.shard.torch_backend.kernels.states import ngrams  # imports Triton

        out, channels = torch.empty_like(streams), streams.shape[1]
        ngrams.spread_ngrams[(len(streams), -(-channels // _BLOCK))](
            *(out, streams, gated, normed, tails, self._convolution.kernel),
            *(steps.reads, steps.writes, steps.fresh),
            CHANNELS=channels,
            BLOCK=_BLOCK,
            TAPS=self._ngrams.taps,
            DILATION=self._ngrams.order,
            num_warps=min(4, _BLOCK // 32),  # each thread has channels of its own
        )
        return out

    def find_rows(
        self, token_ids: torch.Tensor, tails: torch.Tensor, steps: StateSteps
    ) -> torch.Tensor:
        """Return the rows of the table for tokens int64 [T], int64 [T, heads].

        `tails` [slots, order - 1]: the tokens before each row's first, oldest first; overwritten by
        the last up to its last token.
        """
        own = self._ngrams
        if steps.decodes and runs_kernels(token_ids.device):
            return self._launch_hashes(token_ids, tails, steps)
        hashed = token_ids * own.factors[0]
        ended = torch.zeros_like(token_ids, dtype=torch.bool)
        found = []
        befores = self._before(token_ids, tails, steps)
        for factor, before in zip(own.factors[1:], befores, strict=True):
            ended = ended | (before == own.end)
            hashed = hashed ^ (before.masked_fill(ended, own.end) * factor)
            found.append(hashed)
        every = torch.stack(found, dim=1).unsqueeze(-1)  # [T, sizes of n-grams, 1]
        return (every % self._rows + self._firsts).flatten(1)

    def _launch_hashes(
        self, token_ids: torch.Tensor, tails: torch.Tensor, steps: StateSteps
    ) -> torch.Tensor:
        """Do what `find_rows` does for decodes, in a kernel."""
        from tgi_trio.shard.torch_backend.kernels.states import ngrams  # imports Triton

        own, heads = self._ngrams, self._rows.shape[1]
        found = token_ids.new_empty((len(token_ids), own.heads))
        ngrams.find_ngrams[(len(token_ids),)](
            *(found, tails, token_ids, steps.reads, steps.writes, steps.fresh),
            *(self._factors, self._rows, self._firsts),
            own.end,
            ORDER=own.order,
            HEADS=heads,
            PADDED=next_power_of_2(heads),
            num_warps=1,
        )
        return found

    def _before(
        self, token_ids: torch.Tensor, tails: torch.Tensor, steps: StateSteps
    ) -> list[torch.Tensor]:
        """Return the tokens before each of `token_ids`, the nearest first: order - 1 of [T]."""
        count = self._ngrams.order - 1
        tail = steps.read(tails).masked_fill_(steps.fresh[:, None], self._ngrams.end)
        if steps.decodes:
            steps.write(tails, torch.cat((tail[:, 1:], token_ids[:, None]), dim=1))
            return list(tail.flip(1).unbind(1))
        joined = token_ids.new_empty(len(token_ids) + tail.numel())
        inputs, firsts, lasts = steps.places_after(count)
        joined[inputs] = token_ids
        joined[firsts] = tail.flatten()
        steps.write(tails, joined[lasts].view(tail.shape))
        return [joined[inputs - back] for back in range(1, count + 1)]

    def pack(self) -> None:
        self._inner.pack()

    def nbytes(self) -> int:
        parts = (self._inner, self._convolution, *self._norms)
        return self._table.nbytes + sum(part.nbytes() for part in parts)
