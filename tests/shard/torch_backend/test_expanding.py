"""Values of latents, gated, merged in their launch or not, against the same in float64."""

from __future__ import annotations

import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, launch_to_compile, need_triton
from tgi_trio.shard.torch_backend.layers.attention import expanding
from tgi_trio.shard.torch_backend.layers.attention.expanding import AttendedParts, expand_values

need_triton()

HEADS, RANK, VALUE = 3, 40, 24


def some(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def merge(sums: torch.Tensor, bests: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """Return the latents [T, heads, rank] of parts; zero where none saw anything."""
    sums, bests, masses = (x.double() for x in (sums, bests, masses))
    weights = torch.exp2(bests - bests.amax(dim=-1, keepdim=True).clamp(min=-100.0))
    mass = (weights * masses).sum(dim=-1).clamp(min=1e-9)
    return (weights[..., None] * sums).sum(dim=2) / mass[..., None]


def expected(
    latents: torch.Tensor, weight: torch.Tensor, gates: torch.Tensor | None
) -> torch.Tensor:
    values = torch.einsum("thr,hrv->thv", latents.double(), weight.double())
    if gates is not None:
        values = values * gates.double().sigmoid().unflatten(-1, (HEADS, -1))
    return values.flatten(1)


def agree(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype is dtype
    near = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(found.double(), wanted, atol=near, rtol=near / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("each", [0, 1, VALUE])
@pytest.mark.parametrize(("tokens", "parts"), [(1, 32), (7, 8), (40, 2)])
def test_parts_are_merged_expanded_and_gated(
    dtype: torch.dtype, each: int, tokens: int, parts: int
) -> None:
    """Of which the last saw nothing, and of the last token none did."""
    space = (tokens, HEADS, parts)
    sums, bests, masses = some(*space, RANK, seed=1), some(*space, seed=2), some(*space, seed=3)
    masses = masses.abs() + 0.5
    for nothing in ((slice(None), slice(None), -1), (-1,)):
        bests[nothing], masses[nothing], sums[nothing] = float("-inf"), 0.0, 0.0
    weight = (some(HEADS, RANK, VALUE, seed=4) / 4).to(dtype)
    gates = None
    if each:  # part of a projection
        gates = some(tokens, HEADS * VALUE // each + 5, seed=5).to(dtype)[:, 5:]
    read = AttendedParts(sums, bests, masses, dtype)
    found = expand_values(read, weight, gates, invariant=False)
    agree(found, expected(merge(sums, bests, masses), weight, gates), dtype)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_whole_latents_are_expanded_and_gated(
    monkeypatch: pytest.MonkeyPatch, tokens: int, invariant: bool
) -> None:
    """In one launch, unless sums have to be in one order; of keys that latents begin.

    Gates need not lie side by side.
    """
    latents = some(tokens, HEADS, RANK + 8, seed=1)[..., :RANK].bfloat16()
    weight, gates = (some(HEADS, RANK, VALUE, seed=2) / 4).bfloat16(), some(HEADS, tokens, seed=3).T
    monkeypatch.setattr(expanding, "runs_kernels", lambda device: True)
    if not invariant:
        monkeypatch.delattr(expanding, "open_values")
    found = expand_values(latents, weight, gates.bfloat16(), invariant=invariant)
    agree(found, expected(latents, weight, gates.bfloat16()), torch.bfloat16)


@pytest.mark.parametrize("each", [0, VALUE])
def test_all_kinds_are_compiled_beforehand(monkeypatch: pytest.MonkeyPatch, each: int) -> None:
    """For any number of parts, and for none if there are gates."""
    launch, parts = expanding._launch, set[int]()

    def note(read: torch.Tensor | AttendedParts, *others: object) -> torch.Tensor:
        parts.add(1 if isinstance(read, torch.Tensor) else read.sums.shape[2])
        return launch(read, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(expanding, "_launch", note)
    monkeypatch.setattr(expanding, "runs_kernels", lambda device: True)
    launch_to_compile(monkeypatch)
    expanding.compile_expanding(some(HEADS, RANK, VALUE, seed=1), each)
    assert parts == {2, 4, 8, 16, 32} | ({1} if each else set())
