"""Drafts of several layers of the model's own in a row: layer k makes draft k.

Layer 0 reads the model's state behind a token, and the token after; layer k what layer k - 1 says
there, and the token after that. Each has K and V of its own for every token. What the last tokens
of a sequence have in layer k depends on drafts, so these tokens are read again with the next ones.
An only layer goes on from its own drafts instead (`eagle.py`). No torch in this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.runner import DraftRow
from tgi_trio.shard.speculation.arithmetic import Rows
from tgi_trio.shard.speculation.drafter_plans import plan_rows
from tgi_trio.shard.speculation.eagle import EagleDrafter, EagleLayer, EagleReader
from tgi_trio.shard.speculation.record import Record, write_drafts

Ints = NDArray[np.int64]


class MtpLayer(EagleLayer, Protocol):
    """A layer of the model's own, of which there may be several."""

    features: int  # of a state of the model's

    @property
    def kv_bytes_per_token(self) -> int: ...

    def nbytes(self) -> int:
        """Return the bytes of its own weights."""
        ...

    @property
    def caches(self) -> Sequence[Any]:
        """What it keeps of tokens: the backend's tensors, whose numbers are a block's in turn."""
        ...

    def make_room(self, blocks: int) -> int: ...

    def read(self, plan: StepPlan, states: Rows) -> Rows:
        """Compute a plan's tokens, and store their K and V; return their states [T, features]."""
        ...

    def draft(self, states: Rows) -> Ints:
        """Return the best tokens [n] by states [n, features]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Tail:
    """The last tokens of a sequence that have been read, which will be read again."""

    positions: Ints  # [n]
    following: Ints  # [n] the token after each
    states: Any  # [n, features]


class MtpReader(EagleReader):
    """Keeps the KV caches of all layers up to date with the model's steps."""

    def __init__(self, layers: Sequence[MtpLayer]) -> None:
        super().__init__(layers[0])
        self._layers = layers
        self._tails: dict[int, _Tail] = {}  # by sequence; there are as many as run
        self._ended: set[int] = set()  # sequences whose last tokens are still to be read

    def read(self, sequences: Sequence[ShardSequence]) -> tuple[Rows, Ints] | None:
        """Read the backlog; returns no states, and a draft of each layer for each sequence [n, k].

        None if the backlog is empty.
        """
        if not self.backlog.size:
            self.backlog.due = False
            return None
        plan, states = self._again(*self.backlog.take(self.layer.join, self.layer.pick))
        self._ended.clear()
        lasts = plan.query_starts[1:].astype(np.int64) - 1
        states, tokens, drafts = self.layer.fuse(states), plan.token_ids, []
        for layer in self._layers:
            states = layer.read(replace(plan, token_ids=tokens), states)
            drafts.append(layer.draft(layer.pick(states, lasts)))
            tokens = np.append(tokens[1:], 0)
            tokens[lasts] = drafts[-1]
        places = {row.id: i for i, row in enumerate(plan.rows)}
        wanted = np.array([places[sequence.id] for sequence in sequences], np.int64)
        return states[:0], np.stack(drafts, axis=1)[wanted]

    def drop(self, sequence: ShardSequence) -> None:
        super().drop(sequence)
        self._tails.pop(sequence.id, None)
        if self.backlog.due:
            self._ended.add(sequence.id)

    def clear(self) -> None:
        super().clear()
        self._tails.clear()
        self._ended.clear()

    def _again(self, plan: StepPlan, states: Rows) -> tuple[StepPlan, Rows]:
        """Return a plan that begins with the last tokens read of each row, with their states."""
        layer, most = self.layer, len(self._layers) - 1
        positions, following, parts, counts = [], [], [], []
        starts = plan.query_starts.tolist()
        for row, first, end in zip(plan.rows, starts, starts[1:], strict=False):
            own = _Tail(
                plan.positions[first:end],
                plan.token_ids[first:end],
                layer.pick(states, np.arange(first, end)),
            )
            tail = self._tails.get(row.id)
            if tail is not None and tail.positions[-1] + 1 == own.positions[0]:
                own = _Tail(
                    np.append(tail.positions, own.positions),
                    np.append(tail.following, own.following),
                    layer.join([tail.states, own.states]),
                )
            if row.id not in self._ended:
                kept = np.arange(max(0, len(own.positions) - most), len(own.positions))
                kept_states = layer.pick(own.states, kept)
                self._tails[row.id] = _Tail(own.positions[kept], own.following[kept], kept_states)
            positions.append(own.positions)
            following.append(own.following)
            parts.append(own.states)
            counts.append(len(own.positions))
        again = plan_rows(
            plan.rows, np.array(counts), np.concatenate(positions), np.concatenate(following)
        )
        return again, layer.join(parts)


class MtpDrafter(EagleDrafter):
    """A drafter with several layers of the model's own, each of which drafts once."""

    def _draft(
        self,
        shared: Sequence[tuple[DraftRow, int]],
        records: dict[int, Record],
        states: Rows,
        best: Ints,
    ) -> dict[int, int]:
        """Write what has been drafted [n, k], as many tokens as each row may have."""
        counts = {}
        for (row, count), own in zip(shared, best.tolist(), strict=True):
            record, most = records[row.sequence.id], min(count, len(own))
            counts[row.place] = write_drafts(row.sequence, record, own, most, self._eos_ids)
        return {place: count for place, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class MtpLayers:
    """Several layers of the model's own, as a runner holds them."""

    layers: Sequence[MtpLayer]

    @property
    def features(self) -> int:
        """The features of a state of the model's."""
        return self.layers[0].features

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.kv_bytes_per_token for layer in self.layers)

    @property
    def caches(self) -> Sequence[Any]:
        """Everything that the layers keep of tokens."""
        return [each for layer in self.layers for each in layer.caches]

    def make_room(self, blocks: int) -> int:
        """Allocate caches with as many blocks as the model's; return their bytes."""
        return sum(layer.make_room(blocks) for layer in self.layers)

    def nbytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(layer.nbytes() for layer in self.layers)


Layer = TypeVar("Layer", bound=MtpLayer)


def join_layers(layers: Sequence[Layer]) -> Layer | MtpLayers | None:
    """Return what a runner holds: an only layer itself, None for none."""
    if len(layers) > 1:
        return MtpLayers(layers)
    return layers[0] if layers else None


def find_reader(held: EagleLayer | MtpLayers) -> EagleReader:
    """Return what keeps a runner's drafter up to date."""
    if isinstance(held, MtpLayers):
        return MtpReader(held.layers)
    return EagleReader(held)


def make_drafter(reader: EagleReader, most: int, eos_ids: Iterable[int]) -> EagleDrafter:
    """Return what drafts by what `reader` has read, `most` tokens a step at most."""
    kind = MtpDrafter if isinstance(reader, MtpReader) else EagleDrafter
    return kind(reader, most, eos_ids)
