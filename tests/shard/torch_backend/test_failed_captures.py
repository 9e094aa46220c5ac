"""Steps that cannot be recorded: what a failed capture leaves behind, and what is served then."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.interpreter import need_triton
from tgi_trio.errors import ConfigurationError
from tgi_trio.shard.torch_backend.recordings.cuda_graphs import CudaCapture
from tgi_trio.shard.torch_backend.recordings.recorded_steps import CaptureError

need_triton()

from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402  (Triton's)
from tests.shard.torch_backend.stand_in_support import (  # noqa: E402
    REQUEST,
    agree,
    drive,
    small_device,
    start,
)
from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice, current_device  # noqa: E402
from tgi_trio.testing.stand_in_tensor import DeviceLost  # noqa: E402

DEVICE = torch.device("cuda:0")
REFUSED = "CUDA error: operation not permitted when stream is capturing"
REQUESTED = replace(REQUEST, max_prefill_tokens=12)
TEXTS = [[3, 4, 5, 6, 7], [9, 8, 7]]


class Captures:
    """Captures that fail as those of torch 2.13 do, and what they leave behind."""

    def __init__(self) -> None:
        self.capturing = False
        self.refuses = False  # whatever is captured
        self.leaves = False  # a capture that fails has been ended: its graph was not instantiated
        self.stream: object = "the usual one"
        self.looked_for: list[object] = []  # pools for whose captures the allocator looks
        self.pools: list[object] = []  # that the allocator was given back
        self.graphs: list[weakref.ref[Any]] = []

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, **_: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        self.graphs.append(weakref.ref(graph))
        self.looked_for.append(pool)
        self.capturing = True
        try:
            with current_device().record(graph):
                yield
                if self.refuses:
                    raise RuntimeError(REFUSED)
        except RuntimeError as error:
            if not self.leaves:
                raise RuntimeError("CUDA error: an earlier one ended the capture\nHelp.") from error
            self.looked_for.remove(pool)
            self.stream = before
            raise
        else:
            self.looked_for.remove(pool)
            self.stream = before
        finally:
            self.capturing = False

    def end_pool(self, index: int, pool: object) -> None:
        if pool not in self.looked_for:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.looked_for.remove(pool)

    def release_pool(self, index: int, pool: object) -> None:
        self.pools.append(pool)

    def set_stream(self, stream: object) -> None:
        self.stream = "the usual one"


@pytest.fixture
def device(checkpoint: Callable[..., Path]) -> Iterator[StandInDevice]:
    with small_device(checkpoint) as stand_in:
        yield stand_in


@pytest.fixture
def captures(device: StandInDevice, monkeypatch: pytest.MonkeyPatch) -> Captures:
    found = Captures()
    monkeypatch.setattr(torch.cuda, "graph", found.graph)
    monkeypatch.setattr(torch.cuda, "set_stream", found.set_stream)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end_pool)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", found.release_pool)
    return found


@pytest.mark.parametrize("ended", [False, True])
def test_a_capture_that_fails_leaves_nothing_behind(captures: Captures, ended: bool) -> None:
    captures.leaves = ended
    record, x = CudaCapture(DEVICE), torch.ones(2, device=DEVICE)

    def refuse() -> torch.Tensor:
        if captures.capturing:
            raise RuntimeError(f"{REFUSED}\nSearch for `cudaErrorStreamCaptureUnsupported'")
        return x

    with pytest.raises(CaptureError, match=f"^{REFUSED}$"):
        record(refuse)
    assert captures.stream == "the usual one" and not captures.looked_for
    assert len(captures.pools) == (not ended)
    graph, y = record(lambda: x + 1)
    graph.replay()
    assert y.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("ended", [False, True])
def test_only_what_could_not_be_ended_is_kept(captures: Captures, ended: bool) -> None:
    captures.leaves, captures.refuses = ended, True
    record, x = CudaCapture(DEVICE), torch.ones(2, device=DEVICE)
    with contextlib.suppress(CaptureError):
        record(lambda: x + 1)
    assert [graph() is None for graph in captures.graphs] == [ended]


def test_the_reason_is_torchs_own(captures: Captures) -> None:
    x, compiled = torch.ones(2, device=DEVICE), dict[str, Callable[[], None]]()

    def refuse() -> torch.Tensor:
        if captures.capturing:
            try:
                compiled["a kernel"]()
            except KeyError:
                raise RuntimeError(REFUSED)  # noqa: B904  (as libraries do)
        return x

    with pytest.raises(CaptureError, match=f"^{REFUSED}$"):
        CudaCapture(DEVICE)(refuse)


def use_up(captures: Captures) -> Callable[[], torch.Tensor]:
    """Return work that memory does not suffice for, before it is captured."""

    def compute() -> torch.Tensor:
        assert not captures.capturing
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return compute


def test_memory_that_is_used_up_before_a_capture_is_a_reason_too(captures: Captures) -> None:
    with pytest.raises(CaptureError, match="out of memory"):
        CudaCapture(DEVICE)(use_up(captures))
    assert not captures.graphs


def test_a_rank_whose_memory_is_used_up_ends_as_the_others_wait_for_it(captures: Captures) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture(DEVICE, alone=False)(use_up(captures))


def test_older_torchs_name_for_leaving_a_pool(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    older = "_cuda_endAllocateCurrentStreamToPool"
    monkeypatch.setattr(torch._C, older, captures.end_pool, raising=False)
    captures.refuses, x = True, torch.ones(2, device=DEVICE)
    with pytest.raises(CaptureError):
        CudaCapture(DEVICE)(lambda: x + 1)
    assert not captures.looked_for


def test_a_device_that_is_lost_is_no_failed_capture(
    captures: Captures, device: StandInDevice
) -> None:
    x = torch.ones(2, device=DEVICE)

    def lose() -> torch.Tensor:
        if captures.capturing:
            device.lose()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return x

    with pytest.raises(DeviceLost):
        CudaCapture(DEVICE)(lose)


def refuse_prompts(captures: Captures, patch: pytest.MonkeyPatch, where: str) -> None:
    """Have captures of steps with prompts fail on one device."""
    reserve = PagedAttention.reserve

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if captures.capturing and str(current_device().place) == where:  # decodes do it before
            raise RuntimeError(REFUSED)
        return reserve(self, *args, **kwargs)

    patch.setattr(PagedAttention, "reserve", refuse)


def test_steps_with_prompts_are_launched_then(
    checkpoint: Callable[..., Path],
    device: StandInDevice,
    captures: Captures,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = checkpoint("llama", **SMALL)
    expected = drive(start(folder, "cpu"), TEXTS, [{}, {}])
    refuse_prompts(captures, monkeypatch, "cuda:0")
    runner = start(folder, "cuda:0", (1, 4), request=REQUESTED)
    told = capsys.readouterr().err
    assert told.count("steps with prompts are launched kernel by kernel") == 1 and REFUSED in told
    ours = drive(runner, TEXTS, [{}, {}], device=device)
    agree(ours, expected)
    assert not any(counts.replays for counts in ours.prefills)
    assert all(counts.replays == 1 for counts in ours.decodes)


@pytest.mark.parametrize("where", ["cuda:0", "cuda:1"])
def test_a_rank_that_cannot_record_them_has_all_launch_them(
    checkpoint: Callable[..., Path],
    device: StandInDevice,
    captures: Captures,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
) -> None:
    folder = checkpoint("llama", **SMALL)
    expected = drive(start(folder, "cpu"), TEXTS, [{}, {}])
    refuse_prompts(captures, monkeypatch, where)
    with two_ranks(folder, device, (1, 4), request=REQUESTED) as (runner, steps):
        ours = drive(runner, TEXTS, [{}, {}], device=device)
    agree(ours, expected)
    for counts in (ours.decodes, steps):
        assert any(each.replays for each in counts)
    assert not any(counts.replays for counts in ours.prefills)
    told = capsys.readouterr().err
    assert REFUSED in told and "another rank" in told


def test_decodes_that_cannot_be_recorded_end_the_start(
    checkpoint: Callable[..., Path], captures: Captures
) -> None:
    folder = checkpoint("llama", **SMALL)
    captures.refuses = True
    with pytest.raises(ConfigurationError, match=f"{REFUSED}.*--cuda-graphs 0"):
        start(folder, "cuda:0", (1,), request=REQUESTED)
    start(folder, "cuda:0", (), request=REQUESTED)
