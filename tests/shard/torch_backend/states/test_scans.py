"""Every recurrence says what transformers says, however its rows are cut and mixed in steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
from transformers.models.recurrent_gemma.configuration_recurrent_gemma import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from tgi_trio.shard.torch_backend.recordings.decode_plans import idle_plan
from tgi_trio.shard.torch_backend.states.chunks import Room
from tgi_trio.shard.torch_backend.states.delta_rule import apply_delta_rule, normalise
from tgi_trio.shard.torch_backend.states.mamba1 import scan_mamba1
from tgi_trio.shard.torch_backend.states.mamba2 import scan_mamba2
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.states.recorded_rows import (
    RecordedRows,
    idle_slots,
    row_staging,
)
from tgi_trio.shard.torch_backend.states.recurrent_gate import scan_gated
from tgi_trio.shard.torch_backend.states.scan import Parts
from tgi_trio.shard.torch_backend.states.steps import StateSteps

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, DIM, WIDE, TOKENS = 4, 8, 6, 150
LENGTHS = (TOKENS, 70, 1, 17)  # of the rows


class Case(NamedTuple):
    """A recurrence over `parts` [TOKENS, ...] of a row; `right` is of transformers."""

    parts: Callable[[], tuple[torch.Tensor, ...]]
    ours: Callable[[Parts, torch.Tensor, StateSteps], tuple[torch.Tensor, torch.Tensor]]
    right: Callable[..., torch.Tensor]  # of the parts of one row
    state: tuple[int, ...]


def _delta(channels: int) -> tuple[torch.Tensor, ...]:
    query, key = torch.randn(2, TOKENS, HEADS, DIM)
    # From hardly anything to all but everything forgotten, in one chunk.
    decay = -torch.rand(TOKENS, HEADS, channels).pow(4) * 30
    beta = torch.rand(TOKENS, HEADS) * 2
    return query, key, torch.randn(TOKENS, HEADS, WIDE), decay, beta


def _ours_delta(
    parts: Parts, states: torch.Tensor, steps: StateSteps
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, decay, beta = parts
    query = normalise(query) * DIM**-0.5
    return apply_delta_rule(query, normalise(key), value, decay, beta, states, steps)


def _right_delta(*parts: torch.Tensor) -> torch.Tensor:
    query, key, value, decay, beta = (part[None] for part in parts)
    return torch_chunk_gated_delta_rule(
        query, key, value, decay.squeeze(-1), beta, use_qk_l2norm_in_kernel=True
    )[0][0]


def _right_kimi(*parts: torch.Tensor) -> torch.Tensor:
    query, key, value, decay, beta = (part[None] for part in parts)
    return chunk_kimi_delta_attention(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)[
        0
    ][0]


RATE = -torch.linspace(0.5, 8, HEADS)
RATES = -torch.linspace(0.5, 8, 10 * DIM).view(10, DIM)


def _mamba2() -> tuple[torch.Tensor, ...]:
    dt = functional.softplus(torch.randn(TOKENS, HEADS) * 2)
    return torch.randn(TOKENS, HEADS, WIDE), dt, *torch.randn(2, TOKENS, 2, DIM)


def _ours_mamba2(
    parts: Parts, states: torch.Tensor, steps: StateSteps
) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, b, c = parts
    return scan_mamba2(x, dt, RATE, b, c, states, steps)


def _right_mamba2(*parts: torch.Tensor) -> torch.Tensor:
    x, dt, b, c = (part[None] for part in parts)
    return mamba2_chunk_scan(x, dt, RATE, b, c, chunk_size=32)[0].view(-1, HEADS, WIDE)


def _mamba1() -> tuple[torch.Tensor, ...]:
    dt = functional.softplus(torch.randn(TOKENS, 10))
    return torch.randn(TOKENS, 10), dt, *torch.randn(2, TOKENS, DIM)


def _ours_mamba1(
    parts: Parts, states: torch.Tensor, steps: StateSteps
) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, b, c = parts
    return scan_mamba1(x, dt, RATES.t(), b, c, states, steps)


def _right_mamba1(*parts: torch.Tensor) -> torch.Tensor:
    x, dt, b, c = (part.t()[None] for part in parts)
    return mamba_selective_scan(x, dt, RATES, b, c)[0].t()


def _right_gated(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    unit = RecurrentGemmaRglru(RecurrentGemmaConfig(num_attention_heads=2, lru_width=12))
    reset = torch.zeros(1, len(x), 1, dtype=torch.bool)
    return unit._rnn_scan(x[None], decay[None], reset, None)[0][0]


CASES: dict[str, Case] = {
    "delta rule": Case(lambda: _delta(1), _ours_delta, _right_delta, (HEADS, DIM, WIDE)),
    "delta rule per channel": Case(
        lambda: _delta(DIM), _ours_delta, _right_kimi, (HEADS, DIM, WIDE)
    ),
    "mamba2": Case(
        _mamba2,
        _ours_mamba2,
        _right_mamba2,
        (HEADS, WIDE, DIM),
    ),
    "mamba1": Case(
        _mamba1,
        _ours_mamba1,
        _right_mamba1,
        (DIM, 10),
    ),
    "gated": Case(
        lambda: (torch.randn(TOKENS, 12), torch.rand(TOKENS, 12)),
        lambda parts, states, steps: scan_gated(parts[0], parts[1], states, steps),
        _right_gated,
        (12,),
    ),
}


def _recorded(
    case: Case, parts: list[torch.Tensor], states: torch.Tensor, counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute rows as a recording does that has room for more of everything, and was idle."""
    tokens, rows = sum(counts) + 5, len(counts) + 3
    room = Room(tokens, rows, longer=len(counts) + 1)
    slots = [torch.from_numpy(array) for array in idle_slots(rows)]
    device = torch.device("cpu")
    pool = StatePool({}, 1, torch.float32, device)
    reserved = RecordedRows(room, slots, pool, device, row_staging(device))
    parts = [torch.cat((part, torch.randn(5, *part.shape[1:]))) for part in parts]
    states = torch.cat((states, torch.zeros(3, *states.shape[1:])))
    case.ours(parts, states.clone(), reserved.states.steps)
    step = replace(idle_plan(1, 1), query_starts=np.cumsum([0, *counts]))
    assert reserved.fits(step)
    reserved.refill(step)
    made, behind = case.ours(parts, states.clone(), reserved.states.steps)
    assert not made[-5:].any()  # what is left over is no row's
    return made[:-5], behind[:-3]


