"""Recorded decodes: which graph a step takes, what fills it up, and that tokens stay the same.

A recording is stood in for by one that computes again, from the tensors it was made with and into
the tensor it returned, as a CUDA graph does. The real ones are in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    drafting_plan,
    generated,
    plan,
    prompts,
    run,
    sequence,
    sequences,
)
from tgi_trio import devices
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.machine import accelerator, device
from tgi_trio.shard.torch_backend.attention.interface import (
    AttentionLayer,
    CapturableAttention,
    DecodePlaces,
)
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.recordings.decode_graphs import DecodeGraphs
from tgi_trio.shard.torch_backend.recordings.decode_plans import idle_plan, only_decodes, pad_plan
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    Compute,
    Graph,
)
from tgi_trio.shard.torch_backend.staging import Array, Staging, packed_size, rest, split
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

Batch = dict[str, Any]
CPU = torch.device("cpu")


class FixedAttention(CapturableAttention):
    """Attention of decodes that reads nothing but tensors of its batch, in plain torch."""

    name = "fixed"

    def prepare(self, plan: StepPlan, cache: KVCache) -> Batch:
        assert only_decodes(plan)
        memory = torch.zeros(packed_size(self.arrays(plan)), dtype=torch.uint8)
        Staging(CPU).fill(memory, self.arrays(plan))
        return self.reserve(plan, cache, memory)

    def arrays(self, plan: StepPlan) -> list[Array]:
        width = np.array([plan.block_tables.shape[1]], np.int32)
        return [plan.kv_slots, plan.context_lengths, width, plan.block_tables]

    def reserve(
        self, plan: StepPlan, cache: KVCache, memory: torch.Tensor, *, decodes: bool = True
    ) -> Batch:
        assert decodes
        fixed = self.arrays(plan)[:-1]
        slots, contexts, width = split(memory, fixed)
        tables = rest(memory, fixed, torch.int32)
        names = ("slots", "contexts", "width", "tables")
        return dict(zip(names, (slots, contexts, width, tables), strict=True)) | {"cache": cache}

    def places(self, batch: Batch) -> DecodePlaces:
        return DecodePlaces(batch["slots"], batch["contexts"], batch["tables"], batch["width"])

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        cache: KVCache = batch["cache"]
        cache.key_slots[layer.index].index_copy_(0, batch["slots"], key)
        cache.value_slots[layer.index].index_copy_(0, batch["slots"], value)
        out = torch.empty(query.shape)
        for row, context in enumerate(batch["contexts"].tolist()):
            places = torch.arange(context)
            table = batch["tables"][row * int(batch["width"]) :]
            slots = table[places // BLOCK].long() * BLOCK + places % BLOCK
            k, v = cache.key_slots[layer.index][slots], cache.value_slots[layer.index][slots]
            group = layer.heads // layer.kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            weights = (torch.einsum("hd,khd->hk", query[row], k) * layer.scale).softmax(-1)
            out[row] = torch.einsum("hk,khd->hd", weights, v)
        return out.flatten(1)


class Recording:
    """See the module."""

    def __init__(self) -> None:
        self.replays: list[int] = []  # sizes
        self.recorded: list[int] = []
        self.rehearsed: list[int] = []
        self._rehearses = False

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        self._rehearses = True
        yield
        self._rehearses = False

    def __call__(self, compute: Compute) -> tuple[Graph, torch.Tensor]:
        output = compute().clone()
        (self.rehearsed if self._rehearses else self.recorded).append(len(output))
        replays = self.replays

        class Again:
            def replay(self) -> None:
                replays.append(len(output))
                output.copy_(compute())

        return Again(), output


def decodes(lengths: list[int]) -> StepPlan:
    rows = sequences([[5] * n for n in lengths], shuffle=1, new=1)
    for row in rows:
        row.computed = row.length - 1
    return plan(rows, [1] * len(rows))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(0, 7))
def test_places_left_over_decode_nothing(lengths: list[int], more: int) -> None:
    step = decodes(lengths)
    count, size = len(lengths), len(lengths) + more
    wide = pad_plan(step, size)
    assert only_decodes(wide) and len(wide.token_ids) == size
    assert wide.query_starts.tolist() == list(range(size + 1))
    for name in ("token_ids", "positions", "kv_slots", "context_lengths", "block_tables"):
        ours, theirs = getattr(wide, name), getattr(step, name)
        assert np.array_equal(ours[:count], theirs) and ours.dtype == theirs.dtype
        assert (ours[count:] == (name == "context_lengths")).all()
    assert wide.samples is step.samples


def test_an_idle_plan_touches_the_null_block_only() -> None:
    idle = idle_plan(4, 7)
    assert only_decodes(idle) and idle.block_tables.shape == (4, 7)
    assert not idle.kv_slots.any() and not idle.block_tables.any()


class Traced:
    """A forward that says how many tokens it was given."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attention: Any,
        batch: Any,
        states: object = None,
        *,
        features: object = None,
    ) -> torch.Tensor:
        return torch.stack((token_ids, positions), 1)


