"""Attention to steps with prompts as recordings have them: tiles found on the device, idle ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.shard.torch_backend.attention_cases import KINDS, attended
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend, AttentionLayer
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.recordings.mixed_plans import MixedSize, idle_step
from tgi_trio.shard.torch_backend.staging import Sheet, Staging, packed_size

need_triton()

from tgi_trio.shard.torch_backend.attention.paged import (  # noqa: E402  (they import Triton)
    paged_attention,
    split_kv,
    tiling,
)
from tgi_trio.shard.torch_backend.attention.paged.tiling import (  # noqa: E402
    EVERY,
    DeviceTiling,
    HostTiling,
    Share,
    count_tiles,
)

MIXED = ([90, 40, 1, 17, 33], [70, 5, 1, 1, 6])
ONE_EACH = ([40, 1, 17], [1, 1, 1])  # whatever is left over makes decodes a mixed step
LEFT_OVER = 9  # tokens


class FromMemory(AttentionBackend):
    """Attends to steps that have fewer tokens and rows than the memory they are read from."""

    name = "from memory"

    def __init__(self) -> None:
        self._attention = paged_attention.PagedAttention(torch.device(DEVICE))
        self._staging = Staging(torch.device(DEVICE))

    def prepare(self, plan: StepPlan, cache: KVCache) -> Any:
        size = MixedSize(len(plan.token_ids) + LEFT_OVER, len(plan.context_lengths) + 2)
        idle = idle_step(size, plan.block_tables.shape[1] + 1)
        arrays = self._attention.arrays(idle)
        memory = torch.full((packed_size(arrays),), 255, dtype=torch.uint8, device=DEVICE)
        self._staging.fill_from(Sheet(arrays, memory, shared=False), self._attention.arrays(plan))
        return self._attention.reserve(idle, cache, memory, decodes=False)

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Any,
    ) -> torch.Tensor:
        more = [
            torch.cat((x, x.new_full((LEFT_OVER, *x.shape[1:]), 3.0))) for x in (query, key, value)
        ]
        out = self._attention.attend(layer, more[0], more[1], more[2], batch)
        assert not out[len(query) :].any()  # what is left over sees nothing
        return out[: len(query)]


@pytest.fixture(params=[1, 64], ids=["whole", "divided"])
def from_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FromMemory:
    monkeypatch.setattr(split_kv, "_PROGRAMS", request.param)
    return FromMemory()


def agree(backend: AttentionBackend, sizes: tuple[list[int], list[int]], **options: Any) -> None:
    ours = attended(backend, *sizes, device=DEVICE, **options)
    expected = attended(ReferenceAttention(), *sizes, **options)
    atol = 2e-2 if options.get("dtype") is torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_left_over_changes_nothing(from_memory: FromMemory, kind: dict[str, Any]) -> None:
    agree(from_memory, MIXED, **kind)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "launched"])
@pytest.mark.parametrize("kind", ["plain", "sinks, window, soft cap"])
def test_rows_of_few_tokens_have_tiles_of_their_own(
    from_memory: FromMemory, monkeypatch: pytest.MonkeyPatch, kind: str, recorded: bool
) -> None:
    """In half precision, where tiles of prompts are larger."""
    backend = from_memory if recorded else paged_attention.PagedAttention(torch.device(DEVICE))
    asked: list[Share] = []
    of = DeviceTiling if recorded else HostTiling
    tiles = of.tiles

    def note(self: Any, lanes: int, group: int, share: Share = EVERY) -> Any:
        asked.append(share)
        return tiles(self, lanes, group, share)

    monkeypatch.setattr(of, "tiles", note)
    for sizes in (MIXED, ([4, 90], [4, 70]), ([9, 4], [2, 3]), ([90], [70])):  # both, one alone
        agree(backend, sizes, dtype=torch.bfloat16, **KINDS[kind])
    assert set(asked) == {Share(above=16), Share(upto=16)}
    asked.clear()
    agree(backend, ([40, 9], [1, 2]), dtype=torch.bfloat16, heads=20, kv_heads=1)
    assert set(asked) == {EVERY}  # they are more than such a tile has


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 14, "kv_heads": 2, "dim": 64, "window": 5},  # a group that is no power of two
        {"heads": 3, "dim": 16 + 8, "value_dim": 16, "kv_heads": 1},  # latents
    ],
    ids=str,
)
def test_other_shapes_and_rows_of_one_token(from_memory: FromMemory, shape: dict[str, Any]) -> None:
    agree(from_memory, MIXED, **shape)
    agree(from_memory, ONE_EACH, **shape)


def test_it_is_bitwise_what_launched_steps_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both divide tiles alike."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 1)
    launched = attended(paged_attention.PagedAttention(torch.device(DEVICE)), *MIXED, device=DEVICE)
    assert torch.equal(attended(FromMemory(), *MIXED, device=DEVICE), launched)


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=9),
    st.integers(0, 90),
    st.sampled_from([(16, 1), (16, 7), (128, 4), (16, 20)]),
    st.sampled_from([Share(), Share(above=16), Share(upto=16)]),
)
def test_tiles_are_those_that_the_host_finds(
    counts: list[int], left: int, kind: tuple[int, int], share: Share
) -> None:
    """In another order, of the rows that are asked for; the others have no pair."""
    lanes, group = kind
    tokens = sum(counts) + left
    starts = np.cumsum([0, *counts, left]).astype(np.int32)
    tiling = DeviceTiling(torch.from_numpy(starts).to(DEVICE), tokens)
    found = [column.tolist() for column in tiling.tiles(lanes, group, share)]
    assert len(found[0]) == count_tiles(tokens, len(counts) + 1, lanes, group, share)
    pairs = np.diff(starts) * group
    real = [(r, s) for r, s in zip(*found, strict=True) if s < pairs[r]]
    host = HostTiling(np.diff(starts), Staging(torch.device(DEVICE)))
    expected = zip(*(c.tolist() for c in host.tiles(lanes, group, share)), strict=True)
    assert all(share.above < pairs[r] <= (share.upto or 1 << 20) for r, _ in real)
    assert sorted(real) == sorted(expected)
    assert real == sorted(real, reverse=True)  # what begins last is not what takes longest
    assert all(0 <= row <= len(counts) for row in found[0])


class Noted(TorchDispatchMode):
    """Notes what torch computes among kernels of ours that are launched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.order.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.order.append("list_tiles")


def test_tiles_are_there_before_a_kernel_that_does_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention reads them first: between the two is something that waits for all before it."""
    noted = Noted()
    monkeypatch.setattr(tiling, "list_tiles", noted)
    cut = DeviceTiling(torch.tensor([0, 3, 5], dtype=torch.int32, device=DEVICE), 5)
    with noted:
        cut.tiles(16, 4)
        assert "aten::new_zeros" in noted.order[noted.order.index("list_tiles") :]
        before = len(noted.order)
        cut.tiles(16, 4)
    assert len(noted.order) == before  # once, not for every layer
