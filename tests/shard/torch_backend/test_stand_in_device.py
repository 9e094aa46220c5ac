"""The device's path over a stand-in: tokens of the CPU, and nothing that the host waits for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import (
    BLOCK,
    generated,
    plan,
    prompts,
    sequence,
    sequences,
    tables,
)
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.contract import ShardSequence, StepResult
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

need_triton()

from tgi_trio.testing.stand_in_device import (  # noqa: E402  (it imports Triton)
    StandInDevice,
    current_device,
)
from tgi_trio.testing.stand_in_driver import Counts  # noqa: E402
from tgi_trio.testing.tiny_families import GEMMA4_E  # noqa: E402

DEVICE = "cuda:0"

NEW = 3
FAMILIES = ("llama", "deepseek_v2")  # others: test_device_families.py
SCALED = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
DYNAMIC: dict[str, Any] = {"rope_parameters": SCALED, "max_position_embeddings": 16}
# Launches of a layer: four products, two norms of sums, rotation and writing, attention, the gate.
# A mixture has one more: the router, who goes where; the gate is part of a product.
LAYERED = {
    **{"llama": 9, "qwen3": 9, "gemma2": 9, "gpt_neox": 9, "olmo2": 9},
    **{"mixtral": 9, "qwen3_moe": 9, "gpt_oss": 9, "deepseek_v3": 12, "deepseek_v2": 12},
    **{"gemma4_text": 9, "mimo_v2_flash": 9, "llama4_text": 10, "qwen2_moe": 9, "afmoe": 9},
    **{"gemma3n_text": 12, "nemotron": 9, "apertus": 9, "bloom": 9},
    "gemma4_text with embeddings of layers": 12,
    **{"minimax_m2": 9, "flex_olmo": 9},  # norms over all heads
    **{"falcon_h1": 11, "falcon_h1 with norms": 12},  # attention and Mamba-2, projected at once
}
ONE_MORE = {"num_hidden_layers": 3}
SEEING = ["full_attention", "sliding_attention", "full_attention"]
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of both, and for one layer more
    "deepseek_v3": ({"first_k_dense_replace": 3}, ONE_MORE),  # no experts
    "gemma4_text": ({}, {**ONE_MORE, "layer_types": SEEING}),
    "mimo_v2_flash": ({}, {**ONE_MORE, "layer_types": SEEING}),
    "llama4_text": ({}, {"num_hidden_layers": 4}),
    "qwen2_moe": ({}, {"num_hidden_layers": 4}),
    "afmoe": ({}, {"num_hidden_layers": 4, "layer_types": [*SEEING[:2], *SEEING[:2]]}),
    "gemma4_text with embeddings of layers": (
        GEMMA4_E,
        {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", *GEMMA4_E["layer_types"]],
        },
    ),
    "falcon_h1 with norms": ({"mamba_rms_norm": True}, ONE_MORE),
    "gemma3n_text": ({}, {"num_hidden_layers": 5, "layer_types": [*SEEING, *SEEING[:2]]}),
}
TEXTS = prompts(3, longest=20)
ASKED: list[dict[str, Any]] = [{}, {"sample": True, "top_p": 0.9}, {"repetition_penalty": 1.3}]


@pytest.fixture
def device(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[StandInDevice]:
    asked: dict[str, Any] = getattr(getattr(request.node, "callspec", None), "params", {})
    family = asked.get("family", "llama")
    checkpoint("llama", **DYNAMIC)  # transformers makes them without one
    if family in FAMILIES:
        checkpoint(family)
    if family in LAYERED:
        layered(checkpoint, family)
    from tgi_trio.shard.torch_backend.attention.paged import split_kv

    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    with StandInDevice() as stand_in:
        yield stand_in


def layered(checkpoint: Callable[..., Path], family: str) -> tuple[Path, Path]:
    """Return a checkpoint of a row of `LAYERED`, and one with a layer more."""
    own, more = CHANGES.get(family, ({}, ONE_MORE))
    name = family.partition(" ")[0]
    return checkpoint(name, **own), checkpoint(name, **own | more)


def start(folder: Path, where: str, graphs: tuple[int, ...] = (), dtype: str = "float32") -> Runner:
    settings = ShardSettings(model_path=folder, dtype=dtype)
    runner = load_torch_runner(
        settings, read_config(settings.model_path), device=where, graph_sizes=graphs
    )
    with contextlib.nullcontext() if where == "cpu" else current_device().idle():
        runner.warm_up(WarmupRequest(8, 64, 4, 31 * BLOCK))
    return runner


def rows() -> list[ShardSequence]:
    blocks = tables(TEXTS, shuffle=3, new=NEW)
    texts = zip(TEXTS, ASKED, strict=True)
    return [sequence(i, text, blocks[i], NEW, seed=i, **a) for i, (text, a) in enumerate(texts)]


def take(batch: list[ShardSequence], counts: list[int], result: StepResult) -> None:
    for row, count, got in zip(batch, counts, result.rows, strict=True):
        assert got.fault is None, got.fault
        row.computed += count
        for token in got.token_ids:
            row.token_ids[row.length] = token
            row.length += 1
            row.remaining -= 1


def answers(runner: Runner, device: StandInDevice | None = None) -> list[list[int]]:
    """Run three rows, the last of which joins late, to their ends; decodes are counted."""
    batch, running = rows(), list[ShardSequence]()
    for joining in ([batch[0], batch[1]], [batch[2]], *[[]] * (NEW - 1)):
        running = [row for row in running + joining if row.remaining]
        counts = [row.length - row.computed for row in running]
        step = plan(running, counts)
        if device is not None:
            device.counts = Counts()
        take(running, counts, runner.launch(step).result())
        if device is not None:
            assert not device.counts.waits and device.counts.event_waits == 1
    return [generated(row) for row in batch]


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_say_what_the_cpu_says(
    checkpoint: Callable[..., Path], device: StandInDevice, family: str
) -> None:
    """Prefills, decodes, a row that joins; every way to choose; not one wait but for the result."""
    folder = checkpoint(family)
    expected = answers(start(folder, "cpu"))
    assert answers(start(folder, "cuda:0", (1, 2, 4)), device) == expected
    assert device.counts.replays == 1 and not device.counts.launches  # a decode is one launch


def test_launched_steps_say_what_the_cpu_says(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    folder = checkpoint("llama")
    assert answers(start(folder, "cuda:0"), device) == answers(start(folder, "cpu"))


def test_a_step_is_computed_from_tokens_that_nobody_has_read(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    folder = checkpoint("llama")
    expected = answers(start(folder, "cpu"))
    runner = start(folder, "cuda:0", (4,))
    batch = Batch(vocab_size=512, block_size=BLOCK, blocks=32, eos_ids=())
    for i, (text, asked) in enumerate(zip(TEXTS, ASKED, strict=True)):
        settings = SamplingParameters(seed=i, **asked)
        blocks = list(range(1 + 2 * i, 3 + 2 * i))
        ids = np.array(text, np.int32)
        batch.add(PrefillRow(i, ids, len(text), 0, blocks, NEW, sampling=settings))
    rows, flying = batch.rows, None
    while True:
        step = batch.plan(100)
        assert step is None or runner.runs_ahead(step)
        device.counts = Counts()
        pending = None if step is None else runner.launch(step)
        if flying is not None and step is not None:  # which the device waits for in between
            assert (device.counts.sent, device.counts.received) == (1, 1)
        if flying is not None:
            batch.settle(flying[0], flying[1].result())
        if step is None or pending is None:
            break
        batch.expect(step)
        flying = (step, pending)
    assert [generated(row) for row in rows] == expected


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", LAYERED)
def test_launches_of_a_layer_are_few(
    checkpoint: Callable[..., Path],
    device: StandInDevice,
    family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a prefill too long to be divided: what one layer more takes."""
    from tgi_trio.shard.torch_backend.attention.paged import split_kv

    monkeypatch.setattr(split_kv, "_PROGRAMS", 1)
    launched = []
    for folder in layered(checkpoint, family):
        # In half precision DeepSeek's routers want their input in another dtype than the rest.
        dtype = "bfloat16" if family == "deepseek_v2" else "float32"
        runner, (row, *_) = start(folder, "cuda:0", dtype=dtype), sequences(TEXTS, new=NEW)
        device.counts = Counts()
        with device.idle():
            runner.launch(plan([row], [row.length])).result()
        launched.append(Counter(device.counts.launches))
    a_layer = (launched[1] - launched[0]).total()
    assert a_layer == LAYERED[family], launched
    if family == "llama":  # outside of its two: tables copied, tiles, embedding, head, choice
        assert launched[0].total() - 2 * a_layer <= 11, launched


