"""Kernels of a rehearsal read and write their own memory, whichever of them are launched."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.shard.torch_backend.models_support import BLOCK
from tests.shard.torch_backend.test_warm_kernels import Key, compiled_for
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.torch_backend import device_parts, torch_loading, torch_runner
from tgi_trio.shard.torch_backend.attention.paged import split_kv
from tgi_trio.shard.torch_backend.compiling.ahead import ZeroedMemory
from tgi_trio.shard.torch_backend.layers.adapters import slotted_linear
from tgi_trio.shard.torch_backend.layers.linears import coded_linear
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

need_triton()
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="an interpreter says what is outside")

from tgi_trio.testing.sanitizer.sanitizer import Sanitizer  # noqa: E402  (it imports Triton)
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "adapters": ("llama", (2,), {"max_lora_rank": 16, "max_loaded_adapters": 2}),
    "drafts": ("llama", (2,), {"speculate": 2}),
    "codes": ("llama", (2,), {"quantize": "int4"}),
    "experts": ("mixtral", (), {}),
    "latents": ("deepseek_v3", (), {}),
    "an index, hidden states": ("hy_v4", (2,), {}),
}


class Rehearsed(Exception):
    """What comes behind it is not looked at."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_kernels_stay_in_their_memory(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Half of them are not launched, as those are that are still being compiled."""
    family, graphs, settings = CASES[case]
    for module in (split_kv, coded_linear):
        monkeypatch.setattr(module, "_PROGRAMS", 4)
    small, large = (tile._replace(inputs=128, outputs=256) for tile in slotted_linear._WIDE_TILES)
    monkeypatch.setattr(slotted_linear, "_WIDE_TILES", slotted_linear.AdapterTiles(small, large))
    folder = checkpoint(family, **(SMALL if family == "llama" else {}))
    told = ShardSettings(model_path=folder, dtype="float32", **settings)
    draw, launched, sanitizer = random.Random(case), list[str](), Sanitizer(bounds_only=True)
    with StandInDevice() as device:
        runner = load_torch_runner(
            told, read_config(told.model_path), device="cuda:0", graph_sizes=graphs
        )
        launch = device.launch_kernel

        def launch_some(function: Any, *args: Any, **kwargs: Any) -> None:
            if draw.random() < 0.5:
                launched.append(function.fn.__name__)
                launch(function, *args, **kwargs)

        def rehearse(_: object, work: Callable[[], None]) -> int:
            with ZeroedMemory(), sanitizer.on(), monkeypatch.context() as patched:
                patched.setattr(device, "launch_kernel", launch_some)
                work()
            raise Rehearsed

        monkeypatch.setattr(torch_runner, "compile_ahead", rehearse)
        with pytest.raises(Rehearsed):
            runner.warm_up(WarmupRequest(40, 64, 3, 31 * BLOCK))
    assert len(set(launched)) > 5
    assert not sanitizer.findings.take()


def test_nothing_is_begun_that_nobody_ends(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers end with the warm-up of a runner that has kernels; transformers' has none."""
    begun: list[object] = []
    monkeypatch.setattr(torch_loading, "begin_early", begun.append)
    for family, expected in (("codegen", 0), ("llama", 1)):
        load_torch_runner(
            ShardSettings(model_path=checkpoint(family), dtype="float32"),
            read_config(checkpoint(family)),
        )
        assert len(begun) == expected


CHOICES = {"count_tokens", "survey_scores", "choose_tokens"}


def test_what_chooses_is_asked_for_before_a_model_is_loaded(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all variants that the warm-up launches."""
    early, late = set[Key](), set[Key]()
    folder = checkpoint("llama")
    with StandInDevice() as device, device.idle():
        noted, launch = late, device.launch_kernel

        def note(function: Any, *args: Any, **kwargs: Any) -> None:
            if function.fn.__name__ in CHOICES:
                noted.add(compiled_for(function, args, kwargs))
            launch(function, *args, **kwargs)

        def rehearse(_: object, work: Callable[[], None]) -> None:
            nonlocal noted
            noted = early
            work()
            noted = late

        monkeypatch.setattr(device, "launch_kernel", note)
        monkeypatch.setattr(device_parts, "rehearse_early", rehearse)
        told = ShardSettings(model_path=folder, dtype="bfloat16")
        runner = load_torch_runner(
            told, read_config(told.model_path), device="cuda:0", graph_sizes=(1, 2)
        )
        assert not late
        runner.warm_up(WarmupRequest(40, 64, 3, 31 * BLOCK))
    assert late and late <= early
