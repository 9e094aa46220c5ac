"""The states that a step reads and writes, and the interface of layers that keep states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.staging import Array, Send
from tgi_trio.shard.torch_backend.states.chunks import (
    Chunks,
    Pieces,
    Room,
    cut_evenly,
    cut_into,
    cut_rows,
)
from tgi_trio.shard.torch_backend.states.pool import NULL_SLOT, StatePool


def send_plain(arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Return arrays as tensors on the host, over the same memory."""
    return [torch.from_numpy(array) for array in arrays]


# Returns arrays that describe rows, given where they start, cumulative. For a recording, with the
# given room, the arrays' sizes do not depend on the rows.
Listing: TypeAlias = Callable[[Sequence[int], Room | None], list[Array]]


class ReservedRows(Protocol):
    """The rows of a recording, which change with every replay."""

    @property
    def room(self) -> Room: ...
    def keep(self, listing: Listing) -> list[torch.Tensor]: ...  # filled at every replay


@dataclass(frozen=True, slots=True, eq=False)
class StateSteps:
    """The rows of a step, as layers with states see them.

    A row may write to the slot that it reads. Only the null slot may be used by several rows.
    """

    starts: list[int]  # [R + 1], rows' first tokens in the flat list, cumulative; on the host
    reads: torch.Tensor  # int64 [R], slot of the state before the row's first token
    writes: torch.Tensor  # int64 [R], slot for the state after its last token
    fresh: torch.Tensor  # bool [R]: the state before is zero, whatever the slot holds
    send: Send = send_plain  # to the device of these tensors
    reserved: ReservedRows | None = None  # the rows of a recording; None: no recording
    _places: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    _chunks: dict[int, Chunks] = field(default_factory=dict)
    _firsts: list[torch.Tensor] = field(default_factory=list)
    _pieces: dict[int, Pieces] = field(default_factory=dict)
    _spans: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many tokens the step has, including a recording's padding."""
        return self.starts[-1] if self.reserved is None else self.reserved.room.tokens

    def chunks(self, size: int) -> Chunks:
        """Return the rows cut into chunks of at most `size` tokens; cached by `size`."""
        if size not in self._chunks:
            self._chunks[size] = Chunks.of(self.list_rows(partial(list_chunks, size=size)))
        return self._chunks[size]

    def places_after(self, before: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return places in a list that has `before` entries in front of every row's tokens.

        Int64: of the tokens [T], of these entries [R * before], and of the last `before` elements
        of each row [R * before]. Cached by `before`.
        """
        if before not in self._places:
            here = self.list_rows(partial(list_places, before=before))
            self._places[before] = (here[0], here[1], here[2])
        return self._places[before]

    def spans(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where rows begin and which places tokens have in them, for kernels. Cached.

        Int64 [R + 1]: the rows' first tokens, cumulative; int32 [T]: 0 is a row's first token. A
        recording's padding rows have no tokens, and its padding tokens, at -1, belong to no row.
        """
        if not self._spans:
            self._spans.extend(self.list_rows(list_spans))
        return self._spans[0], self._spans[1]

    def pieces(self, size: int) -> Pieces:
        """Return what kernels are told of the rows' chunks of `size` tokens; cached by `size`."""
        if size not in self._pieces:
            self._pieces[size] = Pieces(*self.list_rows(partial(list_pieces, size=size)))
        return self._pieces[size]

    def slots(self) -> tuple[torch.Tensor, ...]:
        """Return what kernels read of the rows: their beginnings, `reads`, `writes` and `fresh`.

        Kernels of decodes read no beginnings, which are then any tensor.
        """
        starts = self.reads if self.decodes else self.spans()[0]
        return starts, self.reads, self.writes, self.fresh

    def new_results(
        self, like: torch.Tensor, width: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return a tensor [T, width] for what kernels compute of rows; `dtype`: None is `like`'s.

        A recording's is zeroed, since its padding tokens belong to no row.
        """
        make = like.new_empty if self.reserved is None else like.new_zeros
        return make((self.tokens, width), dtype=dtype or like.dtype)

    def begins(self) -> torch.Tensor:
        """Return which tokens are the first of their sequence, bool [T]."""
        if self.decodes:
            return self.fresh
        if not self._firsts:
            self._firsts.extend(self.list_rows(list_firsts))
        found = self.fresh.new_zeros(self.tokens + 1)
        return found.index_copy_(0, self._firsts[0], self.fresh)[: self.tokens]

    def list_rows(self, listing: Listing) -> list[torch.Tensor]:
        """Return the listing of the rows, on their device."""
        if self.reserved is not None:
            return self.reserved.keep(listing)
        return self.send(listing(self.starts, None))

    def new_outputs(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor for the outputs of all tokens, [T, *shape].

        A recording's has one entry more, for padding, and is zeroed.
        """
        if self.reserved is None:
            return like.new_empty((self.tokens, *shape))
        return like.new_zeros((self.tokens + 1, *shape))

    @property
    def decodes(self) -> bool:
        """Whether every row is one token."""
        return self.reserved is None and len(self.starts) - 1 == self.starts[-1]

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """Return the rows' states [R, *shape] out of `states` [slots, *shape], as a copy."""
        fresh = self.fresh.view(-1, *[1] * (states.dim() - 1))
        return states.index_select(0, self.reads).masked_fill_(fresh, 0)

    def write(self, states: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows' new states [R, *shape] in the dtype of `states`."""
        states.index_copy_(0, self.writes, values.to(states.dtype))


def list_chunks(starts: Sequence[int], room: Room | None, *, size: int) -> list[Array]:
    """Return the arrays of `Chunks.of`."""
    return cut_rows(starts, size) if room is None else cut_into(starts, size, room)


def list_pieces(starts: Sequence[int], room: Room | None, *, size: int) -> list[Array]:
    """Return the arrays of `StateSteps.pieces`."""
    return cut_evenly(starts, size, room)


def list_places(starts: Sequence[int], room: Room | None, *, before: int) -> list[Array]:
    """Return the arrays of `StateSteps.places_after`; padding tokens belong to padding rows."""
    every = np.asarray(starts, np.int64)
    if room is not None:
        every = np.concatenate((every, np.full(room.rows + 1 - len(every), room.tokens)))
    rows, own = np.arange(len(every) - 1), np.arange(before)
    tokens = np.arange(every[-1]) + np.repeat((rows + 1) * before, np.diff(every))
    firsts = (every[:-1] + rows * before)[:, None] + own
    lasts = (every[1:] + rows * before)[:, None] + own
    return [tokens, firsts.reshape(-1), lasts.reshape(-1)]


def list_spans(starts: Sequence[int], room: Room | None) -> list[Array]:
    """Return the arrays of `StateSteps.spans`."""
    firsts = np.asarray(starts, np.int64)
    places = (np.arange(firsts[-1]) - np.repeat(firsts[:-1], np.diff(firsts))).astype(np.int32)
    if room is None:
        return [firsts, places]
    none = np.full(room.rows + 1 - len(firsts), firsts[-1])
    padding = np.full(room.tokens - len(places), -1, np.int32)
    return [np.concatenate((firsts, none)), np.concatenate((places, padding))]


def list_firsts(starts: Sequence[int], room: Room | None) -> list[Array]:
    """Return each row's first token, int64 [R]; that of padding rows is after all tokens."""
    firsts = np.asarray(starts[:-1], np.int64)
    if room is None:
        return [firsts]
    return [np.concatenate((firsts, np.full(room.rows - len(firsts), room.tokens)))]


def state_arrays(plan: StepPlan) -> list[Array]:
    """Return the slots that a plan's rows read and write, int64 [R] each, and which rows are at
    their sequence's beginning, bool [R].

    Rows of synthetic plans, which have no slots, use the null slot. Raises ValueError for rows
    without slots that are not at the beginning.
    """
    rows, starts = len(plan.query_starts) - 1, plan.query_starts
    reads, writes, fresh = plan.state_reads, plan.state_writes, plan.positions[starts[:-1]] == 0
    if reads is None or writes is None:
        if not fresh.all():
            raise ValueError("rows of a model that keeps states go on without any")
        reads = writes = np.full(rows, NULL_SLOT, np.int64)
    return [reads, writes, fresh]


def state_steps(plan: StepPlan, send: Send) -> StateSteps:
    """Return the rows of a plan, with tensors through `send`; raises what `state_arrays` does."""
    reads, writes, fresh = send(state_arrays(plan))
    return StateSteps(plan.query_starts.tolist(), reads, writes, fresh, send)


@dataclass(frozen=True, slots=True, eq=False)
class StepStates:
    """All states, and what a step reads and writes of them."""

    layers: Mapping[int, Mapping[str, torch.Tensor]]  # by layer and name, [slots, *shape]
    steps: StateSteps

    @classmethod
    def of(cls, plan: StepPlan, pool: StatePool, send: Send = send_plain) -> StepStates:
        """Return the states and rows of a plan; raises what `state_arrays` does."""
        return cls(pool.layers, state_steps(plan, send))


class MixerLayer(Protocol):
    """The part of a layer that keeps a state per sequence.

    A row's output depends neither on other rows nor, except for rounding, on how its sequence is
    divided into steps.
    """

    inner: Linear  # what it reads of a layer's input
    output: Linear

    def mix(
        self, projected: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        """Return the output [T, hidden] for that of `inner` [T, ...], whose rows may lie apart.

        With several ranks it is a partial sum.

        Reads each row's state from `states` (by name, [slots, *shape]) at `steps.reads`, and writes
        the state after its last token to `steps.writes` and nowhere else. So if these differ, the
        step can be repeated.
        """
        ...

    @property
    def in_turns(self) -> bool:
        """Whether a recording computes its rows' chunks turn after turn, in many launches."""
        ...

    def pack(self) -> None:
        """Pack every large linear for this machine; see `Linear.pack`."""
        ...

    def nbytes(self) -> int:
        """Return the bytes of its weights."""
        ...


@runtime_checkable
class EarlyMixer(MixerLayer, Protocol):
    """A mixer that can begin while the heads of attention beside it are rotated (Falcon H1)."""

    def begin(
        self, projected: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> BesideHeads:
        """Return what `mix` begins with, yet to be computed."""
        ...

    def go_on(
        self,
        projected: torch.Tensor,
        mixed: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        steps: StateSteps,
    ) -> torch.Tensor:
        """Do what `mix` does behind that; `mixed`: what it has found."""
        ...
