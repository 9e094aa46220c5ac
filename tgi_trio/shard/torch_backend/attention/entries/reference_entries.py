"""Attention to the keys of a window and to entries, keys of whole runs of tokens, in plain torch.

In the cache, a token's key is followed by what entries are made of. As soon as a run's last token
is there, its entry is made, and takes the place of numbers of that token that nobody reads
afterwards (`Compressor.last`). So everything is kept by token: what is kept of a prefix serves any
sequence that begins with it, a wrong draft is overwritten by what is computed in its place, and a
sequence needs no state.

Tokens attend together as in `reference_tokens.py`: decodes of several rows, or several tokens of
one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.indexed.reference_groups import split_tokens
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention, ReferenceBatch
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.attention.index import (
    IndexQueries,
    choose_best,
    score_keys,
)
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.attention.shared_key import Entries, SharedKey
from tgi_trio.shard.torch_backend.staging import Array, Staging

_GATHERED = 1 << 15  # entries of several tokens gathered at a time
_READ = 1 << 12  # tokens that are read at a time for entries


class LayerKind(NamedTuple):
    """What tokens of some layers see, and what is made of them."""

    window: int
    rate: int  # tokens of a run; 0: there are no entries
    overlaps: bool
    most: int  # entries that an index selects; 0: all are seen
    heads: int

    @classmethod
    def of(cls, layer: AttentionLayer, entries: Entries | None) -> LayerKind:
        """Return the kind of a layer."""
        rate, overlaps = (entries.spec.rate, entries.spec.overlaps) if entries else (0, False)
        most = layer.most if entries and entries.index else 0
        return cls(layer.window, rate, overlaps, most, layer.heads)


class _Runs(NamedTuple):
    """The runs of tokens that end in a step."""

    slots: torch.Tensor  # int64 [C], of each run's last token
    starts: torch.Tensor  # int64 [C], the position of the first
    tokens: torch.Tensor  # int64 [C, tokens], slots of what each entry is made of
    missing: torch.Tensor  # bool [C, tokens]


class _Group(NamedTuple):
    """Tokens that attend together: as many of each of some rows."""

    tokens: torch.Tensor  # int64 [rows * each]
    own: torch.Tensor  # int64 [rows, 1]: the slot of a token of each row
    window: torch.Tensor  # int64 [rows, keys]: slots
    unseen: torch.Tensor  # bool [rows, each, keys]
    entries: torch.Tensor  # int64 [rows, entries]: slots; there may be none yet
    unmade: torch.Tensor  # bool [rows, each, entries]


@dataclass(slots=True)
class EntriesBatch(ReferenceBatch):
    """A plan, prepared."""

    runs: dict[tuple[int, bool], _Runs] = field(default_factory=dict)  # those that end, if any do
    groups: dict[LayerKind, list[_Group]] = field(default_factory=dict)


class EntriesAttention(ReferenceAttention):
    """Plain torch."""

    def __init__(self, kinds: Iterable[LayerKind], device: torch.device) -> None:
        """`kinds`: those of all layers."""
        self._kinds = list(dict.fromkeys(kinds))
        self._staging = Staging(device)

    def prepare(self, plan: StepPlan, cache: KVCache) -> EntriesBatch:
        arrays: list[Array] = [plan.kv_slots]
        ending: list[tuple[int, bool]] = []
        for rate, overlaps in {(kind.rate, kind.overlaps) for kind in self._kinds if kind.rate}:
            if (found := _find_runs(plan, rate, overlaps)) is not None:
                ending.append((rate, overlaps))
                arrays += found
        groups = {kind: list(_make_groups(plan, kind)) for kind in self._kinds}
        for parts in (part for own in groups.values() for part in own):
            arrays += parts
        sent = iter(self._staging.send(arrays))  # all in one copy, for which nobody waits
        return EntriesBatch(
            cache,
            plan,
            next(sent),
            runs={key: _Runs(*(next(sent) for _ in range(4))) for key in ending},
            groups={
                kind: [_Group(*(next(sent) for _ in parts)) for parts in own]
                for kind, own in groups.items()
            },
        )

    def attend_shared_key(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        shared: SharedKey,
        turning: Rotary,
        table: RotaryTable,
        batch: EntriesBatch,
    ) -> torch.Tensor:
        query, kept, index_queries = shared.ask(projected, turning, table)
        batch.cache.write(layer.index, batch.slots, kept, kept)
        keys, entries = batch.cache.key_slots[layer.index][:, 0], shared.entries
        if entries is not None:
            runs = batch.runs.get((entries.spec.rate, entries.spec.overlaps))
            if runs is not None:
                _make_entries(entries, keys, shared.dim, turning, runs)
        out = torch.empty_like(query)
        for group in batch.groups[LayerKind.of(layer, entries)]:
            out[group.tokens] = _attend(layer, query, index_queries, entries, keys, group)
        return turning.apply_last(out, table.cos, -table.sin)


# --- entries --------------------------------------------------------------------------------------


def _make_entries(
    entries: Entries, keys: torch.Tensor, dim: int, turning: Rotary, runs: _Runs
) -> None:
    """Write the entries of the runs that end in a step to `keys` [slots, numbers].

    `dim`: of a token's key, which what is kept for entries follows.
    """
    table = turning.table(runs.starts, runs.starts + 1, keys.dtype)
    size = max(1, _READ // runs.tokens.shape[1])
    for first in range(0, len(runs.slots), size):
        some = slice(first, first + size)
        kept = keys.index_select(0, runs.tokens[some].flatten())
        kept = kept.unflatten(0, (-1, runs.tokens.shape[1]))
        begin = dim
        for own in entries.compressors():
            part = kept[..., begin : begin + 2 * own.width]
            made = own.compress(part, runs.missing[some])[:, None]
            made = turning.apply_last(made, table.cos[some], table.sin[some])[:, 0]
            place = slice(begin + own.last.start, begin + own.last.stop)
            keys[:, place].index_copy_(0, runs.slots[some], made)
            begin += 2 * own.width


def _find_runs(plan: StepPlan, rate: int, overlaps: bool) -> tuple[Array, ...] | None:
    """Return the parts of `_Runs` of `rate` tokens that end in a step, None if none does."""
    ends = np.flatnonzero((plan.positions + 1) % rate == 0)
    if not len(ends):
        return None
    rows = np.searchsorted(plan.query_starts, ends, side="right") - 1
    last = plan.positions[ends][:, None].astype(np.int64)
    places = last - np.arange((2 if overlaps else 1) * rate)[::-1]
    missing, own = places < 0, plan.kv_slots[ends]
    slots = np.where(missing, own[:, None], _slots(plan, rows, places))
    return own, last[:, 0] + 1 - rate, slots, missing


def _slots(plan: StepPlan, rows: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the slots of positions [rows, N]; any slot for those that a row does not have."""
    widest = plan.block_tables.shape[1] - 1
    blocks = np.clip(places // BLOCK_SIZE, 0, widest)
    tables = plan.block_tables[rows].astype(np.int64)
    return np.take_along_axis(tables, blocks, axis=1) * BLOCK_SIZE + places % BLOCK_SIZE


# --- groups ---------------------------------------------------------------------------------------


def _make_groups(plan: StepPlan, kind: LayerKind) -> Iterator[tuple[Array, ...]]:
    """Yield the parts of a step's groups, in which layers of a kind attend."""
    keys = plan.context_lengths.astype(np.int64)
    keys = kind.window + (keys // kind.rate if kind.rate else 0 * keys)
    for rows, tokens in split_tokens(plan, keys, kind.heads):
        size = max(1, _GATHERED // kind.most) if kind.most else len(tokens)
        for first in range(0, len(tokens), size):
            some = tokens[first : first + size]
            own = rows if len(rows) == 1 else rows[first : first + size]
            yield _group(plan, own, some, kind)


def _group(
    plan: StepPlan, rows: NDArray[np.int64], tokens: NDArray[np.int64], kind: LayerKind
) -> tuple[Array, ...]:
    """Return the parts of a `_Group` of as many tokens of each row."""
    window, rate = kind.window, kind.rate
    places = plan.positions[tokens].astype(np.int64).reshape(len(rows), -1)
    own = plan.kv_slots[tokens].reshape(len(rows), -1)[:, :1]
    near = places[:, :1] - window + 1 + np.arange(window + places.shape[1] - 1)
    seen, asking = near[:, None, :], places[:, :, None]
    unseen = (seen < 0) | (seen > asking) | (seen <= asking - window)
    slots = np.where(near < 0, own, _slots(plan, rows, near))
    count = int(places.max() + 1) // rate if rate else 0
    ends = np.broadcast_to(np.arange(1, count + 1) * rate - 1, (len(rows), count))
    made = np.where(ends <= places[:, -1:], _slots(plan, rows, ends), own)
    return tokens, own, slots, unseen, made, ends[:, None, :] > asking


# --- attention ------------------------------------------------------------------------------------


def _attend(
    layer: AttentionLayer,
    query: torch.Tensor,
    index_queries: IndexQueries | None,
    entries: Entries | None,
    keys: torch.Tensor,
    group: _Group,
) -> torch.Tensor:
    """Return attention [tokens, heads, dim] of a group's tokens."""
    rows, each = group.unseen.shape[:2]
    query = query.index_select(0, group.tokens)
    heads, dim = query.shape[1:]
    parts = [(keys[:, :dim], group.window, group.unseen)]
    if entries is not None and group.entries.shape[1]:
        place = entries.compressor.last
        made = keys[:, dim + place.start : dim + place.stop]
        slots, hidden = group.entries, group.unmade
        if index_queries is not None and entries.index and slots.shape[1] > layer.most:
            slots, hidden = _choose(layer, index_queries, entries, keys[:, dim:], group)
        parts.append((made, slots, hidden))
    found, scores = [], []
    for source, slots, hidden in parts:  # slots: [rows, keys], or of each token [rows * each, keys]
        key = source.index_select(0, slots.flatten()).view(*slots.shape, dim)
        score = torch.matmul(query.view(len(slots), -1, dim), key.transpose(1, 2))
        score = score.view(rows, each, heads, -1) * layer.scale
        scores.append(score.masked_fill(hidden.unsqueeze(2), float("-inf")))
        found.append(key)
    if layer.sinks is not None:
        sinks = layer.sinks.to(query.dtype).view(1, 1, -1, 1)
        scores.append(sinks.expand(rows, each, -1, -1))
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1, dtype=torch.float32)
    weights = weights.to(query.dtype)
    out, begin = torch.zeros_like(query), 0
    for key in found:
        own = weights[..., begin : begin + key.shape[1]].reshape(len(key), -1, key.shape[1])
        out += torch.matmul(own, key).view(query.shape)
        begin += key.shape[1]
    return out


def _choose(
    layer: AttentionLayer,
    index_queries: IndexQueries,
    entries: Entries,
    kept: torch.Tensor,
    group: _Group,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots [tokens, most] of the entries that an index selects for each token.

    And which of them are hidden, bool [rows, tokens of a row, most]. `kept`: [slots, numbers],
    what the cache has behind a token's key.
    """
    index = entries.index
    assert index is not None
    rows, each, count = group.unmade.shape
    begin = 2 * entries.compressor.width + index.compressor.last.start
    made = kept[:, begin : begin + index.compressor.dim]
    made = made.index_select(0, group.entries.flatten()).view(rows, count, -1)
    own = IndexQueries(
        *(of.index_select(0, group.tokens).unflatten(0, (rows, each)) for of in index_queries)
    )
    scores = score_keys(own, made).masked_fill(group.unmade, float("-inf"))
    best = choose_best(scores.flatten(0, 1), layer.most)
    hidden = group.unmade.flatten(0, 1).gather(1, best)
    slots = group.entries.repeat_interleave(each, dim=0).gather(1, best)
    # Hidden places have weight zero, but NaN times zero is NaN: use a token's own slot there.
    slots = torch.where(hidden, group.own.repeat_interleave(each, dim=0), slots)
    return slots, hidden.unflatten(0, (rows, each))
