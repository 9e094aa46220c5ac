"""Decodes that attend to images over the stand-in device: recorded like any others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.shard.image_support import Told
from tests.shard.media.images_support import Maker, Shard, arena
from tests.shard.media.pictures import Prompt, picture
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import generated
from tgi_trio.shard.contract import StepPlan, StepResult

need_triton()

from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402  (it imports Triton)
from tests.shard.torch_backend.stand_in_support import start  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.stand_in_driver import Counts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 3
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1}  # which the kernels fit


# What puts images that are seen together side by side, and what tells n-grams of new rows.
ONCE = {"index_select", "cat", "index_copy_", "write_texts"}


class Counting:
    """A runner that keeps what its decodes launch."""

    def __init__(self, runner: Any, device: StandInDevice) -> None:
        self._runner, self._device = runner, device
        self.decodes: list[Counts] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, plan: StepPlan) -> StepResult:
        self._device.counts = Counts()
        result: StepResult = self._runner.step(plan)
        if not plan.counts.prefill_tokens:
            self.decodes.append(self._device.counts)
        return result


@pytest.mark.parametrize(
    ("family", "memory", "drafts"),
    [("idefics", 2**17, True), ("mllama", 2**17, False), ("mllama", 0, True)],
)
def test_decodes_are_recorded_whatever_their_rows_see(
    model: Maker, monkeypatch: pytest.MonkeyPatch, family: str, memory: int, drafts: bool
) -> None:
    """An image, two that are neighbours, none; where there are no pages, steps are launched."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    own = model(family, **SIZES)
    one, two = (picture(family, seed) for seed in (1, 2))
    prompts = [Prompt.of(5, one, 6), Prompt.of(7, 8, 9), Prompt.of(one, two, 10)]
    expected = [own.golden.generate(each, NEW) for each in prompts]
    told = Told(expected if drafts else [[]] * 3, prompts)
    with StandInDevice() as device, arena() as pixels:
        started = start(own.folder, "cuda:0", (1, 4, 8), feature_memory=memory, speculate=2)
        runner = Counting(started, device)
        shard = Shard(runner, own.tower, pixels, rules=own.rules, drafter=told)
        rows = [shard.add(i, each, NEW) for i, each in enumerate(prompts[:2])]
        for _ in range(2):
            shard.step()
        rows.append(shard.add(2, prompts[2], NEW))
        shard.run()
    assert [generated(row) for row in rows] == expected
    assert bool(shard.drafted) == drafts
    recorded = [counts for counts in runner.decodes if counts.replays]
    assert recorded == (runner.decodes if memory else [])
    assert all(counts.launches.keys() <= ONCE and not counts.waits for counts in recorded)
    joined = [counts for counts in recorded if counts.launches["cat"]]
    assert len(joined) == (family == "mllama" and memory > 0)


def test_every_rank_records_its_heads(model: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)
    own = model("mllama", num_attention_heads=2, num_key_value_heads=2)
    prompts = [Prompt.of(5, picture("mllama", 1), 6), Prompt.of(7, 8, 9)]
    expected = [own.golden.generate(each, NEW) for each in prompts]
    with StandInDevice() as device, arena() as pixels:
        with two_ranks(own.folder, device, (2,), feature_memory=2**17) as (runner, follower):
            counting = Counting(runner, device)
            shard = Shard(counting, own.tower, pixels, rules=own.rules)
            rows = [shard.add(i, each, NEW) for i, each in enumerate(prompts)]
            shard.run()
    assert [generated(row) for row in rows] == expected
    for counts in (*counting.decodes, *follower[-NEW + 1 :]):
        assert counts.replays == 1 and not counts.launches and not counts.waits
