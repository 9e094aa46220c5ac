"""The forward pass of one model on one team of threads: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.numbers import to_bfloat16
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.operations.lone_linears import LONE_ROWS, LoneLinear
from tgi_trio.shard.cpu_backend.program import Program
from tgi_trio.shard.cpu_backend.row_states import RowStates
from tgi_trio.shard.cpu_backend.scratch_memory import (
    DELTAS,
    ROTATE_HEADS,
    ROWS,
    TILE_BYTES,
    count_score_bytes,
)
from tgi_trio.shard.cpu_backend.tables import Buffer
from tgi_trio.shard.cpu_backend.team import Team
from tgi_trio.shard.cpu_backend.variant import Variant
from tgi_trio.shard.cpu_backend.weight_layout import PANEL
from tgi_trio.shard.media.placed_features import PlacedFeatures
from tgi_trio.shard.plan_parts import first_lengths

if TYPE_CHECKING:  # it imports torch
    from tgi_trio.shard.ranks.portions import Portions

_PAGE = 4096
# Tokens of a prompt that attend one after the other although they are not tiled together, so that
# their K and V stay in the cache.
_LEAST_TILE = 4

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
_Rows = tuple[NDArray[np.int64], Floats]  # places among the tokens of a step, and rows for them
_Added = tuple[NDArray[np.int64], Floats, Floats | None]  # and factors of what they are added to


class Beyond(Protocol):
    """What comes before and after the layers of a program that has no embedding or no head."""

    def receive(self, hidden: Floats) -> None:
        """Write what the first layer reads to `hidden` [T, hidden]; an embedding overwrites it."""
        ...

    def send(self, hidden: Floats) -> None:
        """Take what leaves the last layer, [T, hidden], unless there is a head."""
        ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """The query tokens of a step as the kernels read them: flat int32 arrays, by sequence."""

    ids: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T] KV slot of each token: block * BLOCK_SIZE + offset
    rows: Ints  # [T] the row of `tables` of each token
    tables: Ints  # [R, widest] block ids
    longest: int  # the longest context
    adapters: Ints | None = None  # [T] each token's adapter; None: no token has one
    # [T] the last position that each attends to, ascending; None: its own
    lasts: Ints | None = None
    # [3, T] rotary positions on each axis, [1, T] if all axes are equal; None: `positions`
    turns: Ints | None = None
    features: PlacedFeatures | None = None  # replace the embeddings of some tokens
    states: RowStates | None = None  # None: the model has no recurrent states
    # [T] length of each token's sequence when it was first computed; None: up to the token itself
    lengths: Ints | None = None

    @classmethod
    def of(cls, plan: StepPlan, *, keeps_states: bool = False, by_length: bool = False) -> Tokens:
        """Return the tokens of a plan; raises ValueError as `RowStates.of` does.

        `keeps_states`: the model has recurrent states. `by_length`: its rotary frequencies depend
        on the length of the sequence.
        """
        numbers = np.array([row.sampling.adapter for row in plan.rows], np.int32)
        rows = np.arange(len(plan.rows), dtype=np.int32)
        if len(rows) == 1:
            rows = np.zeros(len(plan.token_ids), np.int32)
        elif len(plan.token_ids) > len(rows):
            rows = np.repeat(rows, np.diff(plan.query_starts))
        return cls(
            ids=plan.token_ids.astype(np.int32),
            positions=plan.positions.astype(np.int32),
            slots=plan.kv_slots.astype(np.int32),
            rows=rows,
            tables=np.ascontiguousarray(plan.block_tables, np.int32),
            longest=int(plan.context_lengths.max()),
            adapters=numbers[rows] if numbers.any() else None,
            lasts=None if plan.visible is None else plan.visible.astype(np.int32),
            turns=_turns(plan),
            features=plan.features,
            states=RowStates.of(plan) if keeps_states else None,
            lengths=first_lengths(plan).astype(np.int32) if by_length else None,
        )


def _turns(plan: StepPlan) -> Ints | None:
    """Return `Tokens.turns`; one row if all axes are equal, as after images, which costs less."""
    turns = plan.rotary_positions
    if turns is None:
        return None
    if (turns == turns[0]).all():
        turns = turns[:1]
    return np.ascontiguousarray(turns, np.int32)


class Forward:
    """A program with its buffers and its team. As a context manager, it ends the threads."""

    def __init__(
        self,
        program: Program,
        variant: Variant,
        cores: list[int],
        neighbours: Beyond | None = None,
        portions: Portions | None = None,
    ) -> None:
        """Compile the kernels for `variant`, and start a thread on each of `cores`.

        `neighbours`: of the program's layers, as in a pipeline; `portions`: the connection to ranks
        that compute other portions of every layer. Both take part in each step. Raises what the
        compiler raises if it has no instructions for this machine.
        """
        self.spec = program.spec
        self.variant = variant
        self.program = program
        self._neighbours = neighbours
        self._portions = portions
        self.team = Team(variant, program.operations, cores)
        self._step = self.team.step
        self._buffers: dict[Buffer, NDArray[np.uint8]] = {}
        self._logits = np.zeros((0, self.program.padded_vocab), np.float32)
        self._hidden = np.zeros((0, self.spec.hidden_size), np.float32)
        self._between = self._hidden  # what leaves a layer: the same, or all states of a token
        self._room = (0, 0, 0)  # tokens, wanted rows, context
        self._scratch = allocate_zeroed((0,))
        self._first = 0  # first operation of the step
        self._adapters: Ints | None = None  # of the step's tokens; None: no token has one
        self.taps: tuple[int, ...] = ()  # layers whose input `run` keeps, see `EagleSpec.taps`
        self._tapped = np.zeros((0, 0), np.float32)
        self._held: Any = None  # keeps alive the arrays whose addresses are in the step
        self.team.start()

    def reserve(self, tokens: int, wanted: int, longest: int) -> int:
        """Allocate for steps of so many tokens, rows of logits and context; return the bytes.

        Memory that no step touches is never committed.
        """
        if longest > self._room[2] or tokens > self._room[0]:
            self.program.set_positions(longest, tokens)
        self._room = (tokens, wanted, longest)
        step = self._step
        self._buffers = {}
        for buffer, size in self.program.buffer_bytes(tokens, wanted, longest).items():
            self._buffers[buffer] = allocate_zeroed((size,))
            step["buffers"][0, buffer] = address(self._buffers[buffer])
        logits = self._buffers[Buffer.LOGITS].view(np.float32)
        self._logits = logits.reshape(wanted, self.program.padded_vocab)
        hidden = self._buffers[Buffer.HIDDEN].view(np.float32)
        self._hidden = self._between = hidden.reshape(tokens, self.spec.hidden_size)
        if self.spec.gated_streams is not None:
            self._between = self._buffers[Buffer.STREAMS].view(np.float32).reshape(tokens, -1)
        scores = count_score_bytes(longest)
        widest = self.program.widest_head
        each = TILE_BYTES + self.variant.tile_rows * (4 * widest + scores)
        each = max(each, ROTATE_HEADS * 4 * widest)
        each = max(each, (ROWS + DELTAS) * 4 * PANEL + self.program.room_bytes)
        each = max(each, self.program.find_index_room(longest))
        each += -each % _PAGE
        self._scratch = allocate_zeroed((len(self.team.cores) * each,))
        step["scores_bytes"], step["scratch_bytes"] = scores, each
        step["scratch"] = address(self._scratch)
        step["low_stride"] = self.program.low_width * self.variant.active_bytes
        return sum(b.nbytes for b in self._buffers.values()) + self._scratch.nbytes

    def run(self, tokens: Tokens, wanted: Ints) -> Floats:
        """Compute the tokens; return logits [len(wanted), vocabulary] of those at `wanted`.

        K and V are written to the cache. The logits are a view that the next call overwrites;
        before the last stage of a pipeline there are none: [len(wanted), 0].
        """
        have = self._room
        need = (len(tokens.ids), len(wanted), tokens.longest)
        if any(n > h for n, h in zip(need, have, strict=True)):
            self.reserve(*(max(pair) for pair in zip(need, have, strict=True)))
        step = self._step
        step["tokens"] = len(tokens.ids)
        several = len(tokens.ids) > 2 * len(tokens.tables)
        step["tile"] = max(self.variant.tokens, _LEAST_TILE) if several else 1
        for name in ("positions", "slots", "rows", "tables"):
            step[name] = address(getattr(tokens, name))
        step["lasts"] = address(tokens.positions if tokens.lasts is None else tokens.lasts)
        turns = self.program.rotary.turn_far(tokens.positions, tokens.lengths)
        turns = tokens.turns if turns is None else turns
        step["turns"] = address(tokens.positions if turns is None else turns)
        three = tokens.turns is not None and len(tokens.turns) > 1
        step["turn_stride"] = 4 * len(tokens.ids) if three else 0
        if (states := tokens.states) is not None:
            step["row_count"] = len(states.reads)
            step["row_starts"] = address(states.starts)
            step["state_reads"] = address(states.reads)
            step["state_writes"] = address(states.writes)
        ids = self._ids(tokens)
        step["token_ids"] = address(ids)
        step["table_width"] = tokens.tables.shape[1]
        self._held = tokens, ids, turns
        between = self._between[: len(tokens.ids)]
        if self._neighbours is not None:
            self._neighbours.receive(between)
        self._first, adapted = 0, self.program.adapted
        self._adapters, embedded, added = tokens.adapters, None, list[_Added]()
        if tokens.adapters is not None and adapted is not None:
            self._first, runs = adapted.first, adapted.runs(tokens.adapters)
            step["runs"], step["run_count"] = address(runs.table), len(runs.table)
            step["run_of"], step["factors"] = address(runs.of_tokens), runs.factors
            self._held = tokens, ids, turns, runs
            embedded = adapted.find_embedded(tokens.ids, tokens.adapters)
            added += adapted.find_added(tokens.ids, tokens.adapters)
        first = self._first
        if tokens.features is not None or self.taps or embedded is not None or added:
            first = self._run_to_stops(tokens, embedded, added)
        logits = self._operate(first, wanted)
        if self._neighbours is not None:
            self._neighbours.send(between)
        return logits

    def tapped(self, places: NDArray[np.int64]) -> Floats:
        """Return a copy of the inputs of the layers `taps` in the last `run`, side by side."""
        return self._tapped[places]

    def _ids(self, tokens: Tokens) -> Ints:
        """Return the ids of a step's tokens, with a neutral id in place of image features."""
        own, features = self.spec.per_layer_inputs, tokens.features
        if own is None or features is None:
            return tokens.ids
        ids = tokens.ids.copy()
        ids[features.places] = own.image_token
        return ids

    def _run_to_stops(self, tokens: Tokens, embedded: _Rows | None, added: Sequence[_Added]) -> int:
        """Run up to where hidden states are last changed or kept; return the next operation.

        `embedded`, `added`: see `find_embedded` and `find_added` of `AdaptedOperations`. Features
        are written after the embedding, and added after layers.
        """
        step, first, hidden = self._step, self._first, self._hidden
        # the operation before which to stop, and what to do there
        stops: list[tuple[int, Callable[[], None]]] = []
        if embedded is not None:
            stops.append((first + 1, partial(hidden.__setitem__, *embedded)))
        stops += [(first + 1, partial(_add_rows, hidden, *each)) for each in added]
        if (features := tokens.features) is not None:
            places = features.places
            stops.append((first + 1, partial(hidden.__setitem__, places, features.rows)))
            for layer, rows in features.deep.items():
                behind = self.program.find_layer(layer + 1, adapted=first > 0)
                stops.append((behind, partial(_add_rows, hidden, places, rows)))
        if self.taps:
            count, width = len(tokens.ids), hidden.shape[1]
            self._tapped = np.empty((count, len(self.taps) * width), np.float32)
            for i, layer in enumerate(self.taps):
                part = self._tapped[:, i * width : (i + 1) * width]
                before = self.program.find_layer(layer, adapted=first > 0)
                stops.append((before, partial(np.copyto, part, hidden[:count])))
        at = first
        step["wanted"] = 0
        for end, act in sorted(stops, key=itemgetter(0)):
            if end > at:
                self._run_rows(at, end)
                at = end
            act()
        return at

    def _run_rows(self, first: int, end: int) -> None:
        """Run operations, with an all-reduce after each whose result is a partial sum."""
        step = self._step
        if self._portions is not None:
            tokens = int(step["tokens"][0])
            for row, buffer in self.program.sums:
                if first < row <= end:
                    step["first"], step["end"] = first, row
                    self.team.run()
                    width = self.spec.hidden_size
                    parts = self._buffers[buffer].view(np.float32)[: tokens * width]
                    self._portions.add_up(parts)
                    first = row
        if first < end:
            step["first"], step["end"] = first, end
            self.team.run()

    def logits(self, wanted: Ints) -> Floats:
        """Return logits of other tokens of the last `run`, at most as many rows as reserved."""
        program = self.program
        if self._adapters is None or program.adapted is None or program.body == program.end:
            return self._operate(program.body, wanted)
        return self._operate(program.adapted.find(program.body), wanted)

    def hidden(self, places: NDArray[np.int64]) -> Floats:
        """Return a copy of the hidden states [n, hidden] of the last `run`, before the norm."""
        return self._hidden[places]

    def states(self, places: NDArray[np.int64]) -> Floats:
        """Return a copy of what layers that draft read of the last `run`, [n, features].

        They are hidden states; if a token has several between gates, all of them, then the one that
        gates have made of them.
        """
        if self.spec.gated_streams is None:
            return self.hidden(places)
        return np.concatenate((self._between[places], self.hidden(places)), axis=1)

    def embed(self, ids: Ints) -> Floats:
        """Return the embeddings [n, hidden] of tokens; the states of the last `run` are lost."""
        step, most = self._step, self._room[0]
        found = np.empty((len(ids), self.spec.hidden_size), np.float32)
        for first in range(0, len(ids), most):
            part = np.ascontiguousarray(ids[first : first + most])
            step["tokens"], step["wanted"], step["token_ids"] = len(part), 0, address(part)
            self._run_rows(0, self.program.find_layer(0, adapted=False))
            found[first : first + len(part)] = self._hidden[: len(part)]
        return found

    def multiply(self, role: str, x: Floats) -> Floats:
        """Return x W^T + b [n, outputs] of a lone linear layer (`Program.lone`); x [n, inputs]."""
        lone = self.program.lone[role]
        if len(x) <= LONE_ROWS:
            return self._multiply_some(lone, x).copy()
        found = np.empty((len(x), lone.outputs), np.float32)
        for first in range(0, len(x), LONE_ROWS):
            part = x[first : first + LONE_ROWS]
            found[first : first + len(part)] = self._multiply_some(lone, part)
        return found

    def _multiply_some(self, lone: LoneLinear, x: Floats) -> Floats:
        step, dot = self._step, self.variant.dot and not lone.wide
        values = to_bfloat16(x) if dot else x
        given = self._buffers[Buffer.LONE].view(values.dtype)
        given[: values.size] = values.reshape(-1)
        step["tokens"], step["first"], step["end"] = len(x), lone.first, lone.end
        self.team.run()
        product = self._buffers[Buffer.PRODUCT].view(np.float32)
        return product[: len(x) * lone.width].reshape(len(x), -1)[:, : lone.outputs]

    def close(self) -> None:
        self.team.stop()

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _operate(self, first: int, wanted: Ints) -> Floats:
        step, program, held = self._step, self.program, None
        # the operations after the layers: the final norm and the head
        behind = program.end - program.body
        last = program.end
        if self._adapters is not None and program.adapted is not None:
            last = len(program.operations)
            behind = last - program.adapted.find(program.body) if behind else 0
            held = program.adapted.runs(self._adapters[wanted])
            step["wanted_runs"], step["wanted_run_count"] = address(held.table), len(held.table)
            step["wanted_run_of"] = address(held.of_tokens)
        step["wanted"], step["wanted_ids"] = len(wanted), address(wanted)
        self._run_rows(first, last if len(wanted) else last - behind)
        logits = self._logits[: len(wanted), : program.vocabulary]
        if self._portions is None or not len(wanted):
            return logits
        return self._portions.gather(logits, self.spec.vocab_size)


def _add_rows(
    hidden: Floats, places: NDArray[np.int64], rows: Floats, factors: Floats | None = None
) -> None:
    if factors is not None:
        hidden[places] *= factors
    hidden[places] += rows