def test_launches_of_a_layer_are_fewer_for_a_lone_row(
    checkpoint: Callable[..., Path], device: StandInDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where products have sums, norms and gates in their launch, and then heads, too."""
    from tgi_trio.shard.torch_backend.attention.paged import split_kv

    monkeypatch.setattr(split_kv, "_PROGRAMS", 1)
    folders, a_layer = [checkpoint("llama"), checkpoint("llama", **ONE_MORE)], []
    for turned in (frozenset[int](), frozenset({1})):
        launched = []
        for folder in folders:
            runner, (row, *_) = start(folder, "cuda:0"), rows()
            assert isinstance(runner, TorchRunner) and isinstance(runner.model, Decoder)
            for each in runner.model.projections():
                each.linear.fused = frozenset({1})
            for own, _ in runner.model.head_projections():
                own.linear.turned = turned
            row.computed, device.counts = row.length - 1, Counts()
            with device.idle():
                runner.launch(plan([row], [1])).result()
            launched.append(device.counts.launches.total())
        a_layer.append(launched[1] - launched[0])
    assert a_layer == [6, 5]


def test_a_warm_up_records_what_it_has_run_once(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    """Three sizes: steps and choices with masks, and two with prompts. First of all come those that
    measure how few tokens are looked up, of four sizes in two ways.
    """
    device.counts = Counts()
    start(checkpoint("llama"), "cuda:0", (1, 2, 4))
    assert device.counts.recordings == 2 * 4 + 2 * 3 + 2
    # One row, two and many; decodes, prefills and one beside the other; with masks and without.
    idle = 3 * 3 * 2
    assert device.counts.launches["choose_tokens"] == 2 * (2 * 3 + 2) + idle
    assert device.counts.launches["fill_tokens"] == 2 * (3 + 2) + idle // 2


def test_sequences_may_be_shorter_than_the_prompt_of_an_idle_step(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    """What turns positions is kept for as many as a sequence may have."""
    runner = start(checkpoint("llama"), "cuda:0")
    with device.idle():
        runner.warm_up(WarmupRequest(8, 12, 2, 31 * BLOCK))
    row = sequence(0, [7, 3, 5], tables([[7, 3, 5]], shuffle=3, new=1)[0], 1)
    row.computed = row.length - 1
    assert np.isfinite(runner.launch(plan([row], [1])).result().choices.logprobs).all()


def test_an_idle_step_that_is_measured_is_a_whole_one(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    runner = start(checkpoint("llama"), "cuda:0", (1, 2))
    assert isinstance(runner, TorchRunner) and isinstance(runner.model, Decoder)
    graphs, cache = runner._graphs, runner._cache
    assert graphs is not None and cache is not None
    chosen: list[str] = ["count_tokens", "survey_scores", "choose_tokens"]
    with device.idle():
        step, device.counts = graphs._recorder.idle(2, cache, 4), Counts()
        logits = step()
    assert logits.shape == (2, runner.model.spec.vocab_size)
    assert all(device.counts.launches[name] == 1 for name in ("fill_tokens", *chosen))


def test_positions_are_turned_by_what_is_kept(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    """Not where that depends on the length."""
    for options, kept in (({}, True), (DYNAMIC, False)):
        runner = start(checkpoint("llama", **options), "cuda:0")
        assert isinstance(runner, TorchRunner) and isinstance(runner.model, Decoder)
        (rotary,) = runner.model.rotaries
        positions = torch.tensor([0, 5, 63]).to(DEVICE)
        found = rotary.table(positions, positions, torch.float32)
        assert (rotary._kept is not None) == kept
        rotary._kept = None
        again = rotary.table(positions, positions, torch.float32)
        for ours, theirs in zip(found[:2], again[:2], strict=True):
            assert ours.shape == theirs.shape and ours.tolist() == theirs.tolist()


def test_a_second_warm_up_keeps_nothing_of_the_first(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    import gc
    import weakref

    runner = start(checkpoint("llama"), "cuda:0", (1,))
    assert isinstance(runner, TorchRunner) and runner._cache is not None
    old = weakref.ref(runner._cache.key)
    with device.idle():
        runner.warm_up(WarmupRequest(8, 64, 4, 31 * BLOCK))
    gc.collect()
    assert old() is None


def test_frequencies_that_grow_with_the_length_can_be_recorded(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    folder = checkpoint("llama", **DYNAMIC)
    assert answers(start(folder, "cuda:0", (4,)), device) == answers(start(folder, "cpu"))
