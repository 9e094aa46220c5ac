"""Which clock the worker of llama.cpp reads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.model.cases import CASES
from bench.peers import llama_worker
from bench.peers.llama_binding import Token

_WALL, _PROCESSOR = 5.0, 2.0  # seconds of a computation


class Clocks:
    """Two clocks, which move when something is computed."""

    def __init__(self) -> None:
        self.computed = 0

    def compute(self, tokens: Sequence[Token]) -> None:
        self.computed += 1

    def forget(self, sequence: int, first: int) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("name", ["decode 8", "prefill 512"])
@pytest.mark.parametrize(("processor", "seconds"), [(False, _WALL), (True, _PROCESSOR)])
def test_processor_time_is_measured_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, name: str, processor: bool, seconds: float
) -> None:
    clocks = Clocks()

    @contextmanager
    def context(*_: Any, **__: Any) -> Iterator[Clocks]:
        yield clocks

    monkeypatch.setattr(llama_worker, "Context", context)
    monkeypatch.setattr(time, "perf_counter", lambda: _WALL * clocks.computed)
    monkeypatch.setattr(time, "process_time", lambda: _PROCESSOR * clocks.computed)
    libraries: Any = None
    with ExitStack() as stack:
        measurer = llama_worker.Measurer(libraries, Path("a.gguf"), 1, stack)
        assert measurer.measure(replace(CASES[name], processor=processor)) == 1e3 * seconds