def _steps(lengths: list[int]) -> StateSteps:
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    rows = torch.arange(len(lengths))
    return StateSteps(starts, rows, rows, torch.zeros(len(lengths), dtype=torch.bool))


@pytest.mark.parametrize("name", CASES)
def test_cut_anywhere_in_any_company(name: str) -> None:
    torch.manual_seed(3)
    case = CASES[name]
    rows = [tuple(part[:length] for part in case.parts()) for length in LENGTHS]
    right = [case.right(*row) for row in rows]

    @settings(max_examples=6)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        states = torch.zeros(len(rows), *case.state)
        done = [0] * len(rows)
        while any(i < n for i, n in zip(done, LENGTHS, strict=True)):
            going = [i for i, n in enumerate(LENGTHS) if done[i] < n]
            # A piece of each row, or the next token of every row: they are computed otherwise.
            most = data.draw(st.sampled_from([150, 90, 64, 33, 1]))
            counts = [data.draw(st.integers(1, min(most, LENGTHS[i] - done[i]))) for i in going]
            for _ in range(9 if most == 1 else 1):
                places = [(i, done[i], count) for i, count in zip(going, counts, strict=True)]
                if any(first + count > LENGTHS[i] for i, first, count in places):
                    break
                parts = [
                    torch.cat([rows[i][p][first : first + count] for i, first, count in places])
                    for p in range(len(rows[0]))
                ]
                recorded = data.draw(st.booleans())
                made, behind = (
                    _recorded(case, parts, states[going], counts)
                    if recorded
                    else case.ours(parts, states[going], _steps(counts))
                )
                states[going] = behind
                found = made.split(counts)
                for (i, first, count), values in zip(places, found, strict=True):
                    expected = right[i][first : first + count]
                    torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)
                    done[i] += count

    check()


def test_a_row_of_no_numbers_leaves_its_neighbours_alone() -> None:
    for case in CASES.values():
        good = case.parts()
        bad = tuple(torch.full_like(part, torch.nan) for part in good)
        steps = _steps([70, 90, 1, 1])
        cuts = [(good, 70), (bad, 90), (good, 1), (bad, 1)]
        parts = [torch.cat([row[p][:n] for row, n in cuts]) for p in range(len(good))]
        zeros = torch.zeros(4, *case.state)
        for made, states in (
            case.ours(parts, zeros.clone(), steps),
            _recorded(case, parts, zeros, [70, 90, 1, 1]),
        ):
            assert made[:70].isfinite().all() and made[160].isfinite().all()
            assert states[[0, 2]].isfinite().all()
            assert made[70:160].isnan().any() and made[161].isnan().any()
