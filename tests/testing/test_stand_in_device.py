"""The stand-in for a device: it raises where a driver would, and counts what a device is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._device import _device_constructors

from tests.shard.torch_backend.interpreter import need_triton

need_triton()

from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402  (it imports Triton)
from tgi_trio.testing.stand_in_tensor import MixedDevices, RecordingBroken  # noqa: E402

DEVICE = "cuda:0"


@pytest.fixture
def device() -> Iterator[StandInDevice]:
    with StandInDevice() as stand_in:
        yield stand_in


def test_tensors_of_two_places_do_not_meet(device: StandInDevice) -> None:
    with pytest.raises(MixedDevices):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    torch.ones(3, device=DEVICE) + torch.tensor(1.0)  # a number is not a place


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.tolist(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x[torch.arange(2)],  # which a device takes, and the host waits
        lambda _: torch.tensor([1.0, 2.0], device=DEVICE),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.cpu(),
        lambda x: torch.accelerator.synchronize(),
    ],
)
def test_waits_are_counted_and_cannot_be_recorded(
    device: StandInDevice, wait: Callable[[torch.Tensor], object]
) -> None:
    x = torch.ones(3, device=DEVICE)
    wait(x)
    assert device.counts.waits.total() == 1
    with pytest.raises(RecordingBroken), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wait(x)


def test_what_is_built_without_memory_is_not_on_the_device(device: StandInDevice) -> None:
    """Torch's code takes the stand-in's tensors for "meta"; who asks for that means it."""
    with torch.device("meta"):
        layer, frequencies = torch.nn.Linear(2, 3), torch.arange(4) / 2
    tensors = (*layer.parameters(), frequencies)
    assert {type(x) for x in tensors} <= {torch.Tensor, torch.nn.Parameter}
    assert {x.device.type for x in tensors} == {"meta"}
    assert torch.empty_like(frequencies, device=DEVICE).device.type == "cuda"


def test_what_is_built_without_memory_later_has_none() -> None:
    """Torch asks once for what constructs tensors, and remembers the answer."""
    _device_constructors.cache_clear()
    with StandInDevice(), torch.device("meta"):
        assert torch.tensor([1.0]).is_meta
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta


def test_lists_are_indices_that_are_copied_from_the_host(device: StandInDevice) -> None:
    numbers = torch.arange(6, device=DEVICE).view(2, 3)
    assert numbers[:, [2, 0]].tolist() == [[2, 0], [5, 3]]
    assert numbers[[1]].tolist() == [[3, 4, 5]]
    assert device.counts.waits["indices come from memory that is not pinned"] == 2


def test_a_replay_computes_again_into_the_same_memory(device: StandInDevice) -> None:
    x, graph = torch.zeros(2, device=DEVICE), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x + 1).view(2, 1) * 2
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [[10.0], [10.0]] and device.counts.replays == 1


def test_nothing_is_computed_by_an_idle_replay(device: StandInDevice) -> None:
    x, graph = torch.zeros(2, device=DEVICE), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    x.fill_(4)
    with device.idle():
        graph.replay()
    assert x.tolist() == [4.0, 4.0] and device.counts.replays == 1
    graph.replay()
    assert x.tolist() == [5.0, 5.0] and device.counts.replays == 2


def test_what_comes_down_is_garbage_until_its_event(device: StandInDevice) -> None:
    x = torch.full((2,), 7, device=DEVICE).to("cpu", non_blocking=True)
    event = torch.Event(DEVICE)
    event.record()
    assert x.tolist() != [7, 7]
    event.synchronize()
    assert x.tolist() == [7, 7] and device.counts.event_waits == 1


def test_views_of_what_is_older_than_inference(device: StandInDevice) -> None:
    """Memory from outside of inference mode is sliced and written inside, as torch does it."""
    with torch.inference_mode(False):
        older = torch.zeros(8, device=device.place)
        with torch.inference_mode():
            older[2:4].fill_(1)
            assert older.view(2, 4).sum().item() == 2
