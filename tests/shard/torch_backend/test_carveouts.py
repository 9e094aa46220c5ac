"""Carve-outs of recordings of few rows: chosen by what steps take, told to the nodes of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import prompts
from tgi_trio.shard.torch_backend import device_parts
from tgi_trio.shard.torch_backend.recordings import carveouts, graph_nodes
from tgi_trio.shard.torch_backend.recordings.carveouts import Carveouts, CarvingCapture
from tgi_trio.shard.torch_backend.recordings.cuda_graphs import CudaCapture
from tgi_trio.shard.torch_backend.recordings.graph_nodes import DriverError, open_nodes
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    CaptureError,
    Compute,
    Ends,
    StepKind,
)
from tgi_trio.shard.torch_backend.recordings.step_recorder import StepRecorder

need_triton()

from tests.shard.torch_backend.stand_in_support import (  # noqa: E402  (it imports Triton)
    REQUEST,
    drive,
    small_device,
    start,
)
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.stand_in_driver import Graph  # noqa: E402
from tgi_trio.testing.stand_in_nodes import StandInNodes  # noqa: E402

DEVICE = torch.device("cuda:0")
Seen = list[tuple[int, int | None]]  # rows and carve-outs of what was timed


@pytest.fixture
def driver() -> Iterator[StandInNodes]:
    library = StandInNodes()
    with StandInDevice(), mock.patch.object(graph_nodes, "load_driver", lambda: library):
        yield library


def idle(rows: int) -> Compute:
    """Return a step of a copy and as many kernels as it has rows."""
    x, y = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)

    def compute() -> torch.Tensor:
        found = y.copy_(x)
        for _ in range(rows):
            found = found + 1
        return found

    return compute


def carveout_of(graph: Graph) -> int | None:
    """Return what all kernels of a graph prefer, and nothing else; None: what the driver does."""
    found = graph.carveouts
    assert found is not None, "it has not been instantiated"
    kernels = {place for place, kernel in enumerate(graph.kernels) if kernel}
    assert kernels and set(found) in (set(), kernels)
    assert len(set(found.values())) < 2
    return next(iter(found.values()), None)


class Times:
    """What steps take, by rows: a part of a second, and what carve-outs make of it."""

    def __init__(self, saved: dict[int, dict[int, float]], took: float = 1e-3) -> None:
        self.saved, self.took = saved, took
        self.seen: Seen = []

    def __call__(self, graph: Any) -> float:
        rows, carveout = sum(graph.kernels), carveout_of(graph)
        self.seen.append((rows, carveout))
        return self.took * self.saved.get(rows, {}).get(carveout or 0, 1.0)


def carved(times: Callable[[Any], float]) -> Carveouts:
    return Carveouts(CudaCapture(DEVICE, nodes=open_nodes(DEVICE)), times)


def recorded(found: Carveouts, rows: int) -> Graph:
    graph, hidden = found.record(rows, idle(rows))
    assert isinstance(graph, Graph)
    graph.replay()
    assert hidden.tolist() == [1.0 + rows] * 4
    return graph


def test_each_number_of_rows_has_what_takes_a_hundredth_less(driver: StandInNodes) -> None:
    saved = {1: {100: 0.94, 72: 0.97}, 2: {72: 0.98, 44: 0.96}, 4: {100: 0.995}, 16: {44: 1.1}}
    found = carved(times := Times(saved))
    found.choose([32, 1, 16, 2, 4], idle)
    assert found.chosen == {1: 100, 2: 44}
    tried = (None, 100, 72, 44)
    assert times.seen == [(rows, each) for rows in (1, 2, 4, 16) for each in tried]
    graphs = {rows: recorded(found, rows) for rows in (32, 16, 4, 2, 1)}
    wanted = {32: None, 16: None, 4: None, 2: 44, 1: 100}
    assert {rows: carveout_of(graph) for rows, graph in graphs.items()} == wanted


def test_another_warm_up_forgets_what_was_chosen(driver: StandInNodes) -> None:
    times = Times({1: {100: 0.9}})
    found = carved(times)
    found.choose([1, 2], idle)
    assert found.chosen == {1: 100}
    times.saved = {2: {72: 0.9}}
    found.choose([1, 2], idle)
    assert found.chosen == {2: 72} and carveout_of(recorded(found, 1)) is None
    found.choose([], idle)
    assert not found.chosen


@pytest.mark.parametrize(
    ("took", "tried"), [(0.001, [4, 4]), (0.005, [4, 1]), (0.01, [2, 0]), (0.03, [1, 0])]
)
def test_no_more_are_tried_than_there_is_time_for(
    driver: StandInNodes, took: float, tried: list[int]
) -> None:
    found = carved(times := Times({}, took))
    found.choose([1, 2], idle)
    assert [sum(rows == each for rows, _ in times.seen) for each in (1, 2)] == tried


def test_one_that_finds_other_numbers_is_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    saved = {None: 1e-3, 100: 5e-4, 72: 9e-4, 44: 1e-3}

    def capture(compute: Compute, /, carveout: int | None = None) -> tuple[Any, torch.Tensor]:
        return SimpleNamespace(took=saved[carveout]), compute() + (carveout == 100)

    def took(graph: Any) -> float:
        return float(graph.took)

    found = Carveouts(capture, took)
    found.choose([1], lambda rows: lambda: torch.ones(rows))
    assert found.chosen == {1: 72}
    assert carveouts._LEFT in capsys.readouterr().err


def test_what_the_driver_refuses_is_left_to_it(
    driver: StandInNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.known = ()  # an older one
    found = carved(Times({1: {100: 0.5}}))
    found.choose([1, 2], idle)
    assert not found.chosen and carveout_of(recorded(found, 1)) is None
    told = capsys.readouterr().err
    assert told == f"{carveouts._LEFT}: cuGraphKernelNodeSetAttribute returned 1\n"


def test_a_step_that_cannot_be_recorded_so_is_recorded_without(
    driver: StandInNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    found = carved(Times({1: {100: 0.5}, 2: {100: 0.5}}))
    found.choose([1, 2], idle)
    instantiate = Graph.instantiate

    def refuse(graph: Graph) -> None:
        if graph.attributes:
            raise RuntimeError("CUDA error: invalid argument")
        instantiate(graph)

    with mock.patch.object(Graph, "instantiate", refuse):
        assert carveout_of(recorded(found, 2)) is None and not found.chosen
    assert carveout_of(recorded(found, 1)) is None
    told = capsys.readouterr().err
    assert "CUDA error: invalid argument" in told and len(told.splitlines()) == 1


@pytest.mark.parametrize("tried", [1, 2], ids=["while choosing", "when recorded"])
def test_so_is_one_whose_capture_fails(capsys: pytest.CaptureFixture[str], tried: int) -> None:
    captures = list[int | None]()

    def capture(compute: Compute, /, carveout: int | None = None) -> tuple[Any, torch.Tensor]:
        captures.append(carveout)
        if captures.count(100) == tried and carveout == 100:
            raise CaptureError("memory is used up")
        return SimpleNamespace(carveout=carveout), compute()

    found = Carveouts(capture, lambda graph: 5e-4 if cast(Any, graph).carveout == 100 else 1e-3)
    found.choose([1], lambda rows: lambda: torch.ones(rows))
    graph, _ = found.record(1, lambda: torch.ones(1))
    assert cast(Any, graph).carveout is None and captures.count(100) == tried
    assert capsys.readouterr().err == f"{carveouts._LEFT}: memory is used up\n"


def test_nodes_are_told_where_the_driver_can_be(
    driver: StandInNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_nodes(DEVICE) is not None
    assert open_nodes(torch.device("cpu")) is None and open_nodes(torch.device("xpu")) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.0")
        assert open_nodes(DEVICE) is None
    with monkeypatch.context() as patch:
        patch.delattr(Graph, "raw_cuda_graph")  # torch 2.7
        assert open_nodes(DEVICE) is None
    del driver.cuGraphKernelNodeSetAttribute
    assert open_nodes(DEVICE) is None


def test_a_graph_that_the_driver_does_not_know_is_an_error(driver: StandInNodes) -> None:
    nodes = open_nodes(DEVICE)
    assert nodes is not None
    with pytest.raises(DriverError, match="cuGraphGetNodes returned 1"):
        nodes.prefer_carveout(7, 100)


def test_without_a_driver_nothing_is_told() -> None:
    with StandInDevice():
        assert open_nodes(DEVICE) is None
        with pytest.raises(DriverError):
            CudaCapture(DEVICE)(idle(1), 100)


@pytest.fixture
def device(checkpoint: Callable[..., Path]) -> Iterator[StandInDevice]:
    with (
        small_device(checkpoint) as stand_in,
        mock.patch.object(graph_nodes, "load_driver", StandInNodes),
    ):
        yield stand_in


def test_plain_steps_of_a_runner_have_what_was_measured(
    checkpoint: Callable[..., Path], device: StandInDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not steps with adapters, nor choices with masks; another warm-up forgets what takes more."""
    texts: list[list[int]] = prompts(2, longest=9)
    asked: list[dict[str, Any]] = [{}, {"sample": True}]
    folder = checkpoint("llama", **SMALL)
    wanted = drive(start(folder, "cpu"), texts, asked).tokens
    took = iter([1e-3, 9e-4, 8e-4, 1e-3, *[1e-3] * 4, 1e-3, 9e-4, 1e-3, 1e-3])  # for 1, 2, 4 rows

    def make(capture: CarvingCapture, seconds: object) -> Carveouts:
        return Carveouts(capture, lambda graph: next(took, 1e-3))

    monkeypatch.setattr(device_parts, "Carveouts", make)
    served: dict[str, Any] = {"max_lora_rank": 4, "max_loaded_adapters": 1}
    runner = start(folder, "cuda:0", (1, 2, 4), **served)
    assert isinstance(runner, TorchRunner)
    assert recorded_carveouts(runner) == {1: 72, 2: None, 4: 100}
    assert drive(runner, texts, asked, device=device).tokens == wanted
    with device.idle():
        runner.warm_up(REQUEST)
    assert recorded_carveouts(runner) == {1: None, 2: None, 4: None}


