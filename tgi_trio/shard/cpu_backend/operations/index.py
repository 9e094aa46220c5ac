"""The operations of an index that chooses the tokens to which latent attention attends."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.matrices.roles import IndexRefs, LogScaleRefs
from tgi_trio.model.specs.decoder import IndexSpec
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.scratch_memory import (
    INDEX_COUNTS,
    INDEX_TILES,
    LISTED_AHEAD,
    MOST_SHARED,
    TILE_BYTES,
    count_score_bytes,
)
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES

_PAIR = 2 * LANES  # tokens whose scores are computed at a time
_SPARE_HEADS = 7  # of queries, which a tile may read and ignore


def add_choice(
    writer: OperationWriter,
    refs: IndexRefs,
    index: IndexSpec,
    *,
    place: int,
    width: int,
    key_norm: tuple[Floats | None, Floats | None],
    key_scale: float,
    feeder: int,
) -> int:
    """Add the choice of a layer's index; return the features of a row of its queries.

    Row `feeder` writes what its queries come from to MIXED. `place`: of the index's key in rows of
    PROJECTED, `width` features each; its heads' weights follow. `key_norm`: weights and biases.
    Raises ModelLoadError as the weights do.
    """
    queries = index.heads * index.dim
    writer.linear(refs.query_up, Buffer.MIXED, Buffer.QKV, feeder=feeder)
    row = int(writer.rows[-1]["width"])
    weights, biases = key_norm
    common: dict[str, Any] = {
        "heads": index.heads,
        "kv_heads": 1,
        "head_dim": index.dim,
        "inputs": width,
        "offset": place,
        "most": index.most,
    }
    writer.add(
        Code.ASK,
        source=Buffer.QKV,
        target=Buffer.ASKED,
        width=row,
        weights=writer.keep(weights),
        bias=writer.keep(biases),
        eps=refs.key_norm.eps,
        order=writer.keep(order_of(index)),
        key_scale=key_scale,
        log_scales=keep_log_scales(writer, refs.query_scale),
        **common,
    )
    writer.add(Code.SCORE, target=Buffer.SCORES, **common)
    writer.add(Code.CHOOSE, target=Buffer.CHOICE, **common)
    return max(row, queries)


def keep_log_scales(writer: OperationWriter, refs: LogScaleRefs | None) -> int:
    """Keep how queries are scaled by the logarithm of their position; return the address of float32
    [heads, 2], 0 for none. Raises ModelLoadError as the weights do.
    """
    if refs is None:
        return 0
    parts = [writer.source.array(ref.name, ref.shape) for ref in (refs.scale, refs.bias)]
    return writer.keep(np.stack(parts, axis=1))


def order_of(index: IndexSpec) -> NDArray[np.int32]:
    """Return the order in which kernels have the dimensions of a query or key, int32 [dim].

    Those that are rotated come first: the first elements of all pairs, then their second ones.
    """
    count, begin = index.rotary.dim, index.dim - index.rotary.dim if index.last else 0
    turned = np.arange(begin, begin + count)
    pairs = turned.reshape(-1, 2).T if index.rotary.interleaved else turned
    others = np.delete(np.arange(index.dim), turned)
    return np.concatenate([pairs.reshape(-1), others]).astype(np.int32)


def find_buffers(index: IndexSpec, tokens: int, longest: int) -> dict[Buffer, int]:
    """Return the bytes of what is kept of an index within a step.

    `longest`: the most tokens of a context.
    """
    asked = (tokens * index.heads + _SPARE_HEADS) * index.dim
    return {
        Buffer.ASKED: 4 * asked,
        Buffer.SCORES: min(tokens, MOST_SHARED) * count_score_bytes(longest),
        Buffer.CHOICE: 4 * tokens * index.most,
    }


def find_room(heads: int, index: IndexSpec, head_dim: int, longest: int) -> int:
    """Return the bytes of scratch memory of a thread; `heads` of attention, of `head_dim`."""
    choosing = INDEX_TILES + INDEX_COUNTS + count_score_bytes(longest)
    listed = -(-index.most // _PAIR) * _PAIR
    attending = TILE_BYTES + 8 * (listed + LISTED_AHEAD)
    attending += 4 * _PAIR * head_dim + heads * (4 * listed + 64)
    return max(choosing, attending, 8 * index.dim)
