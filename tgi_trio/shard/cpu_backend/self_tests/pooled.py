"""Self-test of the kernels of indexes of pooled keys, at every start that needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from tgi_trio.model.specs.pooled_index import PooledIndexSpec
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_POOLED
from tgi_trio.shard.cpu_backend.operations.pooled import (
    count_choice_bytes,
    find_pooled_buffers,
    find_pooled_room,
)
from tgi_trio.shard.cpu_backend.scratch_memory import count_score_bytes
from tgi_trio.shard.cpu_backend.self_tests.alone import run_alone
from tgi_trio.shard.cpu_backend.self_tests.index import of_index
from tgi_trio.shard.cpu_backend.self_tests.numbers import draw, pack_keys, to_floats
from tgi_trio.shard.cpu_backend.tables import BLOCKS, Buffer, Code, Form
from tgi_trio.shard.cpu_backend.variant import Variant

_SEEN: Final = (72, 47, 9)  # tokens that each sees, the last with itself; of one sequence each
_TOKENS, _LONGEST = len(_SEEN), max(_SEEN)
_TABLES: Final = np.array([[4, 0, 9, 2, 7], [3, 8, 6, 0, 0], [1] + [0] * 4], np.int32)
_BLOCKS, _BLOCK, _DIM, _SIZE = 10, 16, 32, 64  # `_SIZE`: of a head of attention
_KV: Final = 2  # KV heads, which attend to the same tokens
_INDEX: Final = PooledIndexSpec(heads=5, dim=_DIM, size=12, most=2)
_EPS: Final = 1e-6
_ERROR, _ROUNDED = 1e-4, 0.1  # the latter if products are of bfloat16


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    for code, work in (
        *((Code.POOL_KEYS, _pool), (Code.POOL_RUNS, _pool_runs)),
        *((Code.SCORE_POOLED, _score), (Code.ATTEND_POOLED, _attend)),
    ):
        # attention's own self-test covers 8-bit caches
        found, expected = work(replace(of_index(variant), cache=variant.kv))
        error = float(np.abs(found - expected).max())
        if not error < (_ROUNDED if variant.kv.bf16 else _ERROR):
            return f"{code.name} is {error:.2g} away from the reference"
    return None


def _pool(variant: Variant) -> tuple[Floats, Floats]:
    """Return the cached keys of the tokens, of which the first ends a block, then queries."""
    heads, place = _INDEX.heads, 32
    width = place + (heads + 1) * _DIM
    rows, gains, kept = draw(_TOKENS, width), draw(2, _DIM), draw(_BLOCKS * _BLOCK, _DIM)
    angles = draw(_LONGEST, _DIM // 2)
    cosines, sines = np.cos(angles), np.sin(angles)
    keys = to_bfloat16(kept) if variant.cache.bf16 else kept.copy()
    turns = np.zeros((_BLOCKS * _BLOCK, 3), np.int32)
    first = _SEEN[0] - _INDEX.size  # of the block that ends
    turns[_slot(0, first)] = first - 5  # as behind an image
    asked = np.full((_TOKENS, 1, _DIM, 16), np.nan, np.float32)
    held = {"query_norm": gains[0], "key_norm": gains[1], "order": np.arange(_DIM, dtype=np.int32)}
    held |= {"keys": keys, "values": turns, "cosines": cosines, "sines": sines}
    fields: dict[str, Any] = {name: address(array) for name, array in held.items()}
    fields |= {"width": width, "rotated": _DIM, "key_scale": 1.0}
    for code in (Code.ASK_POOLED, Code.POOL_KEYS):
        _run(variant, code, {Buffer.QKV: rows, Buffer.ASKED: asked}, fields, place)

    last = np.array(_SEEN) - 1
    own = rows[:, place:].reshape(_TOKENS, heads + 1, _DIM)
    before = [kept[_slot(0, first + i)] for i in range(_INDEX.size - 1)]
    pooled = np.mean([*before, own[0, heads]], axis=0)
    pooled = _turn(_normed(pooled) * gains[1], cosines[first - 5], sines[first - 5])
    queries = _normed(own[:, :heads]) * gains[0]
    expected = _turn(queries, cosines[last][:, None], sines[last][:, None])
    expected = np.concatenate([expected, own[:, heads:]], axis=1)
    expected[0, heads] = pooled
    slots = [_slot(row, seen - 1) for row, seen in enumerate(_SEEN)]
    if (turns[slots] != last[:, None]).any():
        return np.full(1, np.nan, np.float32), np.zeros(1, np.float32)
    found = asked[:, 0].swapaxes(1, 2)
    expected[2, :heads] = 0.0  # which asks for nothing
    found = np.concatenate([found[:, :heads], to_floats(keys)[slots][:, None]], axis=1)
    found[2, :heads] = 0.0
    return found, expected


def _pool_runs(variant: Variant) -> tuple[Floats, Floats]:
    """Return what is cached of the tokens, of which the first ends a run, then queries."""
    heads, place = _INDEX.heads, 32
    width = place + 3 * _DIM + heads
    rows, queries, gain = draw(_TOKENS, width), draw(_TOKENS, heads * _DIM), draw(2, _DIM)
    kept, bias = draw(_BLOCKS * _BLOCK, 2 * _DIM), draw(_INDEX.size, _DIM)
    keys = to_bfloat16(kept) if variant.cache.bf16 else kept.copy()
    asked = np.full((_TOKENS, 1, _DIM, 16), np.nan, np.float32)
    fields: dict[str, Any] = {"width": heads * _DIM, "inputs": width, "offset": place}
    fields |= {"keys": address(keys), "key_scale": 1.0, "source": Buffer.QKV, "kept": 2 * _DIM}
    own = fields | {"weights": address(gain[0]), "bias": address(gain[1])}
    buffers = {Buffer.PROJECTED: rows, Buffer.QKV: queries, Buffer.ASKED: asked}
    _run(variant, Code.ASK_RUNS, buffers, own)
    _run(variant, Code.POOL_RUNS, buffers, fields | {"bias": address(bias)})

    raw = rows[:, place : place + _DIM]
    raw = raw - raw.mean(-1, keepdims=True)
    gates = rows[:, place + _DIM + heads :][:, :_DIM]
    expected = np.concatenate([_normed(raw) * gain[0] + gain[1], gates], axis=1)
    first = _SEEN[0] - _INDEX.size
    run = [kept[_slot(0, first + i)] for i in range(_INDEX.size - 1)]
    key, weights = np.split(np.stack([*run, expected[0]]), 2, axis=1)
    weights = np.exp(weights + bias)
    expected[0, :_DIM] = (weights * key).sum(0) / weights.sum(0)
    slots = [_slot(row, seen - 1) for row, seen in enumerate(_SEEN)]
    found = asked[:2, 0, :, :heads].swapaxes(1, 2).reshape(2, -1)
    pairs = (to_floats(keys)[slots], expected), (found, queries[:2])
    both = [np.concatenate([each[i].reshape(-1) for each in pairs]) for i in range(2)]
    return both[0], both[1]


def _score(variant: Variant) -> tuple[Floats, Floats]:
    """Return the scores of the first token's runs, of heads with weights."""
    keys, asked = draw(_BLOCKS * _BLOCK, _DIM), np.zeros((_TOKENS, 1, _DIM, 16), np.float32)
    asked[:, :, :, : _INDEX.heads] = draw(_TOKENS, 1, _DIM, _INDEX.heads)
    rows = draw(_TOKENS, 8 + 16)
    kept = to_bfloat16(keys) if variant.kv.bf16 else keys
    room = find_pooled_buffers(_INDEX, _TOKENS, _LONGEST)[Buffer.SCORES]
    scores = allocate_zeroed((_TOKENS, room // (4 * _TOKENS)), np.float32)
    buffers = {Buffer.ASKED: asked, Buffer.SCORES: scores, Buffer.PROJECTED: rows}
    fields = {"keys": address(kept), "weights_at": 8, "weights_width": rows.shape[1]}
    _run(variant, Code.SCORE_POOLED, buffers, fields)
    whole = _SEEN[0] // _INDEX.size
    lasts = [_slot(0, (i + 1) * _INDEX.size - 1) for i in range(whole)]
    return scores[0, :whole], np.maximum(keys[lasts] @ asked[0, 0], 0.0) @ rows[0, 8:]


def _attend(variant: Variant) -> tuple[Floats, Floats]:
    """Return what heads read of the blocks that all operations choose; 0 where none are chosen.

    Scores are of whole numbers, among which are equals.
    """
    generator, heads = np.random.default_rng(5), 2 * _KV * variant.heads
    keys = generator.integers(-2, 3, (_BLOCKS * _BLOCK, _DIM)).astype(np.float32)
    asked = np.zeros((_TOKENS, 1, _DIM, 16), np.float32)
    asked[:, :, :2, : _INDEX.heads] = generator.integers(-2, 3, (_TOKENS, 1, 2, _INDEX.heads))
    both = [draw(_BLOCKS, _KV, _BLOCK, size) for size in (_SIZE, 2 * _SIZE)]
    queries = draw(_TOKENS, heads, _SIZE)
    read = allocate_zeroed((_TOKENS, heads, 2 * _SIZE), np.float32)
    rooms = find_pooled_buffers(_INDEX, _TOKENS, _LONGEST)
    buffers: dict[Buffer, Any] = {
        buffer: allocate_zeroed((size,)) for buffer, size in rooms.items()
    }
    stored = to_bfloat16(queries) if variant.query_bytes == 2 else queries
    buffers |= {Buffer.ASKED: asked, Buffer.QUERY: stored, Buffer.ATTENDED: read}
    kept = to_bfloat16(keys) if variant.kv.bf16 else keys
    packed = pack_keys(variant, both[0])
    values = to_bfloat16(both[1]) if variant.kv.bf16 else both[1]
    for code in (Code.SCORE_POOLED, Code.CHOOSE_POOLED):
        _run(variant, code, buffers, {"keys": address(kept)})
    fields = {"keys": address(packed), "values": address(values), "value_scale": 1.0}
    fields |= {"forms": Form.WIDE, "heads": heads, "kv_heads": _KV, "head_dim": _SIZE}
    _run(variant, Code.ATTEND_POOLED, buffers, fields | {"value_dim": 2 * _SIZE})

    expected = np.zeros_like(read)
    for row, seen in enumerate(_SEEN[:2]):
        whole = seen // _INDEX.size
        lasts = [_slot(row, (i + 1) * _INDEX.size - 1) for i in range(whole)]
        scores = np.maximum(keys[lasts] @ asked[row, 0], 0.0).sum(-1)
        best = np.sort(np.argsort(-scores, kind="stable")[: _INDEX.most])
        chosen = [unit * _INDEX.size + i for unit in best for i in range(_INDEX.size)]
        slots = [_slot(row, i) for i in (*chosen, *range(whole * _INDEX.size, seen))]
        for head in range(heads):
            key, value = (
                each[:, head * _KV // heads].reshape(-1, each.shape[-1])[slots] for each in both
            )
            weights = np.exp(key @ queries[row, head])
            expected[row, head] = weights / weights.sum() @ value
    return read, expected


def _normed(x: Floats) -> Floats:
    found: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPS)
    return found


def _turn(x: Floats, cosine: Floats, sine: Floats) -> Floats:
    first, second = np.split(x, 2, axis=-1)
    turned = [first * cosine - second * sine, first * sine + second * cosine]
    return np.concatenate(turned, axis=-1)


def _run(
    variant: Variant, code: Code, buffers: dict[Buffer, Any], fields: dict[str, Any], place: int = 0
) -> None:
    """Run one operation."""
    last, facts = np.array(_SEEN, np.int32) - 1, np.zeros((1,), BLOCKS)
    slots = np.array([_slot(row, seen - 1) for row, seen in enumerate(_SEEN)], np.int32)
    step: dict[str, Any] = {"positions": last, "turns": last, "lasts": last, "slots": slots}
    step |= {"tables": _TABLES, "rows": np.arange(_TOKENS, dtype=np.int32), "tokens": _TOKENS}
    step |= {"table_width": _TABLES.shape[1], "scores_bytes": count_score_bytes(_LONGEST)}
    facts["size"], facts["most"], facts["lists"] = _INDEX.size, _INDEX.most, 1
    facts["queries"], facts["key"] = place, place + _INDEX.heads * _DIM
    facts["choice_bytes"] = count_choice_bytes(_INDEX)
    facts["kept"], facts["weights"] = fields.pop("kept", _DIM), fields.pop("weights_at", 0)
    facts["weights_width"] = fields.pop("weights_width", 0)
    given: dict[str, Any] = {
        "heads": _INDEX.heads,
        "kv_heads": 1,
        "head_dim": _DIM,
        "target": Buffer.ATTENDED,
    }
    given |= {"most": (_INDEX.most + 1) * _INDEX.size - 1, "eps": _EPS, "facts": facts, **fields}
    room = find_pooled_room(_INDEX, given["heads"], _LONGEST)
    run_alone(RUN_POOLED.open(variant), code, buffers, given, step, room=room)


def _slot(row: int, place: int) -> int:
    """Return the slot of a token of a sequence."""
    return int(_TABLES[row, place // _BLOCK]) * _BLOCK + place % _BLOCK
