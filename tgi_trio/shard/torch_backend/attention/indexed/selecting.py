"""Choosing the tokens that attention sees, on the device: scores, the best, and their slots.

A choice is a block table with pages of one token: every token (or every KV head of a token) becomes
a row with one query, over which the attention kernels attend as over any other (`PagedBatch.over`).
A step with few rows has its long rows read by several programs each.
Imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.attention.indexed.absorbing import PendingQueries
from tgi_trio.shard.torch_backend.attention.paged.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels.attention import absorbing, index_scores, selecting
from tgi_trio.shard.torch_backend.layers.attention.log_scale import LogScale
from tgi_trio.shard.torch_backend.layers.attention.rotary import RotaryTable
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import limit_registers

_SCORES: Final = 1 << 24  # of tokens that are scored at a time: 64 MiB
_ROWS: Final = (1 << 16) - 1  # of scores: as many programs as a grid has in its second dimension
_PROGRAMS: Final = 512  # among which units are divided: a few for each multiprocessor
_LANES: Final = 128  # (token, head) pairs of a program, where a step has many tokens
KEYS: Final = 32  # units that a program scores at a time: with more, registers spill
REGISTERS: Final = 168  # for which the assembler spills nothing; by itself it takes fewer
READ: Final = 1 << 13  # scores that a program holds in registers
PART: Final = 1 << 12  # scores of which a program keeps the good ones at a time
SAMPLE: Final = 1 << 12  # scores of a row by which it knows which ones are
READERS: Final = 512  # programs that select: a few for each multiprocessor; a power of two
LISTED: Final = 2048  # slots that a program lists at a time


class Asking(NamedTuple):
    """An index's queries, and what is done with them as they are read."""

    queries: torch.Tensor  # [T, heads, dim], of any strides but the last
    weights: torch.Tensor | None  # [T, heads], of any stride but the last; None: all are 1
    table: RotaryTable | None = None  # by which they are rotated, if at all
    begin: int = 0  # the first of the numbers that are
    interleaved: bool = False
    scale: LogScale | None = None  # by which they are multiplied before

    def vectors(self) -> tuple[torch.Tensor, ...]:
        """Return the weights, cosines, sines, factors, biases and logarithms, or what stands for
        them; raises ValueError if there are no positions to scale by.
        """
        unused, table, scale = self.queries, self.table, self.scale
        cos, sin, _, logs = table or (unused, unused, None, None)
        weights = unused if self.weights is None else self.weights
        scaling = (unused,) * 3 if scale is None else scale.describe(logs)
        return weights, cos, sin, *scaling


class UnitScores(NamedTuple):
    """What an index found for a piece of a step's tokens, or of their heads."""

    scores: torch.Tensor  # float32 [N, room]
    visible: torch.Tensor  # int32 [N]: units that have scores, if more than are chosen


class Selection(NamedTuple):
    """The units that were chosen."""

    units: torch.Tensor  # int32 [N, most], ascending
    found: torch.Tensor  # int32 [N]


class TokenList(NamedTuple):
    """The tokens that are attended to, of each token of a step, or of its heads."""

    slots: torch.Tensor  # int32 [N, width], ascending by position
    counts: torch.Tensor  # int32 [N]

    def part(self, rows: range) -> TokenList:
        """Return a view of some consecutive rows."""
        some = slice(rows.start, rows.stop)
        return TokenList(self.slots[some], self.counts[some])


