"""Ranks rehearse what they will launch by themselves: nothing is told, and nobody waited for."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.interpreter import need_triton

need_triton()

from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402  (Triton's)
from tests.shard.torch_backend.stand_in_support import small_device  # noqa: E402
from tgi_trio.shard.torch_backend import torch_runner  # noqa: E402
from tgi_trio.shard.torch_backend.compiling.ahead import ZeroedMemory  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

COLLECTIVES = {"all_reduce", "all_gather", "broadcast"}


@pytest.mark.parametrize("graphs", [(), (2,)])
def test_every_rank_rehearses_what_it_launches(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, graphs: tuple[int, ...]
) -> None:
    rehearsed: dict[str, set[str]] = defaultdict(set)  # names of launches, by device
    warmed: dict[str, set[str]] = defaultdict(set)
    here = threading.local()
    launch = StandInDevice.launch

    def note(device: StandInDevice, name: str, run: Callable[[], None]) -> None:
        noted = rehearsed if getattr(here, "rehearses", False) else warmed
        noted[str(device.place)].add(name)
        launch(device, name, run)

    def compile_ahead(device: torch.device, work: Callable[[], Any]) -> int:
        here.rehearses = True
        with ZeroedMemory():
            work()
        here.rehearses = False
        return 0

    monkeypatch.setattr(StandInDevice, "launch", note)
    monkeypatch.setattr(torch_runner, "compile_ahead", compile_ahead)
    with (
        small_device(checkpoint) as device,
        two_ranks(checkpoint("llama", **SMALL), device, graphs),
    ):
        pass
    assert set(warmed) == set(rehearsed) == {"cuda:0", "cuda:1"}
    for place, launched in warmed.items():
        assert launched >= COLLECTIVES and not rehearsed[place] & COLLECTIVES
        assert rehearsed[place] == launched - COLLECTIVES
