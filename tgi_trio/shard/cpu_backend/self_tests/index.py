"""Self-test of the kernels of an index that chooses tokens, at every start that needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.specs.decoder import IndexSpec, RotarySpec
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_INDEX
from tgi_trio.shard.cpu_backend.operations.index import find_room, order_of
from tgi_trio.shard.cpu_backend.scratch_memory import count_score_bytes
from tgi_trio.shard.cpu_backend.self_tests.alone import run_alone
from tgi_trio.shard.cpu_backend.self_tests.numbers import draw, number_type, pack_keys, to_floats
from tgi_trio.shard.cpu_backend.tables import Buffer, Code, Form
from tgi_trio.shard.cpu_backend.variant import Variant

_TOKENS: Final = 3
_SEEN: Final = (41, 9, 7)  # tokens that each sees, the last with itself; of one sequence each
_TABLES: Final = np.array([[4, 0, 2], [1, 0, 0], [3, 0, 0]], np.int32)
_BLOCKS, _BLOCK, _MOST, _SIZE, _LATENT = 5, 16, 7, 32, 64
_INDEX: Final = IndexSpec(
    heads=3, dim=_SIZE, most=_MOST, rotary=RotarySpec(dim=_SIZE, interleaved=True)
)
_EPS: Final = 1e-6
_ERROR, _ROUNDED = 1e-4, 0.1  # the latter if products are of bfloat16


def of_index(variant: Variant) -> Variant:
    """Return the variant for these kernels, whose weights are never int8."""
    return replace(variant, weights=variant.kv, tokens=1)


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    plain = replace(variant, cache=variant.kv)  # attention's own self-test covers 8-bit caches
    for name, work in (("ASK", _ask), ("CHOOSE", _choose), ("ATTEND_CHOSEN", _attend)):
        found, expected = work(plain)
        error = float(np.abs(found - expected).max())
        if not error < (_ROUNDED if variant.kv.bf16 else _ERROR):
            return f"{name} is {error:.2g} away from the reference"
    return None


def _ask(variant: Variant) -> tuple[Floats, Floats]:
    """Return the cached keys and the rotated queries of the token that asks."""
    heads, place = _INDEX.heads, 32
    width = place + _SIZE + heads
    rows, queries = draw(_TOKENS, width), draw(_TOKENS, heads * _SIZE)
    gain, bias, angles = draw(_SIZE), draw(1, _SIZE)[0], draw(max(_SEEN), _SIZE // 2)
    cosines, sines = np.cos(angles), np.sin(angles)
    keys = allocate_zeroed((_BLOCKS, _BLOCK * _SIZE), number_type(variant.kv.bf16))
    held = {"weights": gain, "bias": bias, "order": order_of(_INDEX), "keys": keys}
    held |= {"cosines": cosines, "sines": sines}
    fields: dict[str, Any] = {name: address(array) for name, array in held.items()}
    fields |= {"inputs": width, "offset": place, "width": heads * _SIZE, "rotated": _SIZE}
    asked = allocate_zeroed((_TOKENS + 7, heads, _SIZE), number_type(variant.query_bytes == 2))
    buffers = {Buffer.PROJECTED: rows, Buffer.QKV: queries, Buffer.ASKED: asked}
    _run(variant, Code.ASK, buffers, fields | {"source": Buffer.QKV})

    key = rows[:, place : place + _SIZE]
    key = key - key.mean(-1, keepdims=True)
    key = key / np.sqrt((key * key).mean(-1, keepdims=True) + _EPS) * gain + bias
    last = np.array(_SEEN) - 1
    turns = cosines[last], sines[last]
    found = [_panels(variant, keys)[slot // _BLOCK, slot % _BLOCK] for slot in _slots(last)]
    expected = [_turned(key, *turns)]
    for row in np.flatnonzero(last >= _MOST):  # others see no more than is chosen
        found.append(to_floats(asked)[row])
        own = queries[row].reshape(heads, _SIZE)
        expected.append(_turned(own, *(each[row] for each in turns)))
    return _joined(found), _joined(expected)


def _choose(variant: Variant) -> tuple[Floats, Floats]:
    """Return the choices of those that see more, out of whole numbers, among which are equals."""
    generator, heads = np.random.default_rng(3), _INDEX.heads
    keys = generator.integers(-2, 3, (_BLOCKS, _BLOCK, _SIZE)).astype(np.float32)
    asked = np.zeros((_TOKENS + 7, heads, _SIZE), np.float32)
    asked[:_TOKENS, :, :2] = generator.integers(-2, 3, (_TOKENS, heads, 2))
    rows = generator.integers(-2, 3, (_TOKENS, _SIZE + heads)).astype(np.float32)
    packed = pack_keys(variant, keys)
    stored = to_bfloat16(asked) if variant.query_bytes == 2 else asked
    bytes_ = count_score_bytes(max(_SEEN))
    scores = allocate_zeroed((_TOKENS, bytes_ // 4), np.float32)
    choice = allocate_zeroed((_TOKENS, _MOST), np.int32)
    buffers = {Buffer.PROJECTED: rows, Buffer.ASKED: stored}
    buffers |= {Buffer.SCORES: scores, Buffer.CHOICE: choice}
    fields = {"inputs": rows.shape[1], "keys": address(packed)}
    for code in (Code.SCORE, Code.CHOOSE):
        _run(variant, code, buffers, fields)
    expected = np.zeros_like(choice)
    for row, seen in enumerate(_SEEN):
        if seen > _MOST:
            own = keys[_TABLES[row]].reshape(-1, _SIZE)[:seen]
            found = np.maximum(asked[row] @ own.T, 0.0).T @ rows[row, _SIZE:]
            expected[row] = np.sort(np.argsort(-found, kind="stable")[:_MOST])
    return choice.astype(np.float32), expected.astype(np.float32)


def _attend(variant: Variant) -> tuple[Floats, Floats]:
    """Return what heads read of chosen latents; 0 where nothing is chosen."""
    heads = 2 * variant.heads
    values, queries = draw(_BLOCKS, _BLOCK, _LATENT), draw(_TOKENS, heads, _LATENT)
    choice = np.zeros((_TOKENS, _MOST), np.int32)
    choice[0], choice[1] = (0, 3, 15, 16, 20, 33, 40), (0, 1, 2, 4, 5, 7, 8)
    stored = to_bfloat16(queries) if variant.query_bytes == 2 else queries
    kept = to_bfloat16(values) if variant.kv.bf16 else values
    read = allocate_zeroed((_TOKENS, heads, _LATENT), np.float32)
    buffers = {Buffer.QUERY: stored, Buffer.CHOICE: choice, Buffer.ATTENDED: read}
    fields = {"values": address(kept), "value_scale": 1.0, "forms": Form.WIDE}
    fields |= {"heads": heads, "head_dim": _LATENT, "value_dim": _LATENT}
    _run(variant, Code.ATTEND_CHOSEN, buffers, fields)
    expected = np.zeros_like(read)
    for row in (0, 1):
        own = values[_TABLES[row]].reshape(-1, _LATENT)[choice[row]]
        scores = queries[row] @ own.T
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected[row] = weights / weights.sum(-1, keepdims=True) @ own
    return read, expected


def _run(variant: Variant, code: Code, buffers: dict[Buffer, Any], fields: dict[str, Any]) -> None:
    """Run one operation."""
    last = np.array(_SEEN, np.int32) - 1
    step: dict[str, Any] = {"positions": last, "turns": last, "lasts": last, "slots": _slots(last)}
    step |= {"tables": _TABLES, "rows": np.arange(_TOKENS, dtype=np.int32), "tokens": _TOKENS}
    step |= {"table_width": _TABLES.shape[1], "scores_bytes": count_score_bytes(max(_SEEN))}
    given: dict[str, Any] = {
        "heads": _INDEX.heads,
        "kv_heads": 1,
        "head_dim": _SIZE,
        "eps": _EPS,
        "most": _MOST,
    }
    given |= {"key_scale": 1.0, "target": Buffer.ATTENDED, **fields}
    room = find_room(given["heads"], _INDEX, _LATENT, max(_SEEN))
    run_alone(RUN_INDEX.open(of_index(variant)), code, buffers, given, step, room=room)


def _slots(places: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return the slot of each sequence's token at a place, int32 [T]."""
    blocks = _TABLES[np.arange(_TOKENS), places // _BLOCK]
    return np.asarray(blocks * _BLOCK + places % _BLOCK, np.int32)


def _panels(variant: Variant, keys: NDArray[Any]) -> Floats:
    """Return the keys [blocks, 16, size] of such panels."""
    parts = to_floats(keys).reshape(_BLOCKS, -1, _BLOCK, variant.kv.step).swapaxes(1, 2)
    return parts.reshape(_BLOCKS, _BLOCK, _SIZE)


def _turned(x: Floats, cosines: Floats, sines: Floats) -> Floats:
    """Rotate pairs of neighbours; return all first elements, then all second ones."""
    first, second = x[..., ::2], x[..., 1::2]
    parts = first * cosines - second * sines, first * sines + second * cosines
    return np.concatenate(parts, axis=-1)


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate([part.reshape(-1) for part in parts])
