"""Attention kernels in bfloat16 against scaled dot product attention in float32, shape by shape.

KERNEL_SWEEP=1 makes the sweep wide (minutes).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch.nn import functional

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.shard.torch_backend.models_support import BLOCK, plan, sequence, tables
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS, KVCache, KVShape, KVSize
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.opening import open_values

need_triton()

from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention  # noqa: E402
from tgi_trio.testing.sanitizer.sanitizer import Sanitizer  # noqa: E402

WIDE = bool(os.environ.get("KERNEL_SWEEP"))
DIMS = (64, 80, 96, 128, 192, 256, 320, 512)
KINDS = [*product((1, 2, 4, 7, 8, 16), (0, 1, 16, 37))] if WIDE else [(1, 20), (7, 0)]
STEPS: dict[str, tuple[list[int], list[int]]] = {  # contexts, and queries of them
    "decode": ([75, 1, 34], [1, 1, 1]),
    "prefill": ([75, 1, 34], [9, 1, 34]),
}
BOUND = 2e-3
PROGRAMS = {"whole": 1, "divided": 8}  # of a device, that tiles are divided for


class Case:
    """Rows whose K and V are in a cache, but for those of the queries."""

    def __init__(
        self,
        contexts: list[int],
        counts: list[int],
        layer: AttentionLayer,
        codes: str = "",
        value_dim: int = 0,
    ) -> None:
        """`codes`: one of `EIGHT_BITS`, that K and V are kept in; `value_dim`: 0 for as in K."""
        self.layer, self.contexts, self.counts = layer, contexts, counts
        self.blocks = tables([[0] * n for n in contexts], shuffle=2, new=0)
        held, dim, same = 1 + sum(map(len, self.blocks)), layer.head_dim, layer.value_dim > 0
        value_dim = value_dim or dim
        shape = KVShape.of([KVSize(layer.kv_heads, dim, value_dim)] * 2, same=same)
        kept = EIGHT_BITS[codes] if codes else torch.bfloat16
        self.cache = KVCache(shape, held, kept, torch.device(DEVICE))
        # What nobody has written, nobody may look at; this is no number in e5m2, and is a large one
        # in e4m3.
        for memory in (self.cache.key, self.cache.value):
            memory.fill_(0x7F if codes else float("nan"))
        generator = torch.Generator().manual_seed(sum(contexts) + dim)

        def some(*shape: int) -> torch.Tensor:
            # Below a half, as rounding what is beyond takes all of the bound.
            return (torch.randn(shape, generator=generator) / 8).to(DEVICE, torch.bfloat16)

        self.query = 16 * some(sum(counts), layer.heads, dim)
        self.rows = [
            (some(n, layer.kv_heads, dim), some(n, layer.kv_heads, value_dim)) for n in contexts
        ]
        for i, (blocks, (key, value)) in enumerate(zip(self.blocks, self.rows, strict=True)):
            places = torch.tensor(blocks).repeat_interleave(BLOCK) * BLOCK
            places += torch.arange(BLOCK).repeat(len(blocks))
            places = places[: len(key)].to(DEVICE)
            if codes:
                self.rows[i] = self._keep(places, key, value)
                continue
            self.cache.key_slots[1][places] = key
            if not same:
                self.cache.value_slots[1][places] = value

    def _keep(
        self, places: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of 8 bits; return what they stand for, float32."""
        cache, (first, second) = self.cache, self.layer.kv_scales
        cache.write(1, places, key, value, self.layer.kv_scales)
        return (
            cache.decode(cache.key_slots[1][places], first, torch.float32),
            cache.decode(cache.value_slots[1][places], second, torch.float32),
        )

    def plan(self) -> StepPlan:
        lengths = zip(self.contexts, self.blocks, strict=True)
        rows = [sequence(i, [3] * n, table, new=0) for i, (n, table) in enumerate(lengths)]
        for row, context, count in zip(rows, self.contexts, self.counts, strict=True):
            row.computed = context - count
        return plan(rows, self.counts)

    def expected(self) -> torch.Tensor:
        """Return float32 [T, heads, value dim] by torch."""
        layer, found, first = self.layer, [], 0
        for (key, value), count in zip(self.rows, self.counts, strict=True):
            query = self.query[first : first + count].float().transpose(0, 1)
            first += count
            if layer.value_dim:
                value = key[..., : layer.value_dim]
            group = layer.heads // layer.kv_heads
            keys, values = (
                x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (key, value)
            )
            own, place = torch.arange(len(key) - count, len(key))[:, None], torch.arange(len(key))
            seen = (place <= own) & ((place > own - layer.window) if layer.window else True)
            if layer.chunk:
                seen &= place // layer.chunk == own // layer.chunk
            out = functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=seen.to(DEVICE), scale=layer.scale
            )
            found.append(out.transpose(0, 1))
        return torch.cat(found)

    def attended(self) -> torch.Tensor:
        backend = PagedAttention(torch.device(DEVICE))
        batch = backend.prepare(self.plan(), self.cache)
        out = backend.attend_written(self.layer, self.query, batch)
        return out.view(len(self.query), self.layer.heads, -1)


def ways(*place: int) -> list[str]:
    """Return whether tiles are divided: both, where the sweep is wide.

    Else they take turns, so that neighbours of any kind have the one and the other.
    """
    return list(PROGRAMS) if WIDE else [list(PROGRAMS)[sum(place) % 2]]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    from tgi_trio.shard.torch_backend.attention.paged import split_kv

    return lambda way: monkeypatch.setattr(split_kv, "_PROGRAMS", PROGRAMS[way])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dim", DIMS)
