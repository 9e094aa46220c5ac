"""A device that takes no time, and a model on it that computes nothing: what is left is the host's.

Its memory is the host's, its events are over when they are recorded, and a recording does nothing
when it is replayed, so that every step chooses the same token. Everything else is what a device
gets: plans become arrays, arrays are packed and copied, and what came down is read. To be imported
where TRITON_INTERPRET is set: nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpretedFunction

from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest, WarmupResult
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.torch_backend import staging
from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape
from tgi_trio.shard.torch_backend.recordings.decode_graphs import DecodeGraphs
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    Compute,
    Ends,
    Graph,
)
from tgi_trio.shard.torch_backend.recordings.step_forward import MOST_CHOICES, StepForward
from tgi_trio.shard.torch_backend.recordings.token_source import TokenSource
from tgi_trio.shard.torch_backend.sampling.choice_masks import ChoiceMasks
from tgi_trio.shard.torch_backend.sampling.device_gaps import choose_in_gaps
from tgi_trio.shard.torch_backend.sampling.device_sampler import DeviceSampler
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler, permutation
from tgi_trio.shard.torch_backend.steps import device_steps
from tgi_trio.shard.torch_backend.steps.device_steps import DeviceSteps
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

VOCAB, TOKEN, WIDTH = 4096, 7, 16
_LISTED = 64  # tokens beside a choice
_CPU = torch.device("cpu")


class FreeEvent:
    """Over when it is recorded."""

    def record(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FreeEvent) -> float:
        return 0.0


class _FreeGraph:
    def replay(self) -> None: ...


class _FreeCapture:
    """Runs work once, for what it returns."""

    def __call__(self, compute: Compute) -> tuple[Graph, torch.Tensor]:
        return _FreeGraph(), compute()


class FreeGrammars:
    """Masks that are there already, and allow everything."""

    def __init__(self) -> None:
        self._masks = np.full((MOST_CHOICES, VOCAB // 8), 255, np.uint8)

    def start(self) -> None: ...

    def prepare(self, sequence: ShardSequence) -> bool:
        return True

    def drop(self, sequence: ShardSequence) -> None: ...
    def rewind(self, sequence: ShardSequence) -> None: ...

    def pieces(self, ids: NDArray[np.int64]) -> list[bytes]:
        raise ValueError("no row fills a gap here")

    def allowed(self, sequences: list[ShardSequence]) -> tuple[NDArray[np.uint8], dict[int, str]]:
        return self._masks[: len(sequences)], {}


class _FreeModel:
    """Zeros, of the right shapes."""

    kv_shape = KVShape(1, 1, WIDTH)
    needs_lengths, prefix_reuse, predicts_prompt, capturable = False, True, True, True

    def forward(self, token_ids: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        return torch.zeros((len(token_ids), WIDTH))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros((len(hidden), VOCAB))

    def nbytes(self) -> int:
        return 0


class FreeRunner(TorchRunner):
    """The runner of devices, with a warm-up that measures no memory."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        """`sizes`: of recordings."""
        grammars = FreeGrammars()
        model: Any = _FreeModel()
        config: Any = SimpleNamespace(vocab_size=VOCAB, eos_ids=(2,), max_positions=1 << 20)
        chooser = DeviceSampler(VOCAB, config.eos_ids, _CPU, MOST_CHOICES)
        attention, tokens = PagedAttention(_CPU), TokenSource(chooser.chosen)
        sampler = Sampler(VOCAB, config.eos_ids, _CPU, grammars=grammars)
        capture: Any = _FreeCapture()
        self.free_graphs = DecodeGraphs(
            *(model.forward, attention, capture, sizes, _CPU),
            Ends(tokens, model.logits, chooser),
        )
        computes = StepForward(
            *(model.forward, model.logits, attention, tokens, _CPU), lambda positions: None
        )
        masks = ChoiceMasks(VOCAB, grammars, sampler.watermark, permutation)
        gaps = partial(choose_in_gaps, sampler)
        steps = DeviceSteps(computes, chooser, masks, gaps, self.free_graphs)
        super().__init__(
            *(model, config),
            dtype=torch.float32,
            device=_CPU,
            sampler=sampler,
            attention=attention,
            graphs=self.free_graphs,
            steps=steps,
        )

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        """Make a cache of what is asked for, and the recordings."""
        blocks = 1 + request.max_batch_total_tokens // BLOCK_SIZE
        width = -(-request.max_total_tokens // BLOCK_SIZE)
        self._cache = KVCache(self.model.kv_shape, 1, torch.float32, _CPU)
        if self._steps:
            self._steps.make_room(request.max_batch_size, request.max_total_tokens)
        with torch.inference_mode():
            self.free_graphs.record(self._cache, width, request.max_batch_size)
        return WarmupResult(blocks, BLOCK_SIZE, 0, 0, 0, 0, 0)


@contextmanager
def free_device() -> Iterator[None]:
    """Have everything inside take the host for a device that takes no time."""

    best = torch.arange(_LISTED, dtype=torch.int32)
    best = torch.stack((best, (-0.5 - best.float()).view(torch.int32)), 1)

    def run(function: Any, *args: Any, **kwargs: Any) -> None:
        if function.fn.__name__ == "choose_tokens":
            found, _, listed = args[:3]
            found.copy_(torch.tensor([TOKEN, -0.5, 0.0]))
            listed.fill_(-1)[:, :_LISTED] = best  # as many tokens as are looked at

    threads = torch.get_num_threads()
    with ExitStack() as stack:
        torch.set_num_threads(1)  # a device copies by itself, with no threads of the host's
        stack.callback(torch.set_num_threads, threads)
        for owner, name, value in (
            (InterpretedFunction, "run", run),
            (staging, "is_accelerator", lambda device: True),
            (staging, "record_event", lambda device: FreeEvent()),
            (staging, "_host_bytes", lambda size, pinned: torch.empty(size, dtype=torch.uint8)),
            (device_steps, "record_event", lambda device, timed: FreeEvent()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
