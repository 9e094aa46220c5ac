"""Prompts with images over the stand-in device: steps of images launched, others recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shard.image_support import FAMILIES, Whole, make_prompts, run
from tests.shard.torch_backend.interpreter import need_triton

need_triton()

from tests.shard.torch_backend.stand_in_support import start  # noqa: E402  (it imports Triton)
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.wrapped_checkpoints import make_wrapped  # noqa: E402


@pytest.mark.parametrize(("family", "texts"), [("gemma3", 2), ("qwen3_vl", 0)])
def test_tokens_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, texts: int
) -> None:
    """`texts`: chunks without an image's tokens, which are recordings, too."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    folder = make_wrapped(tmp_path, family, **FAMILIES[family])
    prompts = make_prompts(family)[:1]
    whole = Whole(folder, family)
    expected = [whole.generate(each)[0] for each in prompts]
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (1,))
        before = device.counts.replays
        assert run(runner, family, prompts, budget=8) == expected
        assert device.counts.replays - before == texts + len(expected[0]) - 1