def test_heads_of_models(dim: int, step: str, programs: Callable[[str], None]) -> None:
    for i, (group, window) in enumerate(KINDS):  # heads of a key, and how far they look
        layer = AttentionLayer(1, 2 * group, 2, dim, scale=dim**-0.5, window=window)
        case = Case(*STEPS[step], layer)
        expected = case.expected()
        for way in ways(i, list(STEPS).index(step)):
            programs(way)
            worst = (case.attended().float() - expected).abs().max().item()
            assert worst < BOUND, (group, window, way, worst)


@pytest.mark.parametrize("way", PROGRAMS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("chunk", [0, 20])
def test_values_narrower_than_keys_and_chunks(
    chunk: int, step: str, way: str, programs: Callable[[str], None]
) -> None:
    programs(way)
    layer = AttentionLayer(1, 8, 2, 192, scale=192**-0.5, chunk=chunk)
    case = Case(*STEPS[step], layer, value_dim=128)
    worst = (case.attended().float() - case.expected()).abs().max().item()
    assert worst < BOUND, worst


@pytest.mark.parametrize("way", PROGRAMS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", [16, 20] if WIDE else [20])
def test_latents(heads: int, step: str, way: str, programs: Callable[[str], None]) -> None:
    programs(way)
    layer = AttentionLayer(1, heads, 1, 576, scale=192**-0.5, value_dim=512)
    case = Case(*STEPS[step], layer)
    worst = (case.attended().float() - case.expected()).abs().max().item()
    assert worst < BOUND, worst


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("codes", EIGHT_BITS)
@pytest.mark.parametrize("shape", [(8, 2, 128, 0), (16, 1, 576, 512)], ids=["heads", "latents"])
def test_keys_and_values_of_8_bits(
    codes: str,
    shape: tuple[int, int, int, int],
    step: str,
    programs: Callable[[str], None],
) -> None:
    """What they stand for, with scales of the checkpoint, is what is attended to."""
    heads, kv_heads, dim, latents = shape
    scales = (2.0**-7, 2.0**-7 if latents else 1 / 96)
    layer = AttentionLayer(
        1, heads, kv_heads, dim, scale=dim**-0.5, value_dim=latents, kv_scales=scales
    )
    case = Case(*STEPS[step], layer, codes)
    for way in ways(list(STEPS).index(step), list(EIGHT_BITS).index(codes)):
        programs(way)
        worst = (case.attended().float() - case.expected()).abs().max().item()
        assert worst < BOUND, (way, worst)


# --- caches of more numbers than 32 bits count ---------------------------------------------------


Far = Callable[[torch.Tensor, int], None]


@pytest.fixture
def far() -> Iterator[Far]:
    """Return what makes kernels believe that memory lies `numbers` behind where it does.

    Reads and writes elsewhere than in memory that kernels are given fail the test.
    """
    if DEVICE != "cpu":
        pytest.skip("a device's addresses cannot be made up")
    sanitizer = Sanitizer(bounds_only=True)
    with sanitizer.on():
        yield sanitizer.place_far
    assert not sanitizer.findings.take()


@pytest.mark.parametrize("way", PROGRAMS)
@pytest.mark.parametrize("each", [1, 80], ids=["numbers", "heads"])
def test_gates_open_what_heads_say(programs: Callable[[str], None], way: str, each: int) -> None:
    """In the launch that ends attention, by the same numbers as in one of their own."""
    programs(way)
    case = Case(*STEPS["prefill"], AttentionLayer(1, 4, 2, 80, scale=0.1))
    backend, query = PagedAttention(torch.device(DEVICE)), case.query
    batch = backend.prepare(case.plan(), case.cache)
    whole = query.flatten(1)  # gates are a part of a projection
    gates = torch.cat((whole, whole), 1)[:, 320 : 320 + 320 // each]
    plain = backend.attend_written(case.layer, query, batch)
    found = backend.attend_written(case.layer, query, batch, gates)
    assert torch.equal(found, open_values(plain, gates)) and not torch.equal(found, plain)


@pytest.mark.parametrize("step", [([34, 1], [1, 1]), ([34, 1], [3, 1])], ids=STEPS)
@pytest.mark.parametrize("latents", [False, True], ids=["heads", "latents"])
def test_caches_of_more_than_2_to_the_32_numbers(
    far: Far, latents: bool, step: tuple[list[int], list[int]]
) -> None:
    heads = AttentionLayer(1, 4, 2, 64, scale=0.1)
    layer = AttentionLayer(1, 4, 1, 576, scale=0.1, value_dim=512) if latents else heads
    case, per_block = Case(*step, layer), BLOCK * layer.kv_heads * layer.head_dim
    blocks = (1 << 33) // per_block
    for slots in {id(x): x for x in (case.cache.key_slots[1], case.cache.value_slots[1])}.values():
        far(slots, blocks * per_block)
    step_plan = case.plan()
    step_plan.block_tables[:] += blocks
    backend = PagedAttention(torch.device(DEVICE))
    batch = backend.prepare(step_plan, case.cache)
    out = backend.attend_written(layer, case.query, batch).view(len(case.query), 4, -1)
    assert (out.float() - case.expected()).abs().max() < BOUND


def test_writing_behind_2_to_the_32_numbers(far: Far) -> None:
    from tgi_trio.shard.torch_backend.attention.paged.kv_writing import write_projected

    dim, slots = 64, (1 << 33) // (2 * 64)
    key, value = torch.zeros(2, 3, 2, dim)
    qkv = torch.randn(2, 8 * dim)
    for memory in (key, value):
        far(memory, slots * 2 * dim)
    where = torch.tensor([2, 0])
    write_projected(qkv, HeadSteps(4, 2, dim), None, key, value, where + slots)
    torch.testing.assert_close(key[where], qkv.view(2, 8, dim)[:, 4:6])
    torch.testing.assert_close(value[where], qkv.view(2, 8, dim)[:, 6:])
