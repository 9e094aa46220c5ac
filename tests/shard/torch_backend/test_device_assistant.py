"""An assistant of Gemma 4 reads the model's keys and values on a device as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.shard.speculation.assistant_support import assistant, gemma4
from tests.shard.speculation.heads_support import Watched, answer
from tests.shard.torch_backend.interpreter import need_triton
from tgi_trio.ipc.messages import SamplingParameters

need_triton()

from tests.shard.torch_backend.stand_in_support import (  # noqa: E402  (it imports Triton)
    small_device,
    start,
)
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.stand_in_driver import Counts  # noqa: E402

TEXTS = [[5, 6, 7, 8, 9], [7, 300, 21, 22, 4, 9, 9, 3, 12, 90, 91, 14]]
GREEDY = SamplingParameters(ignore_eos=True)


@pytest.fixture
def device(checkpoint: Callable[..., Path]) -> Iterator[StandInDevice]:
    with small_device(checkpoint) as stand_in:
        yield stand_in


def test_drafts_are_the_cpu_s(device: StandInDevice, tmp_path: Path) -> None:
    base = gemma4(tmp_path / "base", "gemma4_unified_text")
    folder = assistant(tmp_path / "own", base)
    found = []
    for where in ("cpu", "cuda:0"):
        device.counts = Counts()
        runner = start(base, where, (2,), draft_model=folder, speculate=3)
        drafter = runner.drafter(3)
        assert drafter is not None
        watched = Watched(drafter)
        answers = answer(runner, TEXTS, [GREEDY] * 2, 8, drafter=watched)
        assert answers.drafts > 4
        found.append((answers.tokens, watched.drafted))
    assert found[0] == found[1]
    assert device.counts.launches["merge_parts"]  # our kernels have read the model's cache
