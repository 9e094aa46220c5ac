"""Other tiles, chunks and precisions than are built in, of a layer of a shape, in one process.

Each computes the same inputs, is first compared with what is built in, and then timed beside it.
Of layers with states, and of what selects, what is built in is itself compared with torch's
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, TypeAlias
from unittest import mock

import numpy as np
import torch

from bench.device.models import config_of, make_runner
from bench.device.selections import list_selections
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.torch_backend.layers.mlp import Mlp
from tgi_trio.shard.torch_backend.recordings.cuda_graphs import CudaCapture, RecordedTime
from tgi_trio.shard.torch_backend.staging import Array
from tgi_trio.shard.torch_backend.states.delta_rule_kernels import ChunkTile
from tgi_trio.shard.torch_backend.states.mamba1_layer import RowTile
from tgi_trio.shard.torch_backend.states.mamba2_layer import ScanTile
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.states.steps import MixerLayer, StateSteps

_BACKEND: Final = "tgi_trio.shard.torch_backend"
_DELTA: Final = "states.delta_rule_kernels.choose_chunk_tile"
_MAMBA2: Final = "states.mamba2_layer.choose_scan_tile"
_MAMBA1: Final = "states.mamba1_layer.choose_tile"
_LAUNCHING: Final = tuple(
    f"states.{name}.runs_kernels"
    for name in (
        *("convolution", "delta_rule_layer", "mamba2_layer", "mamba1_layer"),
        "recurrent_gate_layer",
    )
)
_MOST_ERROR: Final = 0.02  # of outputs, as a part of them: bfloat16 rounds to a 256th
_TOKENS: Final = (8192, 256, 1)  # of a mixture
_LEAST_S: Final = 1e-9  # a stand-in's clock stands still
Found: TypeAlias = Mapping[str, torch.Tensor]
Run: TypeAlias = Callable[[], Found]


def _always(tile: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
    """Return what chooses a tile whatever it is asked for."""
    return lambda *_, **__: tile


# For each shape, the alternatives: names of the backend's, and what takes their places.
ALTERNATIVES: Final[dict[str, dict[str, dict[str, object]]]] = {
    "deltas": {
        "three products of tf32": {_DELTA: _always(ChunkTile(32, 64, "tf32x3", "tf32x3"))},
        "one of tf32, but to invert": {_DELTA: _always(ChunkTile(32, 32, "tf32", "tf32x3"))},
        "chunks of 64": {_DELTA: _always(ChunkTile(64, 32, "bf16x3", "tf32x3"))},
        "chunks of 64, bf16x3 alone": {_DELTA: _always(ChunkTile(64, 32, "bf16x3", "bf16x3"))},
        "chunks of 64, tf32 but to invert": {_DELTA: _always(ChunkTile(64, 32, "tf32", "tf32x3"))},
        "chunks of 16": {_DELTA: _always(ChunkTile(16, 32, "bf16x3", "tf32x3"))},
        "32 channels of values": {"states.delta_rule_kernels.PART": 32},
    },
    "mamba2": {
        "chunks of 16": {_MAMBA2: _always(ScanTile(16, 32, 128, 4, 3, "tf32"))},
        "chunks of 64": {_MAMBA2: _always(ScanTile(64, 32, 128, 4, 3, "tf32"))},
        "chunks of 64, 8 warps": {_MAMBA2: _always(ScanTile(64, 32, 128, 8, 3, "tf32"))},
        "three products of bf16": {_MAMBA2: _always(ScanTile(32, 32, 128, 4, 3, "bf16x3"))},
        "64 numbers of a head": {_MAMBA2: _always(ScanTile(32, 64, 128, 8, 3, "tf32"))},
        "16 numbers of a head": {_MAMBA2: _always(ScanTile(32, 16, 128, 4, 3, "tf32"))},
    },
    "mamba1": {
        "chunks of 8": {_MAMBA1: _always(RowTile(8, 64, 8))},
        "chunks of 32": {_MAMBA1: _always(RowTile(32, 16, 8))},
        "16 channels, 4 warps": {_MAMBA1: _always(RowTile(16, 16, 4))},
    },
    "gates": {
        "chunks of 32": {"states.recurrent_gate_layer.LENGTH": 32},
        "chunks of 128": {"states.recurrent_gate_layer.LENGTH": 128},
        "64 channels": {"states.recurrent_gate_layer.CHANNELS": 64},
    },
    "tokens": {  # selecting alone; a row has up to 512 programs
        "one program a row": {"attention.indexed.selecting.READERS": 1},
        "128 programs": {"attention.indexed.selecting.READERS": 128},
        "2048 programs": {"attention.indexed.selecting.READERS": 2048},
        "8192 scores a part": {"attention.indexed.selecting.PART": 8192},
        "2048 scores a part": {"attention.indexed.selecting.PART": 2048},
        "a sample of 2048": {"attention.indexed.selecting.SAMPLE": 2048},
        "4096 scores in registers": {"attention.indexed.selecting.READ": 4096},
    },
    "mixture": {  # eight are built in
        f"{count} tiles side by side": {"layers.experts.grouped_matrices.TOGETHER": count}
        for count in (1, 4, 16)
    },
}


def measure_alternatives(
    shape: str, device: torch.device, dtype: torch.dtype, *, small: bool
) -> Iterator[dict[str, Any]]:
    """Yield rows: a layer with what is built in, and with each alternative of its shape.

    "error": of outputs, as a part of them, against torch's operations or what is built in;
    "over_built_in": its time as a part of that. An alternative that does not compile, or is wrong,
    says so as "left_out". `small`: for a dry run. Raises ValueError where what is built in is
    wrong.
    """
    name = shape.removeprefix("dry ")
    replay = RecordedTime(device, CudaCapture(device))

    def time_of(run: Run) -> float:
        return max(_LEAST_S, replay(lambda: run()["output"]))

    with torch.inference_mode():
        for told, run, of_torch in _list_runs(shape, device, dtype, small=small):
            known = {name: part.clone() for name, part in run().items()}
            error = _compare(of_torch(), known) if of_torch is not None else 0.0
            if not error <= _MOST_ERROR:  # which it is not either where it is no number
                raise ValueError(f"{told}: what is built in is off by {error:.3f}")
            usual = time_of(run)
            yield {"what": f"{told}, built in", "step_ms": usual * 1e3, "error": error}
            for words, patches in ALTERNATIVES[name].items():
                found = {"what": f"{told}, {words}"}
                with _in_place(patches):
                    yield found | try_one(run, known, time_of, usual)


def try_one(
    run: Run, known: Found, time_of: Callable[[Run], float], usual: float
) -> dict[str, Any]:
    """Return what an alternative took, or why it is left out; see `measure_alternatives`.

    `known`, `usual`: results and seconds of what is built in.
    """
    try:
        error = _compare(run(), known)
        if not error <= _MOST_ERROR:
            return {"left_out": f"off by {error:.3f}", "error": error}
        took = time_of(run)
    except Exception as refused:  # whatever a compiler or a driver says to tiles that do not fit
        return {"left_out": f"{type(refused).__name__}: {refused}"[:200]}
    return {"step_ms": took * 1e3, "error": error, "over_built_in": took / usual}


def _list_runs(
    shape: str, device: torch.device, dtype: torch.dtype, *, small: bool
) -> Iterator[tuple[str, Run, Run | None]]:
    """Yield what is measured of a shape's first layer: its name, itself, and torch's operations."""
    if shape.removeprefix("dry ") == "tokens":
        yield from list_selections(device, small=small)
        return
    model: Any = make_runner(shape, device, dtype, ()).model
    spec, layer = decoder_spec(config_of(shape)), model.layers[0]
    assert spec is not None  # what has been made of it is there
    width, mixer = spec.hidden_size, spec.layers[0].mixer
    if mixer is None:
        for tokens in (3,) if small else _TOKENS:
            x = torch.randn((tokens, width), dtype=dtype, device=device)
            yield f"{tokens} tokens", partial(_feed, layer.mlp, x), None
        return
    for rows, tokens in ((1, 40), (2, 20)) if small else ((1, 8192), (8, 1024)):
        x = torch.randn((rows * tokens, width), dtype=dtype, device=device)
        pool = StatePool({0: mixer.state_shapes(1)}, 1 + 2 * rows, dtype, device)
        run = _run_mixer(layer.mixer, rows, x, pool)

        def of_torch(run: Run = run) -> Found:
            with _in_place({name: lambda _: False for name in _LAUNCHING}):
                return run()

        yield f"{rows} x {tokens} tokens", run, of_torch


def _feed(mlp: Mlp, x: torch.Tensor) -> Found:
    return {"output": mlp(x)}


def _run_mixer(mixer: MixerLayer, rows: int, x: torch.Tensor, pool: StatePool) -> Run:
    """Return what takes as long rows through a layer, each from a state that is there."""
    device, tokens = x.device, len(x) // rows
    states = pool.layers[0]
    for state in states.values():
        state.normal_(std=0.1)
    slots = torch.arange(1, 1 + rows, device=device)
    starts = [row * tokens for row in range(rows + 1)]

    def send(arrays: Sequence[Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]

    steps = StateSteps(starts, slots, slots + rows, torch.zeros_like(slots, dtype=torch.bool), send)

    def run() -> Found:
        return {
            "output": mixer.mix(mixer.inner(x), states, steps),
            "state": states["recurrence"][rows + 1 :],
        }

    return run


def _compare(found: Found, known: Found) -> float:
    """Return how far results are from known ones, as a part of these; the larger one.

    What was found is overwritten, so that whoever gets its memory next cannot leave it there.
    """
    errors = []
    for name, right in known.items():
        wide = right.float()
        errors.append(float((found[name].float() - wide).norm() / wide.norm()))
        found[name].fill_(torch.nan)
    return float(np.max(errors))  # of which one that is no number is the largest


@contextmanager
def _in_place(patches: Mapping[str, object]) -> Iterator[None]:
    """Have other things at places of the backend."""
    with ExitStack() as stack:
        for name, instead in patches.items():
            stack.enter_context(mock.patch(f"{_BACKEND}.{name}", instead))
        yield
