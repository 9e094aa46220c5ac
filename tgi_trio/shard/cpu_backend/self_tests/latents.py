"""Self-test of the kernels around latent attention, at every start that needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tgi_trio.model.specs.decoder import RotarySpec
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.head_order import head_order
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_LATENTS
from tgi_trio.shard.cpu_backend.operations.latents import pack_heads
from tgi_trio.shard.cpu_backend.self_tests.alone import run_alone
from tgi_trio.shard.cpu_backend.self_tests.numbers import draw, number_type, to_floats
from tgi_trio.shard.cpu_backend.tables import LATENT, Buffer, Code, Form
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed
from tgi_trio.shard.cpu_backend.weight_layout import SPARE_ROWS

_TOKENS, _HEADS, _PLAIN, _TURNED, _RANK, _VALUE = 3, 2, 32, 32, 64, 96
# some more rows, since a tile may read beyond the last one
_SIZE, _ROOM = _RANK + _TURNED, _TOKENS + SPARE_ROWS
_POSITIONS, _EPS, _SCALE = (5, 0, 2), 1e-6, 0.5
_ERROR = 1e-4
_ROUNDED = 0.1  # if products are of bfloat16


def of_latents(variant: Variant) -> Variant:
    """Return the variant for these kernels, whose weights are never int8."""
    return replace(narrowed(variant), weights=variant.kv, cache=variant.cache)


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    plain = replace(variant, cache=variant.kv)  # attention's own self-test covers 8-bit caches
    tests = (("COMPRESS", _compress), ("TURN", _turn), ("ABSORB", _absorb), ("EXPAND", _expand))
    for name, work in tests:
        found, expected = work(plain if name == "TURN" else variant)
        error = float(np.abs(found - expected).max())
        if not error < (_ROUNDED if variant.kv.bf16 else _ERROR):
            return f"{name} is {error:.2g} away from the reference"
    return None


def _compress(variant: Variant) -> tuple[Floats, Floats]:
    rows, gain = draw(_TOKENS, 96), draw(_RANK)
    unsorted = allocate_zeroed((_ROOM, 2 * _RANK), np.float32)
    buffers = {Buffer.PROJECTED: rows, Buffer.UNSORTED: unsorted}
    fields = {"inputs": 96, "width": _RANK, "weights": address(gain), "forms": Form.WIDE}
    fields["outputs"] = 2 * _RANK
    _run(variant, Code.COMPRESS, buffers, Buffer.PROJECTED, Buffer.MIXED, fields)
    own = rows[:, :_RANK]
    return unsorted[:_TOKENS], np.concatenate((_normed(own, gain), own), axis=1)


def _turn(variant: Variant) -> tuple[Floats, Floats]:
    """Return split queries and the cache of keys, in which every token has its own block."""
    width, place = _HEADS * (_PLAIN + _TURNED), 32
    queries, rows = draw(_TOKENS, width), draw(_TOKENS, place + _SIZE)
    gain, angles = draw(_RANK), draw(8, _TURNED // 2)
    cosines, sines = np.cos(angles), np.sin(angles)
    kind = of_latents(variant)
    parts, turned = (
        allocate_zeroed((_ROOM, _HEADS * size), number_type(half))
        for size, half in ((_PLAIN, kind.dot), (_SIZE, kind.query_bytes == 2))
    )
    keys, values = (
        allocate_zeroed((_TOKENS, 16, _SIZE), number_type(kind.kv.bf16)) for _ in range(2)
    )
    slots, positions = (np.array(each, np.int32) for each in (range(0, 48, 16), _POSITIONS))
    order = head_order(RotarySpec(dim=_TURNED, interleaved=True), _TURNED)
    facts = np.zeros((1,), LATENT)
    facts["rank"], facts["plain_dim"], facts["rotary_dim"] = _RANK, _PLAIN, _TURNED
    facts["query_width"], facts["place"] = width, place
    held = {"weights": gain, "order": order, "facts": facts, "keys": keys, "values": values}
    held |= {"cosines": cosines, "sines": sines}
    fields: dict[str, Any] = {name: address(array) for name, array in held.items()}
    fields |= {"inputs": place + _SIZE, "scale": _SCALE, "rotated": _TURNED}
    fields |= {"key_scale": 1.0, "value_scale": 1.0}
    buffers = {Buffer.QKV: queries, Buffer.PROJECTED: rows}
    buffers |= {Buffer.MIXED: parts, Buffer.QUERY: turned}
    step = {"slots": address(slots), "turns": address(positions), "positions": address(positions)}
    _run(variant, Code.TURN, buffers, Buffer.QKV, Buffer.MIXED, fields, step)

    split = queries.reshape(_TOKENS, _HEADS, -1)
    turn = np.stack((cosines, sines))[:, list(_POSITIONS)]
    expected = [
        split[:, :, :_PLAIN] * _SCALE,
        _turned(split[:, :, _PLAIN:], turn[:, :, None]) * _SCALE,
        _normed(rows[:, place : place + _RANK], gain),
        _turned(rows[:, place + _RANK :], turn),
    ]
    found = [
        to_floats(parts)[:_TOKENS],
        to_floats(turned)[:_TOKENS].reshape(_TOKENS, _HEADS, _SIZE)[:, :, _RANK:],
        to_floats(values)[:, 0, :_RANK],
        to_floats(values)[:, 0, _RANK:],
    ]
    return _joined(found), _joined(expected)


def _absorb(variant: Variant) -> tuple[Floats, Floats]:
    return _multiply(variant, Code.ABSORB, _PLAIN, _RANK, _PLAIN)


def _expand(variant: Variant) -> tuple[Floats, Floats]:
    return _multiply(variant, Code.EXPAND, _RANK, _VALUE, _SIZE)


def _multiply(
    variant: Variant, code: Code, inputs: int, outputs: int, span: int
) -> tuple[Floats, Floats]:
    """Return products of each head with its own matrix."""
    kind = of_latents(variant)
    x, matrices = draw(_ROOM, _HEADS, span), draw(_HEADS, inputs, outputs)
    rows = to_bfloat16(x) if kind.dot else x
    packed = pack_heads(matrices, bf16=kind.kv.bf16)
    absorbs = code == Code.ABSORB
    source = Buffer.MIXED if absorbs else Buffer.ATTENDED
    target = Buffer.QUERY if absorbs else Buffer.MIXED
    half = absorbs and kind.query_bytes == 2
    made = allocate_zeroed((_TOKENS, _HEADS, _SIZE if absorbs else outputs), number_type(half))
    fields = {"inputs": inputs, "outputs": outputs, "span": span, "weights": address(packed)}
    fields["forms"] = Form.WIDE
    _run(variant, code, {source: rows, target: made}, source, target, fields)
    found = to_floats(made)[:, :, :outputs]
    expected = np.einsum("thi,hio->tho", x[:_TOKENS, :, :inputs], matrices)
    return found, np.asarray(expected, np.float32)


def _run(
    variant: Variant,
    code: Code,
    buffers: dict[Buffer, Any],
    source: Buffer,
    target: Buffer,
    fields: dict[str, Any],
    facts: dict[str, int] | None = None,
) -> None:
    """Run one operation; `facts`: fields of the step."""
    given: dict[str, Any] = {"heads": _HEADS, "kv_heads": 1, "head_dim": _SIZE, "value_dim": _SIZE}
    given |= {"source": source, "target": target, "eps": _EPS, **fields}
    step = {"tokens": _TOKENS, **(facts or {})}
    run_alone(RUN_LATENTS.open(of_latents(variant)), code, buffers, given, step, room=8192)


def _normed(x: Floats, gain: Floats) -> Floats:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + _EPS) * gain, np.float32)


def _turned(x: Floats, turn: Floats) -> Floats:
    """Rotate pairs of neighbours; return all first elements, then all second ones."""
    first, second = x[..., ::2], x[..., 1::2]
    parts = first * turn[0] - second * turn[1], first * turn[1] + second * turn[0]
    return np.concatenate(parts, axis=-1)


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate([part.reshape(-1) for part in parts])
