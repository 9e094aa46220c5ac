"""What a program needs for its layers' indexes, of any kind: buffers, scratch memory, turning."""

from __future__ import annotations

from typing import TypeAlias

from tgi_trio.model.specs.block_index import BlockIndexSpec
from tgi_trio.model.specs.decoder import DecoderSpec, IndexSpec, LayerSpec, RotarySpec
from tgi_trio.model.specs.pooled_index import PooledIndexSpec
from tgi_trio.shard.cpu_backend.operations.blocks import find_block_buffers, find_blocks_room
from tgi_trio.shard.cpu_backend.operations.index import find_buffers, find_room
from tgi_trio.shard.cpu_backend.operations.pooled import (
    find_pooled_buffers,
    find_pooled_room,
    runs_of,
)
from tgi_trio.shard.cpu_backend.tables import Buffer, Code

_OfBlocks: TypeAlias = BlockIndexSpec | PooledIndexSpec
_ASKING = (Code.ASK_BLOCKS, Code.ASK_POOLED, Code.POOL_KEYS)  # operations that turn


def index_dim(spec: DecoderSpec, layer: LayerSpec) -> int:
    """Return the numbers of an index's key of a token; 0: the layer has no index of its own."""
    if (own := _of_blocks(layer)) is not None:
        return own.dim
    index = spec.index_of(layer) if layer.attends and layer.chooses else None
    return 0 if index is None else index.kept


def find_turning(spec: DecoderSpec, layer: LayerSpec, code: Code) -> tuple[RotarySpec, int] | None:
    """Return how an operation of a layer's index turns, and the size of its heads."""
    own = _of_blocks(layer)
    if code in _ASKING and layer.rotary is not None and own is not None:
        return layer.rotary, own.dim
    if code == Code.ASK and (index := spec.index_of(layer)) is not None:
        return index.rotary, index.dim
    return None


def find_index_room(spec: DecoderSpec, widest: int, longest: int) -> int:
    """Return the bytes of scratch memory that a thread needs for indexes.

    `widest`: the size of the largest head; `longest`: the most tokens of a context.
    """
    rooms = []
    for index in _indexes(spec):
        if index.pool:
            rooms.append(find_pooled_room(runs_of(index), spec.heads, longest))
        else:
            rooms.append(find_room(spec.heads, index, widest, longest))
    for layer in filter(_of_blocks, spec.layers):
        own = spec.sizes(layer)
        group = own.heads // own.kv_heads
        if layer.blocks is not None:
            rooms.append(find_blocks_room(layer.blocks, own.kv_heads, group, longest))
        if layer.pooled is not None:
            rooms.append(find_pooled_room(layer.pooled, group, longest))
    return max(rooms, default=0)


def find_index_buffers(spec: DecoderSpec, tokens: int, longest: int) -> dict[Buffer, int]:
    """Return the bytes of buffers for indexes, of which all layers' are alike."""
    if spec.index is not None and spec.index.pool:
        return find_pooled_buffers(runs_of(spec.index), tokens, longest)
    if spec.index is not None:
        return find_buffers(spec.index, tokens, longest)
    for layer in spec.layers:
        if layer.blocks is not None:
            return find_block_buffers(layer.blocks, spec.sizes(layer).kv_heads, tokens, longest)
        if layer.pooled is not None:
            return find_pooled_buffers(layer.pooled, tokens, longest)
    return {}


def _of_blocks(layer: LayerSpec) -> _OfBlocks | None:
    return layer.blocks or layer.pooled


def _indexes(spec: DecoderSpec) -> list[IndexSpec]:
    """Return the indexes of tokens of layers that have their own."""
    choosers = (layer for layer in spec.layers if layer.attends and layer.chooses)
    return [index for layer in choosers if (index := spec.index_of(layer)) is not None]
