"""The operations of an index that chooses blocks of tokens by one key each, for all heads alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.matrices.roles import BlockIndexRefs, IndexRefs
from tgi_trio.model.specs.decoder import IndexSpec, RotarySpec
from tgi_trio.model.specs.pooled_index import PooledIndexSpec
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32
from tgi_trio.shard.cpu_backend.operations.blocks import order_of
from tgi_trio.shard.cpu_backend.operations.norms import NormWriter
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.scratch_memory import (
    INDEX_COUNTS,
    MOST_SHARED,
    TILE_BYTES,
    count_unit_bytes,
)
from tgi_trio.shard.cpu_backend.tables import BLOCKS, Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES

_AT_ONCE = 4  # keys for which a thread has room


def add_pooled_choice(
    writer: OperationWriter,
    norms: NormWriter,
    refs: BlockIndexRefs,
    index: PooledIndexSpec,
    rotary: RotarySpec | None,
    *,
    place: int,
    width: int,
    key_scale: float,
) -> dict[str, Any]:
    """Add the choice of a layer's index; return the fields of ATTEND_POOLED that tell of it.

    `place`: of the index's queries in rows of QKV, `width` features each; its key follows them.
    Raises ModelLoadError as the weights do.
    """
    facts = np.zeros((1,), BLOCKS)
    facts["size"], facts["most"], facts["lists"] = index.size, index.most, 1
    facts["queries"], facts["key"] = place, place + index.heads * index.dim
    facts["choice_bytes"], facts["kept"] = count_choice_bytes(index), index.dim
    choice: dict[str, Any] = {"facts": writer.keep(facts), "most": find_most(index)}
    common: dict[str, Any] = {"heads": index.heads, "kv_heads": 1, "head_dim": index.dim, **choice}
    common |= {"eps": refs.key_norm.eps, "key_scale": key_scale}
    order = writer.keep(order_of(rotary, index.dim))
    writer.add(
        Code.ASK_POOLED,
        source=Buffer.QKV,
        target=Buffer.ASKED,
        width=width,
        query_norm=norms.keep_weight(refs.query_norm),
        order=order,
        **common,
    )
    gain = norms.keep_weight(refs.key_norm)
    writer.add(Code.POOL_KEYS, key_norm=gain, order=order, **common)
    writer.add(Code.SCORE_POOLED, target=Buffer.SCORES, **common)
    writer.add(Code.CHOOSE_POOLED, target=Buffer.CHOICE, **common)
    return choice


def runs_of(index: IndexSpec) -> PooledIndexSpec:
    """Return an index of runs as one of blocks, which it is apart from its keys."""
    return PooledIndexSpec(index.heads, index.dim, index.pool, index.most // index.pool)


def add_run_choice(
    writer: OperationWriter,
    refs: IndexRefs,
    index: IndexSpec,
    *,
    place: int,
    width: int,
    key_norm: tuple[Floats | None, Floats | None],
    key_scale: float,
    feeder: int,
) -> tuple[int, dict[str, Any]]:
    """Add the choice of a layer's index of runs; return the features of a row of its queries, and
    the fields of ATTEND_POOLED that tell of it. Arguments are those of `add_choice`.
    """
    writer.linear(refs.query_up, Buffer.MIXED, Buffer.QKV, feeder=feeder)
    row = int(writer.rows[-1]["width"])
    own, facts = runs_of(index), np.zeros((1,), BLOCKS)
    facts["size"], facts["most"], facts["lists"] = own.size, own.most, 1
    facts["choice_bytes"], facts["kept"] = count_choice_bytes(own), index.kept
    facts["weights"], facts["weights_width"] = place + index.dim, width
    choice: dict[str, Any] = {"facts": writer.keep(facts), "most": find_most(own)}
    common = {"heads": own.heads, "kv_heads": 1, "head_dim": own.dim, "key_scale": key_scale}
    common |= choice
    weights, biases = key_norm
    writer.add(
        Code.ASK_RUNS,
        source=Buffer.QKV,
        target=Buffer.ASKED,
        width=row,
        inputs=width,
        offset=place,
        weights=writer.keep(weights),
        bias=writer.keep(biases),
        eps=refs.key_norm.eps,
        **common,
    )
    added = None
    if (bias := refs.pool_bias) is not None:
        added = to_float32(writer.source.array(bias.name, bias.shape))
    writer.add(Code.POOL_RUNS, bias=writer.keep(added), **common)
    writer.add(Code.SCORE_POOLED, target=Buffer.SCORES, **common)
    writer.add(Code.CHOOSE_POOLED, target=Buffer.CHOICE, **common)
    return row, choice


def find_most(index: PooledIndexSpec) -> int:
    """Return the most tokens that one sees whose whole blocks are all chosen."""
    return (index.most + 1) * index.size - 1


def count_choice_bytes(index: PooledIndexSpec) -> int:
    """Return the bytes of a list in CHOICE: the KV blocks that chosen blocks, and the tokens since
    the last whole one, may lie in.
    """
    each = 1 + -(-(index.size - 1) // BLOCK_SIZE)
    return 8 + 8 * (index.most + 1) * each


def find_pooled_buffers(index: PooledIndexSpec, tokens: int, longest: int) -> dict[Buffer, int]:
    """Return the bytes of what is kept of an index within a step.

    `longest`: the most tokens of a context.
    """
    heads = -(-index.heads // LANES) * LANES
    return {
        Buffer.ASKED: 4 * tokens * heads * index.dim,
        Buffer.SCORES: min(tokens, MOST_SHARED) * count_unit_bytes(longest, index.size),
        Buffer.CHOICE: tokens * count_choice_bytes(index),
    }


def find_pooled_room(index: PooledIndexSpec, group: int, longest: int) -> int:
    """Return the bytes of scratch memory of a thread; `group`: query heads of a KV head."""
    choosing = 4 * _AT_ONCE * index.dim + INDEX_COUNTS + 4 * index.most
    choosing += count_unit_bytes(longest, index.size)
    attending = TILE_BYTES + group * 8 * count_choice_bytes(index)
    return max(choosing, attending)
