"""Self-test of the kernels of n-gram embeddings, at every start that needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.machine_code.entry import RUN_NGRAMS
from tgi_trio.shard.cpu_backend.operations.states import by_lanes
from tgi_trio.shard.cpu_backend.packing import to_storage
from tgi_trio.shard.cpu_backend.self_tests.alone import run_alone
from tgi_trio.shard.cpu_backend.self_tests.numbers import draw
from tgi_trio.shard.cpu_backend.tables import NGRAMS, OF_NGRAMS, Buffer, Code, Form
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed

_SIZE, _COUNT, _EPS, _ORDER, _TAPS = 32, 2, 1e-5, 3, 2
_END: Final = 1  # ends a text
_FACTORS: Final = (2**50 + 1, 2**49 + 3, 2**48 + 5)
_ROWS: Final = (11, 13, 17, 19)  # of two heads for each length
_FIRSTS, _PART = np.cumsum((0, *_ROWS[:-1])), 16  # rows of a part of the table
_NUMBERS = 16  # of a row
# A sequence begins; another goes on behind two tokens, which are in slot 2.
_TEXTS: Final = ((5, 9, _END, 7, 6), (8, 4))
_BEFORE: Final = ((_END, _END), (_END, 3))
_STARTS, _READS, _WRITES = (np.array(each, np.int32) for each in ((0, 5, 7), (-1, 2), (1, 2)))
_TOKENS = int(_STARTS[-1])
_BACK = (_TAPS - 1) * _ORDER  # inputs of the convolution before a token


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    table = draw(sum(_ROWS), _NUMBERS)
    width = len(_ROWS) * _NUMBERS
    both, streams = draw(_TOKENS, _COUNT + 1, _SIZE), draw(_TOKENS, _COUNT, _SIZE)
    norms, kernel = draw(3, _COUNT, _SIZE), draw(_COUNT * _SIZE, _TAPS)
    tails = np.zeros((3, _COUNT * _SIZE, _BACK), np.float32)
    tails[2] = draw(_COUNT * _SIZE, _BACK)
    last = np.zeros((3, _ORDER - 1), np.int32)
    last[2] = _BEFORE[1]

    found = _hash()
    gated, normed = _weigh(both, streams, norms)
    spread, ends = _spread(normed.reshape(_TOKENS, -1), kernel, tails)
    expected = {
        Code.HASH: found,
        Code.LOOK_UP: table[found].reshape(_TOKENS, width),
        Code.WEIGH: np.concatenate([(streams + gated), normed], axis=1),
        Code.SPREAD_OUT: streams + spread.reshape(streams.shape),
    }
    parts = [to_storage(table[i : i + _PART], variant.kv.bf16) for i in range(0, len(table), _PART)]
    facts = {"norms": norms, "kernel": np.ascontiguousarray(by_lanes(kernel))}
    facts["parts"] = np.array([address(part) for part in parts])
    laid = by_lanes(tails.reshape(-1, _BACK)).reshape(3, -1).copy()
    for code in OF_NGRAMS:
        rows: dict[Buffer, Any] = {Buffer.STREAMS: streams.copy()}
        rows[Buffer.PROJECTED] = both.copy()
        rows |= {
            Buffer.FOUND: found.copy(),
            Buffer.UNSORTED: np.zeros((_TOKENS, width), np.float32),
        }
        if code == Code.HASH:
            rows[Buffer.FOUND][:] = -1
        if code == Code.SPREAD_OUT:
            rows[Buffer.PROJECTED][:, :_COUNT] = normed
        _run(variant, code, facts, rows, last if code == Code.HASH else laid)
        own: dict[Code, Any] = {Code.HASH: rows[Buffer.FOUND], Code.LOOK_UP: rows[Buffer.UNSORTED]}
        shown = rows[Buffer.STREAMS], rows[Buffer.PROJECTED][:, :_COUNT]
        own |= {Code.WEIGH: np.concatenate(shown, axis=1), Code.SPREAD_OUT: shown[0]}
        error = float(np.abs(own[code] - expected[code]).max())
        if not error < 1e-4:
            return f"{code.name} is {error:.2g} away from the reference"
    states = by_lanes(ends.reshape(-1, _BACK)).reshape(2, -1)
    tokens = [(7, 6), (8, 4)]
    if (last[1:] != tokens).any() or not np.allclose(laid[1:], states, atol=1e-5):
        return "what they keep of a sequence is not its end"
    return None


def _hash() -> NDArray[np.int64]:
    """Return the rows of the table for each token, int64 [T, heads]."""
    found = []
    for text, before in zip(_TEXTS, _BEFORE, strict=True):
        every = (*before, *text)
        for t in range(len(before), len(every)):
            own, own_rows = [every[t]], []
            for back in (1, 2):
                ended = _END in own[1:] or every[t - back] == _END
                own.append(_END if ended else every[t - back])
                hashed = 0
                for token, factor in zip(own, _FACTORS, strict=False):
                    hashed ^= token * factor
                for head in (2 * back - 2, 2 * back - 1):
                    own_rows.append(hashed % _ROWS[head] + int(_FIRSTS[head]))
            found.append(own_rows)
    return np.array(found)


def _weigh(both: Floats, streams: Floats, norms: Floats) -> tuple[Floats, Floats]:
    """Return gated values and their norm, [T, count, size] each."""
    query, key, last = norms
    product = (_normed(both[:, :_COUNT]) * key * _normed(streams) * query).sum(-1) / _SIZE**0.5
    root = np.sqrt(np.maximum(np.abs(product), 1e-6)) * np.sign(product)
    gated = both[:, _COUNT:] / (1.0 + np.exp(-root))[:, :, None]
    return gated, _normed(gated) * last


def _normed(x: Floats) -> Floats:
    found: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPS)
    return found


def _spread(inputs: Floats, kernel: Floats, tails: Floats) -> tuple[Floats, Floats]:
    """Return what is added [T, channels], and sequences' last inputs [2, channels, before]."""
    parts, ends = [], []
    for row, slot in enumerate(np.maximum(_READS, 0)):  # slot 0 has zeros
        own = inputs[_STARTS[row] : _STARTS[row + 1]]
        every = np.concatenate([tails[slot].T, own])
        ends.append(every[-_BACK:].T)
        back = [every[tap * _ORDER :][: len(own)] for tap in range(_TAPS)]
        sums = sum(part * weight for part, weight in zip(back, kernel.T, strict=True))
        parts.append(sums / (1.0 + np.exp(-sums)))
    return np.concatenate(parts), np.stack(ends)


