"""Self-test of the kernels of an index that chooses blocks, at every start that needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.specs.block_index import BlockIndexSpec
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_BLOCKS
from tgi_trio.shard.cpu_backend.operations.blocks import (
    count_choice_bytes,
    find_block_buffers,
    find_blocks_room,
)
from tgi_trio.shard.cpu_backend.scratch_memory import count_score_bytes
from tgi_trio.shard.cpu_backend.self_tests.alone import run_alone
from tgi_trio.shard.cpu_backend.self_tests.index import of_index
from tgi_trio.shard.cpu_backend.self_tests.numbers import draw, number_type, pack_keys, to_floats
from tgi_trio.shard.cpu_backend.tables import BLOCKS, Buffer, Code, Form
from tgi_trio.shard.cpu_backend.variant import Variant

_SEEN: Final = (87, 70, 9)  # tokens that each sees, the last with itself; of one sequence each
_TOKENS, _LONGEST = len(_SEEN), max(_SEEN)
_TABLES: Final = np.array([[4, 0, 9, 2, 7, 1], [3, 8, 6, 10, 5, 0], [11] + [0] * 5], np.int32)
_BLOCKS, _BLOCK, _DIM, _SIZE = 12, 16, 32, 64  # `_SIZE`: of a head of attention
_KV: Final = 2  # KV heads, each with a head of the index
_INDEX: Final = BlockIndexSpec(dim=_DIM, size=32, most=2, local=1)
_EPS: Final = 1e-6
_ERROR, _ROUNDED = 1e-4, 0.1  # the latter if products are of bfloat16


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    for code, work in ((Code.ASK_BLOCKS, _ask), (Code.ATTEND_BLOCKS, _attend)):
        # attention's own self-test covers 8-bit caches
        found, expected = work(replace(of_index(variant), cache=variant.kv))
        error = float(np.abs(found - expected).max())
        if not error < (_ROUNDED if variant.kv.bf16 else _ERROR):
            return f"{code.name} is {error:.2g} away from the reference"
    return None


def _ask(variant: Variant) -> tuple[Floats, Floats]:
    """Return cached keys, and the queries of those that see more than is chosen."""
    place, width = 32, 32 + (_KV + 1) * _DIM
    rows, gains = draw(_TOKENS, width), draw(2, _DIM)
    angles = draw(_LONGEST, _DIM // 2)
    cosines, sines = np.cos(angles), np.sin(angles)
    keys = allocate_zeroed((_BLOCKS, _BLOCK * _DIM), number_type(variant.cache.bf16))
    asked = allocate_zeroed((_TOKENS + 7, _KV, _DIM), number_type(variant.query_bytes == 2))
    held = {"query_norm": gains[0], "key_norm": gains[1], "order": np.arange(_DIM, dtype=np.int32)}
    held |= {"keys": keys, "cosines": cosines, "sines": sines}
    fields: dict[str, Any] = {name: address(array) for name, array in held.items()}
    fields |= {"width": width, "rotated": _DIM, "key_scale": 1.0}
    _run(variant, Code.ASK_BLOCKS, {Buffer.QKV: rows, Buffer.ASKED: asked}, fields, place)

    last = np.array(_SEEN) - 1
    heads = rows[:, place:].reshape(_TOKENS, _KV + 1, _DIM)
    heads = heads / np.sqrt((heads * heads).mean(-1, keepdims=True) + _EPS)
    heads = heads * gains[[0] * _KV + [1]]
    first, second = np.split(heads, 2, axis=-1)
    cosine, sine = cosines[last][:, None], sines[last][:, None]
    turned = [first * cosine - second * sine, first * sine + second * cosine]
    expected = np.concatenate(turned, axis=-1)
    expected[_SEEN.index(9), :_KV] = 0.0  # which asks for nothing
    slots = _slots()
    own = _panels(keys, _DIM)[slots // _BLOCK, slots % _BLOCK]
    return np.concatenate([to_floats(asked)[:_TOKENS], own[:, None]], axis=1), expected


def _attend(variant: Variant) -> tuple[Floats, Floats]:
    """Return what heads read of the blocks that all operations choose; 0 where none are chosen.

    Scores are of whole numbers, among which are equals.
    """
    generator, heads = np.random.default_rng(3), 2 * _KV * variant.heads
    keys = generator.integers(-2, 3, (_BLOCKS, _BLOCK, _DIM)).astype(np.float32)
    asked = np.zeros((_TOKENS + 7, _KV, _DIM), np.float32)
    asked[:_TOKENS, :, :2] = generator.integers(-2, 3, (_TOKENS, _KV, 2))
    both = [draw(_BLOCKS, _KV, _BLOCK, size) for size in (_SIZE, 2 * _SIZE)]
    queries = draw(_TOKENS, heads, _SIZE)
    read = allocate_zeroed((_TOKENS, heads, 2 * _SIZE), np.float32)
    rooms = find_block_buffers(_INDEX, _KV, _TOKENS, _LONGEST)
    buffers: dict[Buffer, Any] = {
        buffer: allocate_zeroed((size,)) for buffer, size in rooms.items()
    }
    stored = [to_bfloat16(each) if variant.query_bytes == 2 else each for each in (asked, queries)]
    buffers |= {Buffer.ASKED: stored[0], Buffer.QUERY: stored[1], Buffer.ATTENDED: read}
    packed, kept = pack_keys(variant, keys), pack_keys(variant, both[0])
    values = to_bfloat16(both[1]) if variant.kv.bf16 else both[1]
    for code in (Code.SCORE_BLOCKS, Code.CHOOSE_BLOCKS):
        _run(variant, code, buffers, {"keys": address(packed)})
    fields = {"keys": address(kept), "values": address(values), "value_scale": 1.0}
    fields |= {"forms": Form.WIDE, "heads": heads, "kv_heads": _KV, "head_dim": _SIZE}
    _run(variant, Code.ATTEND_BLOCKS, buffers, fields | {"value_dim": 2 * _SIZE})

    expected = np.zeros_like(read)
    for row, seen in enumerate(_SEEN[:2]):
        for head in range(heads):
            chooser = head * _KV // heads
            every = keys[_TABLES[row]].reshape(-1, _DIM) @ asked[row, chooser]
            every[seen:] = -np.inf
            best = every.reshape(-1, _INDEX.size).max(-1)
            best[(seen - 1) // _INDEX.size] = np.inf
            chosen = np.argsort(-best, kind="stable")[: _INDEX.most]
            places = (np.sort(chosen)[:, None] * _INDEX.size + np.arange(_INDEX.size)).reshape(-1)
            own = [each[_TABLES[row], chooser].reshape(-1, each.shape[-1]) for each in both]
            key, value = (each[places[places < seen]] for each in own)
            weights = np.exp(key @ queries[row, head])
            expected[row, head] = weights / weights.sum() @ value
    return read, expected


def _run(
    variant: Variant, code: Code, buffers: dict[Buffer, Any], fields: dict[str, Any], place: int = 0
) -> None:
    """Run one operation."""
    last, facts = np.array(_SEEN, np.int32) - 1, np.zeros((1,), BLOCKS)
    step: dict[str, Any] = {"positions": last, "turns": last, "lasts": last, "slots": _slots()}
    step |= {"tables": _TABLES, "rows": np.arange(_TOKENS, dtype=np.int32), "tokens": _TOKENS}
    step |= {"table_width": _TABLES.shape[1], "scores_bytes": count_score_bytes(_LONGEST)}
    facts["size"], facts["most"], facts["local"] = _INDEX.size, _INDEX.most, _INDEX.local
    facts["queries"], facts["key"] = place, place + _KV * _DIM
    facts["choice_bytes"], facts["lists"] = count_choice_bytes(_INDEX), _KV
    given: dict[str, Any] = {
        "heads": _KV,
        "kv_heads": 1,
        "head_dim": _DIM,
        "target": Buffer.ATTENDED,
    }
    given |= {"most": _INDEX.most * _INDEX.size, "eps": _EPS, "facts": facts, **fields}
    room = find_blocks_room(_INDEX, _KV, given["heads"], _LONGEST)
    run_alone(RUN_BLOCKS.open(variant), code, buffers, given, step, room=room)


def _slots() -> NDArray[np.int32]:
    """Return the slot of each sequence's last token, int32 [T]."""
    places = np.array(_SEEN) - 1
    blocks = _TABLES[np.arange(_TOKENS), places // _BLOCK]
    return np.asarray(blocks * _BLOCK + places % _BLOCK, np.int32)


def _panels(keys: NDArray[Any], size: int) -> Floats:
    """Return the keys [blocks, 16, size] of such panels."""
    step = 2 if keys.dtype == np.uint16 else 1
    return (
        to_floats(keys).reshape(_BLOCKS, -1, _BLOCK, step).swapaxes(1, 2).reshape(_BLOCKS, 16, size)
    )
