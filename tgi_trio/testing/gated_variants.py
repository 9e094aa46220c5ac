"""Every kind of launch of the kernels of gated hidden states and n-grams."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tgi_trio.shard.torch_backend.kernels import opened_norms
from tgi_trio.shard.torch_backend.kernels.states import ngrams
from tgi_trio.shard.torch_backend.kernels.streams import gated_streams
from tgi_trio.shard.torch_backend.layers.norm_gate import MOST_TOKENS, opened_constants
from tgi_trio.shard.torch_backend.layers.opening import choose_narrow_tile, narrow_constants
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.variant import BF16, F32, I64, TYPES, Variant

_COUNT, _SIZE, _RANK = 4, 4096, 320
_BOOL = "*i1"  # a pointer to such
_ORDER, _HEADS, _TAPS = 3, 8, 4


def gated_variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation: of Qwen 4 and A.X-K2."""
    wide = {"SIZE": _SIZE, "PADDED": _SIZE, "COUNT": _COUNT}
    warps = count_warps(_SIZE)
    sums = ((True, True, 0, 1), (False, True, 0, 1), (True, False, 0, 1))
    for adds, norms, experts, each in (*sums, (True, True, 10, 1), (True, True, 10, _COUNT)):
        more = f" of {experts} experts{', all at once' * (each > 1)}" if experts else ""
        yield Variant(
            f"add_to_streams bf16 {_SIZE}{' adds' * adds}{' normed' * norms}{more}",
            gated_streams.add_to_streams,
            (*(BF16,) * 8, F32 if norms else BF16, "fp32", "i32"),
            wide
            | {"ADDS": adds, "NORMS": norms, "EACH": each, "PER_TOKEN": experts}
            | {"SHARED": int(experts > 0), "HAS_GATE": experts > 0, "BESIDE": False},
            warps=warps,
        )
    yield Variant(
        f"activate_narrow bf16 {_RANK}",
        gated_streams.activate_narrow,
        (BF16, BF16, "i32"),
        {"RANK": _RANK, "PADDED": 512, "COUNT": _COUNT},
    )
    yield Variant(
        f"mix_streams bf16 {_SIZE}",
        gated_streams.mix_streams,
        (BF16,) * 3,
        {"SIZE": _SIZE, "BLOCK": 1024, "COUNT": _COUNT},
    )
    yield from _narrow()
    yield from _opened_norms(generation)
    yield Variant(
        f"find_ngrams {_ORDER}",
        ngrams.find_ngrams,
        (*(I64,) * 5, _BOOL, *(I64,) * 3, "i32"),
        {"ORDER": _ORDER, "HEADS": _HEADS, "PADDED": _HEADS},
        warps=1,
    )
    yield Variant(
        f"gate_ngrams bf16 {_SIZE}",
        ngrams.gate_ngrams,
        (*(BF16,) * 4, *(F32,) * 3, *("fp32",) * 5, "i32"),
        wide,
        warps=warps,
    )
    yield Variant(
        f"spread_ngrams bf16 {_TAPS} of {_ORDER}",
        ngrams.spread_ngrams,
        (*(BF16,) * 6, I64, I64, _BOOL),
        {"CHANNELS": _COUNT * _SIZE, "BLOCK": 1024, "TAPS": _TAPS, "DILATION": _ORDER},
    )


def _narrow() -> Iterator[Variant]:
    """Yield products with gates: of Qwen 4, and behind norms (A.X-K2)."""
    for name, rank, size, count in (
        ("Qwen 4", _RANK, _SIZE, _COUNT),
        ("A.X-K2", 16, 7168, 1),
    ):
        for dtype, tokens in ((BF16, 1), (BF16, 256), (BF16, 512), (F32, 1), (F32, 512)):
            tile = choose_narrow_tile(dtype, tokens)
            yield Variant(
                f"open_narrow {TYPES[dtype]} {name}, {tile.tokens} tokens",
                gated_streams.open_narrow,
                (*(dtype,) * 4, "i32"),
                {
                    "STRIDE": rank + (count if count > 1 else 0),
                    **{"RANK": rank, "SIZE": size, "COUNT": count, "ROUNDS": count > 1},
                    **narrow_constants(tile, rank, count),
                },
                warps=tile.warps,
                stages=tile.stages,
            )


def _opened_norms(generation: Generation) -> Iterator[Variant]:
    """Yield sums with their norms, which gates of low rank open: A.X-K2."""
    size, rank, padded = 7168, 16, 8192
    for dtype, experts, tokens in product((BF16, F32), (0, 8), (1, MOST_TOKENS)):
        constants = opened_constants(dtype, tokens, rank)
        yield Variant(
            f"add_and_open {TYPES[dtype]} {size}{f' of {experts} experts' if experts else ''}, "
            f"{constants['TOKENS']} tokens",
            opened_norms.add_and_open,
            (dtype, dtype, F32, *(dtype,) * 11, *("fp32",) * 4, *(dtype,) * 3, "i32"),
            {
                **{"SIZE": size, "PADDED": padded, "ADDS": True, "PER_TOKEN": experts},
                **{"SHARED": int(experts > 0), "HAS_GATE": False, "BESIDE": False},
                **{"ADDS_SECOND": False, "SCALES": False, "MULTIPLIES": False, "FIRST_KIND": ""},
                **{"HAS_FIRST_GAIN": False, "HAS_FIRST_BIAS": False, "KIND": "rms"},
                **{"HAS_GAIN": True, "HAS_BIAS": False, "WIDENS": False},
                **constants,
                "OVERLAPS": generation == "hopper",
            },
            warps=count_warps(padded),
        )