def cut_tokens(tokens: int, room: int, heads: int = 1) -> Iterator[range]:
    """Yield the tokens of a step in pieces whose scores, `room` a head, fit into memory.

    A piece has no more rows of scores than a grid takes.
    """
    size = max(1, min(_SCORES // max(1, room), _ROWS) // heads)
    for first in range(0, tokens, size):
        yield range(first, min(first + size, tokens))


def score_units(
    asking: Asking,
    keys: torch.Tensor,
    batch: PagedBatch,
    tokens: range,
    *,
    unit: int,
    most: int,
    invariant: bool = False,
    pending: PendingQueries | None = None,
) -> UnitScores:
    """Return the scores of units of `unit` tokens, for the given tokens of a step.

    A score is the sum over heads of `weights * relu(q . k)`, for the key of a unit's last token.

    `keys`: [slots, dim], a view of one layer of the cache. Nothing is scored for tokens that see no
    more than `most` whole units. `invariant`: decodes have the tile of prompts; see
    `batch_invariance.py`. `pending` queries of attention, if any, may be computed beside.
    """
    queries, weights, table = asking.queries, asking.weights, asking.table
    heads, dim = queries.shape[1:]
    room, count = max(1, batch.longest // unit), len(tokens)
    scores = torch.empty((count, room), dtype=torch.float32, device=queries.device)
    visible = torch.empty(count, dtype=torch.int32, device=queries.device)
    turned = 0 if table is None else table.cos.shape[-1]
    each, padded = choose_tile_tokens(heads, decodes=batch.decodes and not invariant)
    tiles = -(-count // each)
    programs = count_programs(tiles, room)
    arguments = (
        *(scores, visible, queries, *asking.vectors(), keys),
        *(batch.tables, batch.width, batch.contexts, batch.query_starts, batch.token_rows()),
        *(tokens.start, count, room),
        *(queries.stride(0), queries.stride(1), 0 if weights is None else weights.stride(0)),
        keys.stride(0),
    )
    constants = {
        **{"HEADS": heads, "PADDED_HEADS": padded, "DIM": dim, "PADDED_DIM": pad_dim(dim)},
        **{"UNIT": unit, "MOST": most, "WEIGHTED": weights is not None},
        "SCALES": asking.scale is not None,
        **describe_turn(dim, turned, asking.begin, interleaved=asking.interleaved),
        **{"TOKENS": each, "KEYS": KEYS, "PAGE": batch.page, "CODES": batch.cache.codes},
        **limit_registers(REGISTERS),
    }
    if pending is None or not pending.joins:
        index_scores.score_units[(tiles, programs)](*arguments, **constants)
    else:
        beside = pending.take()
        absorbing.score_and_absorb[(tiles, programs + -(-beside.programs // tiles))](
            *(*arguments, *beside.arguments, programs), **constants, **beside.constants
        )
    return UnitScores(scores, visible)


def describe_turn(dim: int, rotary: int, begin: int, *, interleaved: bool) -> dict[str, Any]:
    """Return constants: how `score_units` rotates the first or the last `rotary` of `dim` numbers.

    Tensor cores multiply 16 numbers at least.
    """
    halves = rotary > 0 and not interleaved
    return {
        **{"ROTARY": rotary, "BEGIN": begin, "IN_HALVES": halves},
        **{"PADDED_HALF": max(16, pad_dim(rotary // 2)) if halves else 0},
        **{"REST": 0 if begin or not halves else rotary},
        **{"PADDED_REST": max(16, pad_dim(dim - rotary)) if halves else 0},
    }


def choose_tile_tokens(heads: int, *, decodes: bool) -> tuple[int, int]:
    """Return how many tokens a program scores, and for how many heads each; powers of two."""
    padded = next_power_of_2(heads)
    several = 1 if decodes else _LANES // padded
    return max(1, several, 16 // padded), padded  # tensor cores multiply 16 rows at least


def count_programs(tiles: int, units: int, each: int = KEYS) -> int:
    """Return how many programs share the units of a tile, of which one scores `each` at a time.

    Nothing is merged afterwards, so there may be as many as the device has room for.
    """
    return max(1, min(-(-units // each), _PROGRAMS // tiles))


def select_best(found: UnitScores, most: int, batch: PagedBatch) -> Selection:
    """Return the `most` units with the best scores of each row, or all where there are no more."""
    units = found.visible.new_empty((len(found.visible), most))
    best, lists = Selection(units, torch.empty_like(found.visible)), found.visible
    _select(found, best, (lists, lists), batch, 0, WIDTH=0, UNIT=1, TAIL=False, HEADS=1, LISTED=1)
    return best


def select_tokens(
    found: UnitScores,
    batch: PagedBatch,
    tokens: range,
    into: TokenList,
    *,
    most: int,
    unit: int = 1,
    tail: bool = False,
    heads: int = 1,
) -> None:
    """List the slots of the tokens of the best units `into` the rows of the given tokens alone.

    `most`: units that are selected. `tail`: units are whole, and the tokens behind the last whole
    one are listed as well; otherwise the last unit ends with the token itself. `heads`: KV heads
    with a choice of their own; their slots are of the cache as [slots * heads, 1, dim].
    """
    units = found.visible.new_empty((len(found.visible), most))
    best, width = Selection(units, torch.empty_like(found.visible)), into.slots.shape[1]
    listed = min(LISTED, pad_dim(width))
    constants: dict[str, Any] = {"WIDTH": width, "UNIT": unit, "TAIL": tail, "HEADS": heads}
    _select(found, best, into, batch, tokens.start, **constants, LISTED=listed)


def _select(
    found: UnitScores,
    best: Selection,
    into: tuple[torch.Tensor, torch.Tensor],
    batch: PagedBatch,
    first: int,
    **constants: Any,
) -> None:
    """Select units, and list their tokens `into` memory where `constants` say so."""
    rows, room = found.scores.shape
    programs, parts = count_readers(rows, room), -(-room // PART)
    kept, depth = best.units, 0  # which nobody reads where rows are held in registers
    if room > READ:
        depth = min(READ, -(-parts // programs) * PART)
        kept = best.units.new_empty((rows, programs, depth))
    amounts = arrived = found.visible
    if programs > 1:
        amounts, arrived = found.visible.new_empty((rows, READERS)), batch.counters(rows)
    selecting.select_best[(programs, rows)](
        *(*best, *into, *found, kept, amounts, arrived),
        *(batch.tables, batch.width, batch.contexts, batch.query_starts, batch.token_rows()),
        *(first, room, depth),
        MOST=best.units.shape[1],
        **constants,
        PAGE=batch.page,
        PROGRAMS=READERS if programs > 1 else 0,
        PART=PART,
        BLOCK=READ,
        SAMPLE=SAMPLE,
        num_warps=16,
    )


def count_readers(rows: int, room: int) -> int:
    """Return how many programs share a row with `room` units.

    Each looks at the same sample of it first, and reads as many scores then, or more. A row that
    one program holds in registers has no other.
    """
    return 1 if room <= READ else max(1, min(-(-room // PART), READERS // rows))


def make_list(rows: int, width: int, device: torch.device) -> TokenList:
    """Return memory for the tokens that each of `rows` attends to, at most `width`."""
    slots = torch.empty((rows, width), dtype=torch.int32, device=device)
    return TokenList(slots, torch.empty(rows, dtype=torch.int32, device=device))
