"""Every kind of launch of the kernels of layers that compute one of several hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from tgi_trio.shard.torch_backend.kernels import activations, per_layer_inputs
from tgi_trio.shard.torch_backend.kernels.streams import alternating_updates
from tgi_trio.shard.torch_backend.layers.gating import count_cutting_warps
from tgi_trio.shard.torch_backend.layers.per_layer_inputs import (
    choose_opened_tile,
    opened_constants,
)
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.variant import BF16, EVEN, F32, TYPES, Variant

_COUNT: Final = 4  # Gemma 3n, as are the next
_SIZE: Final = 2048
_OWN: Final = 256
_WIDTHS: Final = (8192, 16384)  # of MLPs: of 2 and of 4 billion
_ACT: Final = "gelu_tanh"
_NORM: Final = {"KIND": "rms"}


def stream_variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation."""
    overlaps: dict[str, Any] = {"OVERLAPS": generation == "hopper"}
    for dtype in (BF16, F32):
        yield from _of_states(dtype, overlaps)
        yield from _of_gates(dtype, overlaps)


def _of_states(dtype: torch.dtype, overlaps: dict[str, Any]) -> Iterator[Variant]:
    """Yield what makes, joins and corrects hidden states."""
    one = {"SIZE": _SIZE, "PADDED": _SIZE} | overlaps
    every = one | {"COUNT": _COUNT, "PADDED_COUNT": _COUNT}
    warps = count_warps(_COUNT * _SIZE)
    name = f"{TYPES[dtype]} {_SIZE}"
    for adds in (True, False):
        yield Variant(
            f"predict_streams {name}{' adds' * adds}",
            alternating_updates.predict_streams,
            (*(dtype,) * 9, *("fp32",) * 3, "i32"),
            every | _NORM | {"ACTIVE": 0, "ADDS": adds},
            warps=warps,
        )
    yield Variant(
        f"join_detour {name}",
        alternating_updates.join_detour,
        (*(dtype,) * 9, *("fp32",) * 4),
        one | _NORM,
        warps=count_warps(_SIZE),
    )
    yield Variant(
        f"correct_streams {name}",
        alternating_updates.correct_streams,
        (*(dtype,) * 10, "fp32", "fp32", "i32"),
        every | _NORM | {"ACTIVE": 0, "SCALES": True},
        warps=warps,
    )
    yield Variant(
        f"add_to_others {name}",
        alternating_updates.add_to_others,
        (*(dtype,) * 4, "fp32", "i32"),
        every | _NORM,
        warps=warps,
    )
    for joins in (True, False):
        yield Variant(
            f"match_streams {name}{' joins' * joins}",
            alternating_updates.match_streams,
            (*(dtype,) * 3, "fp32", "i32"),
            every | {"JOINS": joins},
            warps=warps,
        )


def _of_gates(dtype: torch.dtype, overlaps: dict[str, Any]) -> Iterator[Variant]:
    """Yield what opens gates: those of MLPs, cut at a bound, and those of a layer's own inputs."""
    for width in _WIDTHS:
        yield Variant(
            f"cut_and_gate {TYPES[dtype]} {width}",
            alternating_updates.cut_and_gate,
            (dtype, dtype, "fp32"),
            {"SIZE": width, "PADDED": width, "ACT": _ACT, "PAIRED": False} | overlaps,
            warps=count_cutting_warps(width),
        )
    yield Variant(
        f"open_own {TYPES[dtype]} {_OWN}",
        activations.open_own,
        (*(dtype,) * 3, f"i32{EVEN}"),
        {"SIZE": _OWN, "BLOCK": 1024, "ACT": _ACT} | overlaps,
    )
    for size in (1536, 2048):  # Gemma 4 E2B, Gemma 3n
        for tokens in (1, 256, 512) if dtype is BF16 else (1, 512):
            tile = choose_opened_tile(dtype, tokens)
            constants = {"ACT": _ACT, "TOKENS": tile.tokens, "BLOCK": tile.gates}
            yield Variant(
                f"multiply_opened {TYPES[dtype]} {size}, {tile.tokens} tokens",
                per_layer_inputs.multiply_opened,
                (*(dtype,) * 4, "i32", f"i32{EVEN}"),
                {**opened_constants(size, _OWN), **constants},
                warps=tile.warps,
                stages=tile.stages,
            )