@pytest.mark.parametrize("rows, size", [(1, 1), (2, 2), (3, 4), (4, 4), (5, None)])
def test_a_step_takes_the_smallest_graph_that_holds_it(rows: int, size: int | None) -> None:
    capture = Recording()
    graphs = DecodeGraphs(Traced(), FixedAttention(), capture, [4, 1, 2, 2], CPU)
    step = decodes([9] * rows)
    assert graphs.forward(step, step.positions) is None  # nothing is recorded yet
    graphs.record(KVCache(KVShape(1, 1, 4), 8, torch.float32, CPU), width=4)
    hidden = graphs.forward(step, step.positions)
    assert capture.replays == ([] if size is None else [size])
    if hidden is not None:
        assert hidden.tolist() == [[5, 8]] * rows


@pytest.mark.parametrize("most, sizes", [(1, [1]), (3, [1, 2, 4]), (4, [1, 2, 4]), (99, [1, 2, 4])])
def test_graphs_are_recorded_up_to_the_largest_batch(most: int, sizes: list[int]) -> None:
    capture = Recording()
    graphs = DecodeGraphs(Traced(), FixedAttention(), capture, [4, 1, 2], CPU)
    graphs.record(KVCache(KVShape(1, 1, 4), 8, torch.float32, CPU), width=4, most=most)
    for rows in range(1, 5):
        graphs.forward(step := decodes([9] * rows), step.positions)
    assert sorted(set(capture.replays)) == sizes
    graphs.forget()
    assert graphs.forward(step, step.positions) is None


def test_a_rehearsal_runs_a_few_sizes_and_leaves_nothing() -> None:
    capture, cache = Recording(), KVCache(KVShape(1, 1, 4), 8, torch.float32, CPU)
    graphs = DecodeGraphs(Traced(), FixedAttention(), capture, [1, 2, 4, 8, 16, 24, 32], CPU)
    graphs.rehearse(cache, width=4, most=20)
    assert capture.rehearsed == [24, 8, 2, 1] and not capture.recorded
    step = decodes([9])
    assert graphs.forward(step, step.positions) is None
    graphs.record(cache, width=4, most=20)
    assert capture.recorded == [24, 16, 8, 4, 2, 1]


def test_other_steps_are_computed_without() -> None:
    graphs = DecodeGraphs(Traced(), FixedAttention(), Recording(), [8], CPU)
    graphs.record(KVCache(KVShape(1, 1, 4), 8, torch.float32, CPU), width=4)
    chunk = sequence(0, [5] * 9, [1, 2], new=1)
    step = plan([chunk], [4])
    assert graphs.forward(step, step.positions) is None
    chunk.computed = 8
    drafting = drafting_plan([chunk], [[7]])
    assert graphs.forward(drafting, drafting.positions) is None
    longer = decodes([5 * BLOCK])  # than the tables the graphs were recorded with
    assert graphs.forward(longer, longer.positions) is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_are_those_without_graphs(checkpoint: Callable[..., Path], family: str) -> None:
    folder, texts, new = checkpoint(family), prompts(6, longest=20), 12

    def answers(sizes: tuple[int, ...]) -> tuple[list[list[int]], list[int]]:
        runner = load_torch_runner(
            ShardSettings(model_path=folder), read_config(folder), sampler=GreedyRecorder()
        )
        assert isinstance(runner, TorchRunner) and isinstance(runner.model, Decoder)
        capture = Recording()
        runner._graphs = DecodeGraphs(runner.model.forward, FixedAttention(), capture, sizes, CPU)
        runner.warm_up(WarmupRequest(64, 96, 16, 63 * BLOCK))
        rows = sequences(texts, shuffle=3, new=new)
        run(runner, rows, joins=2)
        return [generated(row) for row in rows], capture.replays

    plain, none = answers(())
    recorded, replays = answers((1, 4, 8))
    assert recorded == plain and none == []
    assert set(replays) == {4, 8}  # six rows, then those that joined last