def _run(
    variant: Variant,
    code: Code,
    given: Mapping[str, NDArray[Any]],
    rows: Mapping[Buffer, NDArray[Any]],
    states: NDArray[Any],
) -> None:
    """Run one operation; activations go to UNSORTED."""
    ids, facts = np.array(sum(_TEXTS, ()), np.int32), np.zeros((1,), NGRAMS)
    numbers = {"factors": _FACTORS, "rows": _ROWS, "firsts": _FIRSTS}
    held = {name: np.array(own, np.int64) for name, own in numbers.items()}
    for name, own in held.items():
        facts[name] = address(own)
    facts["order"], facts["heads"], facts["end"], facts["taps"] = _ORDER, len(_ROWS), _END, _TAPS
    facts["parts"], facts["part_rows"] = address(given["parts"]), _PART
    facts["size"], facts["count"], facts["kernel"] = _NUMBERS, _COUNT, address(given["kernel"])
    names = ("query_norm", "key_norm", "kernel_norm")
    for name, own in zip(names, given["norms"], strict=True):
        facts[name] = address(own)
    step = {"tokens": _TOKENS, "row_count": 2, "token_ids": ids, "row_starts": _STARTS}
    step |= {"state_reads": _READS, "state_writes": _WRITES}
    fields = {"facts": facts, "eps": _EPS, "forms": Form.WIDE, "target": Buffer.UNSORTED}
    fields |= {"width": len(_ROWS) * _NUMBERS if code == Code.LOOK_UP else _SIZE}
    fields |= {"inputs": (_COUNT + 1) * _SIZE, "states": states, "state_bytes": states[0].nbytes}
    run_alone(RUN_NGRAMS.open(narrowed(variant)), code, rows, fields, step)