def recorded_carveouts(runner: TorchRunner) -> dict[int, int | None]:
    """Return what plain steps of a runner prefer, by rows; AssertionError: others do, too."""
    graphs: Any = runner._graphs
    for each in graphs._recorded.values():
        assert carveout_of(each.masked.graph) is None
        assert carveout_of(each.steps[StepKind(adapted=True)].graph) is None
    return {
        size: carveout_of(each.steps[StepKind()].graph) for size, each in graphs._recorded.items()
    }


def test_idle_steps_of_more_rows_have_memory_of_their_own() -> None:
    """As they are measured behind those of fewer, whose scores would not hold theirs."""
    sampler: Any = SimpleNamespace(drafting=object(), make_scores=lambda size: torch.zeros(size, 4))
    nothing: Any = None
    ends = Ends(nothing, nothing, sampler)
    recorder = StepRecorder(
        *(nothing, nothing, nothing, torch.device("cpu"), ends, None, None, None)
    )
    for rows in (1, 4, 2):
        assert recorder._own_scores(sampler, rows).shape == (rows, 4)
        assert recorder._own_hidden(torch.ones(rows, 3)).tolist() == [[1.0] * 3] * rows
    assert recorder.scores is not None and len(recorder.scores) == 4


def test_nothing_is_tried_on_a_cpu(checkpoint: Callable[..., Path]) -> None:
    runner = start(checkpoint("llama", **SMALL), "cpu", (1, 2))
    assert isinstance(runner, TorchRunner)
    assert runner._graphs is None or runner._graphs.carveouts is None
