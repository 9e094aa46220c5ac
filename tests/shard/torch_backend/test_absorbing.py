"""Queries over latents that are made beside the scores of an index: as they are by themselves."""

from __future__ import annotations

import pytest
import torch

from tests.shard.torch_backend.indexed_cases import Case, list_steps
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections

need_triton()

from tgi_trio.shard.torch_backend.attention.indexed import absorbing, selecting  # noqa: E402  (Triton's)
from tgi_trio.shard.torch_backend.attention.indexed.absorbing import PendingQueries  # noqa: E402
from tgi_trio.shard.torch_backend.attention.indexed.selecting import Asking, score_units  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention  # noqa: E402

COUNTS = [5, 1, 9]  # of the tokens of a step, for its rows
TOKENS = sum(COUNTS)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have several programs share each head, and its queries; an interpreter has but one."""
    monkeypatch.setattr(absorbing, "_HALF", absorbing.AbsorbingTile(16, 16, 16))
    monkeypatch.setattr(absorbing, "_WIDE", absorbing.AbsorbingTile(8, 16, 16))
    monkeypatch.setattr(selecting, "_PROGRAMS", 3)


def score(
    case: Case, latent: LatentProjections, piece: int
) -> tuple[list[torch.Tensor], PendingQueries]:
    """Return scores of so many tokens at a time, and queries that were pending meanwhile."""
    (step,), blocks = list_steps([17, 40, 9], [COUNTS])
    cache = case.cache(blocks)
    cache.key_slots[0].copy_(case.some(*cache.key_slots[0].shape))
    batch = PagedAttention(torch.device(DEVICE)).prepare(step, cache)
    index, spec = case.index(), latent.spec
    keys = cache.key_slots[0][:, 0, index.place_in(spec)][:, : case.dim]
    asking = Asking(case.some(TOKENS, 5, case.dim), case.some(TOKENS, 5))
    wide = case.some(TOKENS, len(latent.key_up) * (spec.plain_dim + spec.rotary_dim) + 3)
    pending = PendingQueries(latent, wide[:, :-3])  # the index's may lie behind
    found = []
    for begin in range(0, TOKENS, piece):
        tokens = range(begin, min(TOKENS, begin + piece))
        given = (asking, keys, batch, tokens)
        alone = score_units(*given, unit=1, most=2)
        beside = score_units(*given, unit=1, most=2, pending=pending)
        for one, other, seen in zip(alone.scores, beside.scores, alone.visible, strict=True):
            assert seen <= 2 or torch.equal(one[:seen], other[:seen])
        assert torch.equal(alone.visible, beside.visible)
        found.append(beside.scores)
    return found, pending


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("piece", [TOKENS, 6])
def test_scores_are_the_same_and_queries_as_by_a_library(
    monkeypatch: pytest.MonkeyPatch, piece: int, dtype: torch.dtype
) -> None:
    case = Case(dtype=dtype, device=DEVICE, heads=5)
    latent = case.latent()
    _, pending = score(case, latent, piece)
    plain = pending._plain
    wanted = latent.absorb(plain)
    monkeypatch.setattr(LatentProjections, "absorb", None)  # they are known already
    query, ends = pending.settle()
    assert ends.shape == (*plain.shape[:2], latent.spec.rotary_dim)
    tolerance = 1e-5 if dtype is torch.float32 else 2.0**-7
    torch.testing.assert_close(query, wanted, atol=tolerance, rtol=tolerance)


def test_of_many_tokens_a_library_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbing, "MOST_TOKENS", TOKENS - 1)
    case = Case(device=DEVICE, heads=5)
    latent = case.latent()
    _, pending = score(case, latent, TOKENS)
    assert pending.take().programs == 0
    assert torch.equal(pending.settle()[0], latent.absorb(pending._plain))


def test_batch_invariant_queries_do_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(device=DEVICE, heads=5)
    latent = case.latent()
    latent.invariant = True
    monkeypatch.setattr(PendingQueries, "take", None)
    _, pending = score(case, latent, TOKENS)
    assert not pending.joins
    assert torch.equal(pending.settle()[0], latent.absorb(pending._plain))


def test_what_adapters_say_is_added_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(device=DEVICE, heads=5)
    latent = case.latent()
    _, pending = score(case, latent, TOKENS)
    changed = list[tuple[torch.Tensor, ...]]()

    def note(own: LatentProjections, *given: torch.Tensor) -> None:
        changed.append(given)

    monkeypatch.setattr(LatentProjections, "change_queries", note)
    query, _ = pending.settle()
    ((plain, absorbed),) = changed
    assert plain is pending._plain and absorbed is query
