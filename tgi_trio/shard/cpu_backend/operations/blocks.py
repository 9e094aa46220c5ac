"""The operations of an index that chooses the blocks of tokens to which attention attends."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.matrices.roles import BlockIndexRefs
from tgi_trio.model.specs.block_index import BlockIndexSpec
from tgi_trio.model.specs.decoder import RotarySpec
from tgi_trio.shard.cpu_backend.head_order import head_order, needs_order
from tgi_trio.shard.cpu_backend.operations.norms import NormWriter
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.scratch_memory import (
    INDEX_COUNTS,
    INDEX_TILES,
    MOST_SHARED,
    TILE_BYTES,
    count_unit_bytes,
)
from tgi_trio.shard.cpu_backend.tables import BLOCKS, Buffer, Code

_SPARE_HEADS = 7  # of queries, which a tile may read and ignore


def add_block_choice(
    writer: OperationWriter,
    norms: NormWriter,
    refs: BlockIndexRefs,
    index: BlockIndexSpec,
    rotary: RotarySpec | None,
    *,
    heads: int,
    place: int,
    width: int,
    key_scale: float,
) -> dict[str, Any]:
    """Add the choice of a layer's index; return the fields of ATTEND_BLOCKS that tell of it.

    `place`: of the index's queries in rows of QKV, `width` features each; its key follows them.
    Raises ModelLoadError as the weights do.
    """
    facts = np.zeros((1,), BLOCKS)
    facts["size"], facts["most"], facts["local"] = index.size, index.most, index.local
    facts["lists"] = heads
    facts["queries"], facts["key"] = place, place + heads * index.dim
    facts["choice_bytes"] = count_choice_bytes(index)
    choice: dict[str, Any] = {"facts": writer.keep(facts), "most": index.most * index.size}
    common = {"heads": heads, "kv_heads": 1, "head_dim": index.dim, **choice}
    writer.add(
        Code.ASK_BLOCKS,
        source=Buffer.QKV,
        target=Buffer.ASKED,
        width=width,
        query_norm=norms.keep_weight(refs.query_norm),
        key_norm=norms.keep_weight(refs.key_norm),
        eps=refs.key_norm.eps,
        order=writer.keep(order_of(rotary, index.dim)),
        key_scale=key_scale,
        **common,
    )
    writer.add(Code.SCORE_BLOCKS, target=Buffer.SCORES, **common)
    writer.add(Code.CHOOSE_BLOCKS, target=Buffer.CHOICE, **common)
    return choice


def order_of(rotary: RotarySpec | None, dim: int) -> NDArray[np.int32]:
    """Return the order in which kernels have the dimensions of a query or key, int32 [dim]."""
    if rotary is None or not needs_order(rotary):
        return np.arange(dim, dtype=np.int32)
    return head_order(rotary, dim)


def count_choice_bytes(index: BlockIndexSpec) -> int:
    """Return the bytes of a list in CHOICE."""
    return 8 + 8 * index.most * (index.size // BLOCK_SIZE)


def find_block_buffers(
    index: BlockIndexSpec, heads: int, tokens: int, longest: int
) -> dict[Buffer, int]:
    """Return the bytes of what is kept of an index of so many `heads` within a step.

    `longest`: the most tokens of a context.
    """
    return {
        Buffer.ASKED: 4 * (tokens * heads + _SPARE_HEADS) * index.dim,
        Buffer.SCORES: min(tokens, MOST_SHARED) * heads * count_unit_bytes(longest, index.size),
        Buffer.CHOICE: tokens * heads * count_choice_bytes(index),
    }


def find_blocks_room(index: BlockIndexSpec, heads: int, group: int, longest: int) -> int:
    """Return the bytes of scratch memory of a thread; `group`: query heads of a KV head."""
    choosing = INDEX_TILES + 64 * heads + INDEX_COUNTS + 4 * index.most
    choosing += heads * count_unit_bytes(longest, index.size)
    attending = TILE_BYTES + group * 8 * count_choice_bytes(index)
    asking = 4 * 4 * index.dim
    return max(choosing, attending, asking)