def test_the_device_is_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_driver", lambda: True)
    monkeypatch.setattr(accelerator, "current_kind", lambda: "")
    assert device.choose_device("auto") == "cpu"
    with pytest.raises(ConfigurationError, match=r"--device cuda .* torch sees no device at all"):
        device.choose_device("cuda")
    with pytest.raises(
        ConfigurationError, match=r"--device quantum: torch .* allowed are auto, cpu"
    ):
        device.choose_device("quantum")
    monkeypatch.setattr(accelerator, "current_kind", lambda: "cuda")
    monkeypatch.setattr(accelerator, "count_devices", lambda: 2)
    assert device.choose_device("auto", 1, 2) == device.choose_device("cuda", 1, 2) == "cuda:1"
    assert device.choose_device("cpu", 1, 2) == "cpu"
    with pytest.raises(
        ConfigurationError, match=r"--num-shard 4 takes as many CUDA devices.*lower it"
    ):
        device.choose_device("auto", 1, 4)
    with pytest.raises(ConfigurationError, match=r"--device xpu .* torch sees a device of cuda"):
        device.choose_device("xpu")
    monkeypatch.setattr(accelerator, "current_kind", lambda: "xpu")
    assert device.choose_device("auto") == device.choose_device("xpu") == "xpu:0"
    with pytest.raises(ConfigurationError, match="--num-shard is for CUDA devices or the CPU"):
        device.choose_device("xpu", 0, 2)
    with pytest.raises(ConfigurationError, match="--cuda-graphs needs a CUDA device"):
        device.graph_sizes("xpu:0", (1,))
    assert device.graph_sizes("xpu:0", None) == ()
    monkeypatch.setattr(device, "has_driver", lambda: False)  # torch is not even asked
    assert device.choose_device("auto", 1, 2) == "cpu"


def test_a_driver_is_found_by_its_library_or_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "_CUDA_DRIVER", "libc.so.6")
    assert devices.has_driver()
    monkeypatch.setattr(devices, "_CUDA_DRIVER", "libnone.so.1")
    monkeypatch.setattr(devices, "_ROCM_DRIVER", tmp_path / "kfd")
    assert not devices.has_driver()
    (tmp_path / "kfd").touch()
    assert devices.has_driver()


def test_flags_of_a_device_are_refused_only_without_one() -> None:
    sizes = device.graph_sizes("cuda:0", None)
    assert sizes[:4] == (1, 2, 4, 8) and sizes[-1] == 512  # as large as batches are
    assert all(more - size <= max(8, size // 8) for size, more in pairwise(sizes[3:]))
    assert device.graph_sizes("cuda:0", (3,)) == (3,)
    assert device.graph_sizes("cpu", None) == device.graph_sizes("cpu", ()) == ()
    with pytest.raises(ConfigurationError, match="--cuda-graphs needs a CUDA device"):
        device.graph_sizes("cpu", (1,))
    device.limit_memory("cpu", 1.0)
    with pytest.raises(ConfigurationError, match="--cuda-memory-fraction needs a CUDA device"):
        device.limit_memory("cpu", 0.5)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("codegen", "the model runs through transformers"),
        ("t5", "the model has an encoder"),
        ("mixtral", "its steps cannot be recorded"),
    ],
)
def test_graphs_that_cannot_be_recorded_are_told(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], family: str, why: str
) -> None:
    load_torch_runner(
        ShardSettings(model_path=checkpoint(family)),
        read_config(checkpoint(family)),
        graph_sizes=(1, 2),
    )
    assert f"no CUDA graphs are recorded, --cuda-graphs has no effect: {why}" in (
        capsys.readouterr().err
    )
    load_torch_runner(
        ShardSettings(model_path=checkpoint(family)),
        read_config(checkpoint(family)),
        graph_sizes=(),
    )
    assert "graphs" not in capsys.readouterr().err


def test_the_kernels_are_not_asked_for_where_a_device_serves(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--cpu-backend kernels computes on the CPU"):
        load_runner(ShardSettings(model_path=tmp_path, cpu_backend="kernels"), device="cuda:0")
