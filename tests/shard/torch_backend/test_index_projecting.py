"""Keys and queries of an index beside latents, made by kernels as torch makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.torch_backend.indexed_cases import QUERY, RANK, Case, list_steps
from tests.shard.torch_backend.interpreter import DEVICE, need_triton

need_triton()

from tgi_trio.shard.torch_backend.attention.indexed.index_projecting import (  # noqa: E402  (Triton's)
    StepRotary,
    ask_index,
    write_indexed_keys,
)
from tgi_trio.shard.torch_backend.attention.indexed.selecting import score_units  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention  # noqa: E402
from tgi_trio.shard.torch_backend.layers.attention.index import IndexQueries, score_keys  # noqa: E402
from tgi_trio.shard.torch_backend.layers.attention.log_scale import LogScale  # noqa: E402
from tgi_trio.shard.torch_backend.layers.norm import Norm  # noqa: E402

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
    """Queries are scaled and rotated where keys are scored with them. No run ends here."""
    kind = dict(kind)
    scaled = kind.pop("scaled", False)
    case = Case(dtype=dtype, device=DEVICE, heads=5, **kind)
    latent, index, projected = case.latent(), case.index(), case.projected(3)
    positions = torch.tensor([0, 3, 40])
    turns = case.turns(positions)
    if scaled:
        index.query_scale = LogScale(case.some(5), case.some(5))
        logs = (positions + 1).float().log().to(DEVICE, dtype)[:, None, None]
        turns = [(rotary, table._replace(logs=logs)) for rotary, table in turns]
    (_, step), blocks = list_steps([5, 22, 7], [[4, 21, 6], [1, 1, 1]])
    cache = case.cache(blocks)
    batch, key = PagedAttention(torch.device(DEVICE)).prepare(step, cache), cache.key_slots[0]
    key.fill_(7.0)
    turn, own = (StepRotary(*each) for each in turns)
    compressed, asking = write_indexed_keys(projected, latent, turn, index, own, key, batch)
    before, of_key, weights, *gates = index.split(projected)
    assert asking is None
    close(compressed, latent.compress(before))
    turned = latent.query_and_key(before, lambda x: turn.rotary.apply(x, *turn.table[:2]))[1]
    parts = (turned, index.keys(of_key, *own), *(each[:, None] for each in gates))
    close(key[batch.slots], torch.cat(parts, dim=-1))
    others = torch.ones(len(key), dtype=torch.bool, device=DEVICE).index_fill(0, batch.slots, False)
    assert (key[others] == 7.0).all()
    expected = index.ask(compressed, weights, *own)
    keys = key[:, 0, index.place_in(latent.spec)][:, : case.dim]
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


@pytest.mark.parametrize("reads_only", [False, True])
@pytest.mark.parametrize("doubled", [False, True])
def test_what_queries_are_made_of_is_made_beside_keys(doubled: bool, reads_only: bool) -> None:
    """The norm of the layer's input; compressed queries are followed by those before their norm."""
    case = Case(device=DEVICE)
    latent, index, projected = case.latent(), case.index(), case.projected(3)
    index.query_norm = Norm("layer", case.some(40), case.some(40), 1e-5, 40)
    latent.spec, hidden = replace(latent.spec, doubled=doubled), case.some(3, 40)
    if reads_only:
        latent.latent_norm = None
        projected = projected[:, RANK + case.rotary :]
    (step,), blocks = list_steps([1, 1, 1], [[1, 1, 1]])
    cache = case.cache(blocks)
    batch = PagedAttention(torch.device(DEVICE)).prepare(step, cache)
    turn, own = (StepRotary(*each) for each in case.turns(torch.tensor([0, 3, 40])))
    key = cache.key_slots[0]
    query, asking = write_indexed_keys(projected, latent, turn, index, own, key, batch, hidden)
    assert asking is not None
    close(asking, index.query_norm(hidden))
    if not reads_only:
        close(query, latent.double(projected))
    of_key = index.split(projected)[1]
    close(key[batch.slots][..., index.place_in(latent.spec)], index.keys(of_key, *own))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("codes", ["", "fp8_e4m3fn"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("pool", [1, 3, 4])
def test_a_run_has_the_mean_of_its_keys(pool: int, biased: bool, codes: str) -> None:
    """In the place of its last token's. Its tokens are of this step, of the ones before, or both.

    In the last step those of the second row are rows of their own, as drafts are.
    """
    case = Case(pool=pool, codes=codes, device=DEVICE)
    latent, index, scale = case.latent(), case.index(), 0.5 if codes else 1.0
    if not biased:
        index.pool_bias = None
    contexts = [1, 17, 12, 30, 9, 4]
    steps, blocks = list_steps(
        contexts, [[1, 6, 7, 16, 5, 4], [0, 5, 5, 14, 4, 0], [0, 6, 0, 0, 0, 0]]
    )
    last = steps[-1]
    steps[-1] = replace(
        last,
        query_starts=np.arange(7, dtype=np.int32),
        context_lengths=np.arange(12, 18, dtype=np.int32),
        block_tables=last.block_tables.repeat(6, 0),
    )
    cache, key = case.cache(blocks), case.cache(blocks).key_slots[0]
    cache = case.cache(blocks)
    cache.key.fill_(0x7F if codes else torch.nan)  # what nobody has written is not read
    key, attention = cache.key_slots[0], PagedAttention(torch.device(DEVICE))
    expected: dict[int, torch.Tensor] = {}
    history: dict[int, list[torch.Tensor]] = {}
    for step in steps:
        projected, turns = (
            case.projected(len(step.token_ids)),
            case.turns(torch.from_numpy(step.positions)),
        )
        turn, own = (StepRotary(*each) for each in turns)
        batch = attention.prepare(step, cache)
        write_indexed_keys(projected, latent, turn, index, own, key, batch, scale=scale)
        _, of_key, _, gates = index.split(projected)
        kept = torch.cat((index.keys(of_key, *own)[:, 0], gates), dim=1)
        for row, slot, position, numbers in zip(
            np.repeat(step.block_tables[:, 0], np.diff(step.query_starts)),
            step.kv_slots,
            step.positions,
            kept,
            strict=True,
        ):
            run = history.setdefault(int(row), [])
            run.append(_round_trip(numbers, scale, codes))
            expected[int(slot)] = run[-1]
            if (position + 1) % pool == 0:
                mine, weighed = torch.stack(run[-pool:]).split(case.dim, dim=-1)
                weighed = weighed if index.pool_bias is None else weighed + index.pool_bias
                mean = (weighed.softmax(dim=0) * mine).sum(dim=0)
                expected[int(slot)] = torch.cat(
                    (_round_trip(mean, scale, codes), run[-1][case.dim :])
                )
    found = cache.decode(key, scale, torch.float32)[:, 0, index.place_in(latent.spec)]
    near = 2**-3 if codes else 1e-5  # a last bit of eight
    torch.testing.assert_close(
        found[list(expected)], torch.stack(list(expected.values())), atol=near / 4, rtol=near
    )
    assert len(expected) == sum(contexts)


def _round_trip(numbers: torch.Tensor, scale: float, codes: str) -> torch.Tensor:
    """Return numbers as a cache keeps them."""
    if not codes:
        return numbers
    return (numbers / scale).to(getattr(torch, codes.replace("fp8", "float8"))).float() * scale


def test_the_sizes_are_those_of_a_row() -> None:
    case = Case(pool=4, dim=16, heads=3)
    assert case.index().width == 2 * 16 + 3 and case.width == RANK + 8 + 2 * 16
    assert case.projected(2).shape == (2, QUERY + RANK + 8 + 2 * 16 + 3)
