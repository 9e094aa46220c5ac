"""One layer whose index chooses blocks, over two steps of ragged rows, for backends to agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.shard.torch_backend.models_support import plan, sequence, tables
from tgi_trio.model.specs.decoder import RotarySpec
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape, KVSize
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.layers.norm import Norm

HEADS, KV_HEADS, DIM, INDEX_DIM = 6, 2, 16, 24
INDEX = 1  # the layer of the cache with index keys
# Every row's keys so far, and what a step adds: prompts whole and in chunks, drafts, decodes.
CONTEXTS, COUNTS = [1, 7, 8, 9, 25, 40, 37], [1, 7, 3, 1, 20, 2, 1]
DECODES = [1, 3, 4, 8, 11, 12, 13, 16, 33]  # contexts around every border


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """One layer, whose heads and index are rotated alike."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    stored: torch.dtype | None = None  # of the cache; None: the model's
    interleaved: bool = False
    turned: int = 8  # leading numbers of a head that are rotated

    def __post_init__(self) -> None:
        spec = RotarySpec(self.turned, interleaved=self.interleaved)
        self.rotary = Rotary(spec, torch.device(self.device))
        gain = 1.0 + 0.1 * some(HEADS + KV_HEADS, DIM, seed=3).to(self.device)
        scales = (0.02, 0.5) if self.stored else (1.0, 1.0)
        self.layer = AttentionLayer(0, HEADS, KV_HEADS, DIM, scale=0.3, kv_scales=scales)
        self.steps = HeadSteps(
            *(HEADS, KV_HEADS, DIM),
            norm="rms_plus_one",
            eps=1e-5,
            gain=gain,
            rotary=self.rotary,
        )

    def norm(self, seed: int) -> Norm:
        weight = 0.3 * some(INDEX_DIM, seed=seed).to(self.device, self.dtype)
        return Norm("rms_plus_one", weight, None, 1e-5, INDEX_DIM)

    def cache(self, blocks: int, *, nothing: float = 0.0) -> KVCache:
        """Return a cache of which nothing has been written, where it has numbers like `nothing`."""
        sizes = [KVSize(KV_HEADS, DIM, DIM), KVSize(1, INDEX_DIM, 0)]
        device = torch.device(self.device)
        cache = KVCache(KVShape.of(sizes), blocks, self.stored or self.dtype, device)
        if not cache.codes:
            cache.key.fill_(nothing)
            cache.value.fill_(nothing)
        return cache

    def run(self, backend: Any, attend: Any, steps: list[StepPlan], cache: KVCache) -> list[Any]:
        """Return [T, heads * dim] of each step; `attend(table, projected, reserved, batch)`."""
        found = []
        for number, step in enumerate(steps):
            tokens = len(step.token_ids)
            width = (HEADS + 2 * KV_HEADS) * DIM
            projected = some(tokens, width, seed=10 + number).to(self.device, self.dtype)
            asked = some(tokens, 8 * INDEX_DIM, seed=20 + number).to(self.device, self.dtype)
            positions = torch.from_numpy(step.positions).to(self.device)
            table = self.rotary.table(positions, positions, self.dtype)
            found.append(attend(table, projected, asked, backend.prepare(step, cache)))
        return found


def ragged_steps(contexts: list[int], counts: list[int]) -> tuple[list[StepPlan], int]:
    """Return the steps before `contexts` and up to them, and the blocks that they need."""
    blocks = tables([[0] * n for n in contexts], shuffle=2, new=0)
    rows = [sequence(i, [3] * n, blocks[i], new=0) for i, n in enumerate(contexts)]
    before = [context - count for context, count in zip(contexts, counts, strict=True)]
    started = [i for i, count in enumerate(before) if count]
    steps = []
    if started:
        steps.append(plan([rows[i] for i in started], [before[i] for i in started]))
    for row, count in zip(rows, before, strict=True):
        row.computed = count
    steps.append(plan(rows, counts))
    return steps, 1 + sum(map(len, blocks))


def written(cache: KVCache, steps: list[StepPlan]) -> list[torch.Tensor]:
    """Return the slots of both layers that steps have written."""
    slots = torch.from_numpy(np.unique(np.concatenate([step.kv_slots for step in steps])))
    parts = [cache.key_slots[0], cache.value_slots[0], cache.key_slots[INDEX]]
    return [part.cpu()[slots] for part in parts]


def alike(case: Case, found: list[list[torch.Tensor]]) -> None:
    """Raise AssertionError unless two backends found the same in each step.

    In half precision a key that is rounded in another place may move a token's choice.
    """
    for mine, wanted in zip(*found, strict=True):
        if case.dtype is torch.float32:
            torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
        else:
            same = torch.isclose(mine, wanted, atol=2e-2, rtol=2e-2).all(dim=-1)
            assert (~same).sum() <= len(same) / 20, same


def alike_written(case: Case, caches: list[KVCache], steps: list[StepPlan]) -> None:
    """Raise AssertionError unless two backends wrote the same."""
    tolerance = 1e-5 if case.dtype is torch.float32 else 2e-2
    tolerance = 0.0 if case.stored else tolerance  # codes
    for mine, wanted in zip(*(written(cache, steps) for cache in caches), strict=True):
        torch.testing.assert_close(mine, wanted, atol=tolerance, rtol=tolerance)
