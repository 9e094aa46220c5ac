"""Keys and queries of an index beside latents, made by kernels as torch makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.shard.torch_backend.indexed_cases import QUERY, RANK, Case, steps_of
from tests.shard.torch_backend.interpreter import DEVICE, need_triton

need_triton()

from tgi_trio.shard.torch_backend.attention.index_projecting import (  # noqa: E402  (Triton's)
    Turn,
    ask_index,
    average_runs,
    write_indexed_keys,
)
from tgi_trio.shard.torch_backend.attention.paged import PagedAttention  # noqa: E402
from tgi_trio.shard.torch_backend.attention.selecting import score_units  # noqa: E402
from tgi_trio.shard.torch_backend.layers.index import IndexQueries, score_keys  # noqa: E402
from tgi_trio.shard.torch_backend.layers.log_scale import LogScale  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "first dimensions": {},
    "neighbours in latents alone": {"interleaved": True, "dim": 24},
    "last dimensions": {"last": True, "dim": 24},
    "all dimensions": {"dim": 8},
    "runs, nothing rotated": {"pool": 4, "rotary": 0},
    "runs": {"pool": 3, "dim": 24},
    "scaled by position": {"scaled": True},
    "scaled by position, nothing rotated": {"scaled": True, "rotary": 0},
}
DTYPES = (torch.float32, torch.bfloat16)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Torch rounds where products are rotated, kernels do not."""
    atol = 1e-5 if ours.dtype is torch.float32 else 0.03
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-5 if atol < 1e-4 else 0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_keys_and_queries(kind: dict[str, Any], dtype: torch.dtype) -> None:
    """Queries are scaled and rotated where keys are scored with them."""
    kind = dict(kind)
    scaled = kind.pop("scaled", False)
    case = Case(dtype=dtype, device=DEVICE, heads=5, **kind)
    latent, index, projected = case.latent(), case.index(), case.projected(3)
    positions = torch.tensor([0, 3, 40])
    slots = torch.tensor([9, 2, 0], device=DEVICE)
    turns = case.turns(positions)
    if scaled:
        index.query_scale = LogScale(case.some(5), case.some(5))
        logs = (positions + 1).float().log().to(DEVICE, dtype)[:, None, None]
        turns = [(rotary, table._replace(logs=logs)) for rotary, table in turns]
    key = torch.full((12, 1, case.width), 7.0, dtype=dtype, device=DEVICE)
    turn, own = (Turn(*each) for each in turns)
    compressed = write_indexed_keys(projected, latent, turn, index, own, key, slots)
    before, of_key, weights, *gates = index.split(projected)
    close(compressed, latent.compress(before))
    turned = latent.query_and_key(before, lambda x: turn.rotary.apply(x, *turn.table[:2]))[1]
    parts = (turned, index.keys(of_key, *own), *(each[:, None] for each in gates))
    close(key[slots], torch.cat(parts, dim=-1))
    assert (key[[1, *range(3, 9), 10, 11]] == 7.0).all()
    expected = index.ask(compressed, weights, *own)
    (_, step), blocks = steps_of([4, 21, 7], [[3, 20, 6], [1, 1, 1]])
    cache = case.cache(blocks)
    batch = PagedAttention(torch.device(DEVICE)).prepare(step, cache)
    keys = cache.key_slots[0][:, 0, index.place_in(latent.spec)][:, : case.dim]
    keys.copy_(case.some(*keys.shape))
    found, _ = score_units(
        ask_index(projected, index.project(compressed), index, own),
        keys,
        batch,
        range(3),
        unit=1,
        most=2,
    )
    for token, table in enumerate(step.block_tables):
        seen = int(step.context_lengths[token])
        places = [int(table[place // 16]) * 16 + place % 16 for place in range(seen)]
        one = IndexQueries(*(each[token : token + 1] for each in expected))
        scores = score_keys(one, keys[places])[0]
        size = float(scores.abs().max())
        close(found[token, :seen].to(dtype) / size, scores.to(dtype) / size)


@pytest.mark.parametrize("codes", ["", "fp8_e4m3fn"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("pool", [1, 3, 4])
def test_a_run_has_the_mean_of_its_keys(pool: int, biased: bool, codes: str) -> None:
    """In the place of its last token's, for runs that end in a step; nothing else is written."""
    case = Case(pool=pool, rotary=0, codes=codes, device=DEVICE)
    index, scale = case.index(), 0.5 if codes else 1.0
    if not biased:
        index.pool_bias = None
    contexts, counts = [1, 17, 12, 30, 9, 4], [1, 3, 1, 14, 1, 4]
    first = [n - count for n, count in zip(contexts, counts, strict=True)]
    (_, step), blocks = steps_of(contexts, [first, counts])
    cache = case.cache(blocks)
    slots = torch.arange(len(cache.key_slots[0]), device=DEVICE)
    numbers = case.some(len(slots), 1, case.width)
    kept = cache.write(0, slots, numbers, numbers, (scale, scale))[0][:, 0]
    before = cache.key_slots[0].clone()
    batch = PagedAttention(torch.device(DEVICE)).prepare(step, cache)
    keys = cache.key_slots[0][:, 0, -2 * case.dim :]
    average_runs(index, keys, batch, scale, case.some(1))
    expected, ends = kept.clone(), list[int]()
    places = step.block_tables[:, :, None] * 16 + torch.arange(16).numpy()
    for row, table in enumerate(places.reshape(len(step.rows), -1)):
        for position in step.positions[step.query_starts[row] : step.query_starts[row + 1]]:
            if (position + 1) % pool:
                continue
            run = kept[table[position + 1 - pool : position + 1]][:, -2 * case.dim :]
            mine, gates = run.split(case.dim, dim=-1)
            gates = gates if index.pool_bias is None else gates + index.pool_bias
            mean = (gates.softmax(dim=0) * mine).sum(dim=0)
            ends.append(int(table[position]))
            expected[ends[-1], -2 * case.dim : -case.dim] = mean
    found = cache.decode(cache.key_slots[0], scale, torch.float32)[:, 0]
    torch.testing.assert_close(
        found[ends], expected[ends], atol=1e-2 if codes else 1e-6, rtol=2**-4 if codes else 1e-5
    )
    others = [i for i in range(len(found)) if i not in ends]
    assert ends and torch.equal(cache.key_slots[0][others], before[others])


def test_the_sizes_are_those_of_a_row() -> None:
    case = Case(pool=4, dim=16, heads=3)
    assert case.index().width == 2 * 16 + 3 and case.width == RANK + 8 + 2 * 16
    assert case.projected(2).shape == (2, QUERY + RANK + 8 + 2 * 16 + 3)
