"""Self-test of the kernels of recurrent states, at every start of a model with such states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import KEEP_STATES
from tgi_trio.shard.cpu_backend.self_tests.alone import run_alone
from tgi_trio.shard.cpu_backend.tables import MIXER, Buffer, Code, Form
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL, Storage

_STARTS = (0, 3, 5, 6)  # of three rows
_READS, _WRITES = (-1, 1, 4), (2, 3, 0)  # the first row begins a sequence
_SLOTS, _SIZE, _TAPS = 5, 64, 3
_WIDTH = 3 * _SIZE + PANEL  # queries, keys, values; inputs of time steps
_BETA, _DECAY = 3 * _SIZE, 3 * _SIZE + 1
_ERROR = 1e-4


def of_states(variant: Variant) -> Variant:
    """Return the variant for states: float32, for any weights."""
    return narrowed(replace(variant, weights=Storage("float32")))


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    for name, work, choices in (
        *(("CONVOLVE", _convolve, 2), ("RECUR", _recur, 4)),
        *(("SCAN", _scan, 1), ("BLEND", _blend, 1)),
    ):
        for choice in range(choices):
            found, expected = work(variant, choice)
            error = float(np.abs(found - expected).max())
            if not error < _ERROR:
                return f"{name} is {error:.2g} away from the reference"
    return None


def _convolve(variant: Variant, bias: int) -> tuple[Floats, Floats]:
    """Return outputs and new states, of the kernels and of numpy."""
    draw = np.random.default_rng(3)
    x, states = _draw(draw, (_STARTS[-1], _WIDTH)), _draw(draw, (_SLOTS, _TAPS - 1, _SIZE))
    kernel, biases = _draw(draw, (_TAPS, _SIZE)), _draw(draw, (_SIZE,)) * bias
    expected, behind = x.copy(), states.copy()
    for row in range(len(_READS)):
        before = np.zeros_like(states[0]) if _READS[row] < 0 else states[_READS[row]]
        part = slice(_STARTS[row], _STARTS[row + 1])
        joined = np.concatenate((before, x[part, :_SIZE]))
        for i in range(len(joined) - _TAPS + 1):
            y = (joined[i : i + _TAPS] * kernel).sum(0) + biases
            expected[_STARTS[row] + i, :_SIZE] = y / (1 + np.exp(-y))
        behind[_WRITES[row]] = joined[-_TAPS + 1 :]
    facts = np.zeros((1,), MIXER)
    packed, weights = _by_lanes(states), _by_lanes(kernel)
    facts["channels"], facts["taps"], facts["kernel"] = _SIZE, _TAPS, address(weights)
    facts["bias"] = address(biases) if bias else 0
    _run(variant, Code.CONVOLVE, facts, x, packed)
    return _joined(x, packed), _joined(expected, _by_lanes(behind))


def _recur(variant: Variant, choice: int) -> tuple[Floats, Floats]:
    """The same for outputs and matrices: one head, two blocks of columns; Mamba-2, a delta rule,
    one with a decay per channel, and one whose decays have a bound.
    """
    corrects, by_channel, bound = int(choice > 0), choice > 1, -5.0 * (choice == 3)
    draw = np.random.default_rng(4)
    x, states = _draw(draw, (_STARTS[-1], _WIDTH)), _draw(draw, (_SLOTS, _SIZE, _SIZE))
    rate, decay_bias, skip = np.array([[-0.7], [0.3], [1.5]], np.float32)
    forgets, biases = _draw(draw, (_STARTS[-1], _SIZE)), _draw(draw, (_SIZE,))
    expected, behind = x.copy(), states.copy()
    for row in range(len(_READS)):
        state = np.zeros_like(states[0]) if _READS[row] < 0 else states[_READS[row]].copy()
        for t in range(_STARTS[row], _STARTS[row + 1]):
            query, key, value = np.split(x[t, : 3 * _SIZE], 3)
            pace = np.log1p(np.exp(x[t, _DECAY] + decay_bias))
            channels = (forgets[t] + biases)[:, None]
            if bound:
                state *= np.exp(bound / (1 + np.exp(rate * channels)))
            else:
                state *= np.exp(rate * (np.log1p(np.exp(channels)) if by_channel else pace))
            if corrects:
                query, key = (v / np.sqrt((v * v).sum() + 1e-6) for v in (query, key))
                query = query / np.sqrt(np.float32(_SIZE))
                beta = 2.0 / (1 + np.exp(-x[t, _BETA]))
                state += np.outer(key, beta * (value - key @ state))
            else:
                state += np.outer(key, pace * value)
            expected[t, 2 * _SIZE : 3 * _SIZE] = query @ state + skip * value * (1 - corrects)
        behind[_WRITES[row]] = state
    facts = np.zeros((1,), MIXER)
    facts["heads"], facts["sharing"], facts["key_heads"] = 1, 1, 1
    facts["key_dim"], facts["value_dim"] = _SIZE, _SIZE
    facts["key"], facts["value"], facts["beta"], facts["decay"] = _SIZE, 2 * _SIZE, _BETA, _DECAY
    facts["rate"] = address(rate)
    facts["decay_bias"] = address(biases if by_channel else decay_bias)
    facts["by_channel"], facts["least_decay"] = by_channel, bound
    facts["skip"] = 0 if corrects else address(skip)
    facts["corrects"], facts["beta_scale"], facts["most_step"] = corrects, 2.0, np.inf
    # Blocks of 32 columns are stored one after the other.
    packed = _blocks(states)
    _run(variant, Code.RECUR, facts, x, packed, forgets)
    return _joined(x, packed), _joined(expected, _blocks(behind))


def _scan(variant: Variant, choice: int) -> tuple[Floats, Floats]:
    """The same for channels with several numbers; time steps, b and c are in DECAYS."""
    draw, numbers = np.random.default_rng(5), LANES
    x, states = _draw(draw, (_STARTS[-1], _WIDTH)), _draw(draw, (_SLOTS, numbers, _SIZE))
    told, rate = _draw(draw, (_STARTS[-1], _SIZE + 2 * numbers)), _draw(draw, (numbers, _SIZE))
    rate = -np.exp(rate)
    bias, skip = _draw(draw, (_SIZE,)), _draw(draw, (_SIZE,))
    says, behind = np.zeros((_STARTS[-1], _SIZE), np.float32), states.copy()
    for row in range(len(_READS)):
        state = np.zeros_like(states[0]) if _READS[row] < 0 else states[_READS[row]].copy()
        for t in range(_STARTS[row], _STARTS[row + 1]):
            own, gate = x[t, :_SIZE], x[t, _SIZE : 2 * _SIZE]
            pace = np.log1p(np.exp(told[t, :_SIZE] + bias))
            b, c = np.split(told[t, _SIZE:], 2)
            state = state * np.exp(pace * rate) + np.outer(b, pace * own)
            says[t] = (c @ state + skip * own) * gate / (1 + np.exp(-gate))
        behind[_WRITES[row]] = state
    facts = np.zeros((1,), MIXER)
    packed, rates = _by_lanes(states), _by_lanes(rate)
    facts["channels"], facts["key_dim"], facts["gate"] = _SIZE, numbers, _SIZE
    facts["decays_width"], facts["key"], facts["query"] = told.shape[1], _SIZE, _SIZE + numbers
    facts["rate"], facts["decay_bias"], facts["skip"] = (
        address(each) for each in (rates, bias, skip)
    )
    found = _run(variant, Code.SCAN, facts, x, packed, told)
    return _joined(found, packed), _joined(says, _by_lanes(behind))


def _blend(variant: Variant, choice: int) -> tuple[Floats, Floats]:
    """The same for channels with one number, in two heads; gates are in DECAYS."""
    draw, half = np.random.default_rng(6), _SIZE // 2
    x, states = _draw(draw, (_STARTS[-1], _WIDTH)), _draw(draw, (_SLOTS, _SIZE))
    gates, rate = _draw(draw, (_STARTS[-1], 2, 2, half)), -np.exp(_draw(draw, (_SIZE,)))
    expected, behind = x.copy(), states.copy()
    opened = 1 / (1 + np.exp(-gates.swapaxes(1, 2).reshape(len(x), 2, _SIZE)))
    for row in range(len(_READS)):
        state = np.zeros_like(states[0]) if _READS[row] < 0 else states[_READS[row]]
        for t in range(_STARTS[row], _STARTS[row + 1]):
            decay = np.exp(rate * opened[t, 1])
            first = _READS[row] < 0 and t == _STARTS[row]
            share = 1.0 if first else np.sqrt(1 - decay * decay)
            state = decay * state + share * opened[t, 0] * x[t, _SIZE : 2 * _SIZE]
            expected[t, _SIZE : 2 * _SIZE] = state
        behind[_WRITES[row]] = state
    facts = np.zeros((1,), MIXER)
    packed = states.copy()
    facts["channels"], facts["first"], facts["head_dim"] = _SIZE, _SIZE, half
    facts["decays_width"], facts["rate"] = 2 * _SIZE, address(rate)
    _run(variant, Code.BLEND, facts, x, packed, gates)
    return _joined(x, packed), _joined(expected, behind)


def _draw(draw: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return draw.standard_normal(shape, np.float32) * np.float32(0.5)


def _blocks(states: Floats) -> Floats:
    """Return [slots, keys, columns] as [slots, columns / 32, keys, 32], aligned to a cache line."""
    packed = allocate_zeroed((_SLOTS, _SIZE // PANEL, _SIZE, PANEL), np.float32)
    packed[:] = states.reshape(_SLOTS, _SIZE, -1, PANEL).swapaxes(1, 2)
    return packed


def _by_lanes(values: Floats) -> Floats:
    """Return [..., rows, channels] as [..., channels / 16, rows, 16]."""
    parts = values.reshape(*values.shape[:-1], -1, LANES)
    return np.ascontiguousarray(np.moveaxis(parts, -2, -3))


def _joined(x: Floats, states: Floats) -> Floats:
    return np.concatenate((x.reshape(-1), states.reshape(-1)))


def _run(
    variant: Variant,
    code: Code,
    facts: Any,
    x: Floats,
    states: Floats,
    forgets: Floats | None = None,
) -> Floats:
    """Run one operation on the rows of PROJECTED; return MIXED, where some write their results.

    `forgets`: the content of DECAYS.
    """
    mixed = np.zeros((len(x), _SIZE), np.float32)
    buffers = {Buffer.PROJECTED: x, Buffer.MIXED: mixed}
    if forgets is not None:
        buffers[Buffer.DECAYS] = forgets
    names, rows = ("row_starts", "state_reads", "state_writes"), (_STARTS, _READS, _WRITES)
    step: dict[str, Any] = {"row_count": len(_READS), "tokens": len(x)}
    step |= {name: np.array(own, np.int32) for name, own in zip(names, rows, strict=True)}
    fields = {"inputs": x.shape[1], "facts": facts, "target": Buffer.MIXED, "forms": Form.WIDE}
    fields |= {"states": states, "state_bytes": states[0].nbytes}
    run_alone(KEEP_STATES.open(of_states(variant)), code, buffers, fields, step)
    return mixed
