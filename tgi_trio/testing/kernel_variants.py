"""Every kind of launch of the decoder's kernels, for the shapes of well-known models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tgi_trio.shard.torch_backend.attention.paged.few_heads import choose_pairs
from tgi_trio.shard.torch_backend.attention.paged.kv_writing import count_heads
from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels import activations, beginning, fused
from tgi_trio.shard.torch_backend.kernels.attention import few_heads, latents, rotating
from tgi_trio.shard.torch_backend.kernels.linears import few_rows, several_rows
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS
from tgi_trio.shard.torch_backend.layers.linears.few_rows import (
    WARPS,
    choose_few_tile,
    choose_several_tile,
)
from tgi_trio.shard.torch_backend.layers.opening import BLOCK as OPENED
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.attention_variants import attention_variants
from tgi_trio.testing.beside_heads_variants import beside_heads_variants
from tgi_trio.testing.block_variants import block_variants
from tgi_trio.testing.choice_variants import choice_variants
from tgi_trio.testing.chosen_variants import chosen_variants
from tgi_trio.testing.delta_variants import delta_variants
from tgi_trio.testing.entries_variants import entries_variants
from tgi_trio.testing.gated_variants import gated_variants
from tgi_trio.testing.indexed_variants import indexed_variants
from tgi_trio.testing.mixture_variants import mixture_variants
from tgi_trio.testing.recurrence_variants import recurrence_variants
from tgi_trio.testing.stream_variants import stream_variants
from tgi_trio.testing.variant import BF16, EVEN, F32, I32, I64, U8, Variant


def variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation."""
    yield from attention_variants(generation)
    yield from _sums(generation)
    yield from _gates(generation)
    yield from _rotations(generation)
    yield from beside_heads_variants(generation)
    yield from _beginnings(generation)
    yield from _few_rows(generation)
    yield from _few_heads(generation)
    yield from _several_rows(generation)
    yield from _latent_keys()
    yield from choice_variants(generation)
    yield from mixture_variants(generation)
    yield from chosen_variants()
    yield from entries_variants(generation)
    yield from block_variants(generation)
    yield from gated_variants(generation)
    yield from stream_variants(generation)
    yield from delta_variants()
    yield from recurrence_variants()
    yield from indexed_variants()


def _sums(generation: Generation) -> Iterator[Variant]:
    sums: tuple[tuple[int, str, int, int, str], ...] = (  # -1 shared: beside the others
        *((2048, "rms", 0, 0, ""), (5120, "rms", 0, 0, "")),
        *((3584, "rms_plus_one", 0, 0, ""), (8192, "layer", 0, 0, "")),
        *((2880, "rms", 4, 0, ""), (2048, "rms", 8, 4, ""), (7168, "rms", 8, 1, "")),
        (7168, "rms", 8, -1, ""),
        (7168, "rms", 0, 0, "wide"),
        (2816, "rms", 0, 0, "multiplied"),  # Gemma 4
        (5120, "rms", 0, 0, "and a second"),  # Falcon H1
    )
    for size, kind, experts, shared, more in sums:
        padded = next_power_of_2(size)
        post = kind == "rms_plus_one" or more == "multiplied"
        vectors = (F32,) * 4 if kind == "rms_plus_one" else (BF16,) * 4
        found = (
            f" of {experts} experts{' and shared' * (shared != 0)}{' beside' * (shared < 0)}"
            if experts
            else ""
        )
        yield Variant(
            f"add_and_normalise bf16 {size} {kind}{found} {more}".rstrip(),
            fused.add_and_normalise,
            (BF16, F32, *(BF16,) * 7, *vectors, *("fp32",) * 4, BF16),
            {
                "SIZE": size,
                "PADDED": padded,
                "ADDS": True,
                "PER_TOKEN": experts,
                "SHARED": max(0, shared),
                "HAS_GATE": shared == 4,
                "BESIDE": shared < 0,
                "ADDS_SECOND": more == "and a second",
                "SCALES": more == "and a second",
                "MULTIPLIES": more == "multiplied",
                "FIRST_KIND": kind if post else "",
                "HAS_FIRST_GAIN": post,
                "HAS_FIRST_BIAS": False,
                "KIND": kind,
                "HAS_GAIN": True,
                "HAS_BIAS": kind == "layer",
                "WIDENS": more == "wide",
                "OVERLAPS": generation == "hopper",
            },
            warps=count_warps(padded),
        )


def _gates(generation: Generation) -> Iterator[Variant]:
    plain = ("silu", "gelu", "gelu_tanh", "relu2")
    for act, limits in (*((act, False) for act in plain), ("quick_gelu", True)):
        yield Variant(
            f"gate bf16 {act}{' limits paired' if limits else ''}",
            activations.gate,
            (BF16, BF16, "fp32", "fp32"),
            {"SIZE": 14336, "BLOCK": 1024, "ACT": act, "LIMITS": limits, "RAISED": limits}
            | {"PAIRED": limits, "OVERLAPS": generation == "hopper"},
        )
    for act in ("relu2", "gelu_tanh", "quick_gelu", "xielu"):
        yield Variant(
            f"activate_alone bf16 {act}",
            activations.activate_alone,
            (*(BF16,) * 6, f"i32{EVEN}"),
            {"BLOCK": 1024, "ACT": act, "OVERLAPS": generation == "hopper"},
        )
    # Gates of each number (A.X-K2's norms, Qwen's attention) and of each head (Ling 3).
    for size, each, rounds in ((7168, 1, False), (8192, 1, True), (4096, 128, True)):
        yield Variant(
            f"open_values bf16 {size}{' by head' if each > 1 else ''}{' rounded' * rounds}",
            activations.open_values,
            (BF16, BF16, BF16, "i32", "i32"),
            {"SIZE": size, "EACH": each, "BLOCK": OPENED, "ROUNDS": rounds}
            | {"OVERLAPS": generation == "hopper"},
        )


def _rotations(generation: Generation) -> Iterator[Variant]:
    own: dict[str, int] = {"KEYS_AS_VALUES": True, "VALUE_NORM": True}  # Gemma 4's large heads
    kinds: tuple[tuple[int, int, int, str, bool, str, dict[str, int]], ...] = (
        (64, 64, 64, "", False, "", {}),
        (128, 128, 128, "", False, "", {}),
        (128, 128, 128, "rms", False, "", {}),
        (256, 256, 64, "", True, "", {}),
        (256, 256, 256, "rms_plus_one", False, "", {}),
        (128, 128, 32, "layer", True, "", {}),
        *((128, 128, 128, "", False, word, {}) for word in EIGHT_BITS),
        (192, 128, 64, "", False, "", {}),
        (512, 512, 512, "rms", False, "", own),
        (128, 128, 0, "", False, "", {"SCALES_QUERIES": True}),
        (128, 128, 128, "rms", False, "", {"NORM_LAST": True}),  # Hunyuan, nanochat
        (128, 128, 128, "whole", False, "", {}),  # OLMo 2
        (256, 256, 256, "rms", False, "", {"KV_HEADS": 0}),
    )
    for dim, value, rotary, norm, interleaved, codes, kind in kinds:
        gain = F32 if norm == "rms_plus_one" else BF16
        more = f"{' interleaved' if interleaved else ''}{f' {codes}' if codes else ''}"
        more += f" value {value}" if value < dim else ""
        more += "".join(
            f" {name.lower()}" if on else f" no {name.lower()}" for name, on in kind.items()
        )
        yield Variant(
            f"rotate_and_write bf16 {dim} {rotary}{more} {norm}".rstrip(),
            rotating.rotate_and_write,
            (
                *(BF16, *(U8 if codes else BF16,) * 2, *(BF16,) * 3),
                *(I64, gain, BF16, BF16, *("fp32",) * 5, "i32"),
            ),
            {
                "HEADS": 32,
                "KV_HEADS": 8,
                "DIM": dim,
                "VALUE": value,
                "PADDED_DIM": pad_dim(dim),
                "ROTARY": rotary,
                "INTERLEAVED": interleaved,
                "CLIPS": False,
                "NORM": norm,
                "NORM_LAST": False,
                "HAS_BIAS": norm == "layer",
                "SCALES_QUERIES": False,
                "KEYS_AS_VALUES": False,
                "VALUE_NORM": False,
                "CODES": codes,
                "FIRST": 0,
                "BLOCK": count_heads(dim),
                "OVERLAPS": generation == "hopper",
            }
            | kind,
        )


def _beginnings(generation: Generation) -> Iterator[Variant]:
    for size, rotary, scales in ((2048, 64, False), (4096, 128, False), (3584, 256, True)):
        padded = next_power_of_2(size)
        yield Variant(
            f"begin_rows bf16 {size} {rotary}{' scaled' if scales else ''}",
            beginning.begin_rows,
            (*(BF16,) * 3, I64, I64, *(BF16,) * 3, "fp32", "i32"),
            {
                **{"SIZE": size, "PADDED": padded},
                **{"ROTARY": rotary, "PADDED_ROTARY": pad_dim(rotary)},
                "SCALES": scales,
                "OVERLAPS": generation == "hopper",
            },
            warps=count_warps(padded),
        )


class _Few(NamedTuple):
    """A product of few rows, with its prologue and epilogue."""

    inputs: int
    kind: str = ""  # of the norm
    act: str = ""
    first: str = ""  # kind of the norm of the addend
    adds: bool = True  # before the norm, if there is one
    other: bool = False  # the other share of a matrix, for a lone row


def _few_rows(generation: Generation) -> Iterator[Variant]:
    sizes = (2048, 4096, 8192, 14336)
    cases = [_Few(inputs) for inputs in sizes]
    cases += [_Few(4096, kind, act) for kind in ("rms", "layer") for act in ("", "silu")]
    cases += [_Few(3584, "rms_plus_one", "gelu_tanh", "rms_plus_one")]
    cases += [_Few(inputs, "rms", adds=False) for inputs in sizes[:2]]  # heads
    # The other share, for Llama 1B and 8B: attention's output, gates, down-projection, heads.
    cases += [_Few(inputs, other=True) for inputs in sizes[:2]]
    cases += [_Few(inputs, "rms", "silu", other=True) for inputs in sizes[:2]]
    cases += [_Few(sizes[2], other=True)]
    cases += [_Few(inputs, "rms", adds=False, other=True) for inputs in sizes[:2]]
    for case in cases:
        kind, inputs, first, act = case.kind, case.inputs, case.first, case.act
        for rows in (1,) if case.other else (1, 2):
            tile = choose_few_tile(inputs, rows, gated=bool(act), other=case.other)
            vectors = (F32 if first else BF16,) * 4
            alone = "" if case.adds else "alone"
            share = "other share" if case.other else ""
            named = ("multiply_few bf16", f"{rows}x{inputs}", kind, alone, act, share)
            yield Variant(
                " ".join(filter(None, named)),
                few_rows.multiply_few,
                ((BF16,) * 7 + vectors + ("fp32",) * 4 + ("i32",)),
                {
                    "ROWS": rows,
                    "INPUTS": inputs,
                    "PADDED": pad_dim(inputs),
                    "HAS_BIAS": kind == "layer",
                    "ADDS": bool(kind) and case.adds,
                    "ADDS_SECOND": False,
                    "SCALES": False,
                    "FIRST_KIND": first,
                    "HAS_FIRST_GAIN": bool(first),
                    "HAS_FIRST_BIAS": False,
                    "KIND": kind,
                    "HAS_GAIN": bool(kind),
                    "HAS_NORM_BIAS": kind == "layer",
                    "ACT": act,
                    "OUTPUTS": tile.outputs,
                    "OVERLAPS": generation == "hopper",
                },
                warps=WARPS,
            )


def _few_heads(generation: Generation) -> Iterator[Variant]:
    """Llama 1B, 8B and 70B, one with biases, Gemma 2, and other kinds of rotary embeddings."""
    cases: tuple[tuple[int, int, int, bool, str, str, bool], ...] = (
        *((2048, 64, 64, False, "rms", "", False), (4096, 128, 128, False, "rms", "", False)),
        *((8192, 128, 128, False, "rms", "", False), (2048, 128, 128, False, "layer", "", False)),
        (3584, 256, 256, False, "rms_plus_one", "rms_plus_one", False),
        *((4096, 128, 64, True, "rms", "", False), (2048, 80, 20, False, "layer", "", False)),
        (2048, 64, 0, False, "rms", "", False),
        *((2048, 64, 64, False, "rms", "", True), (4096, 128, 128, False, "rms", "", True)),
    )
    for inputs, dim, rotary, interleaved, kind, first, other in cases:
        vectors = (F32 if first else BF16,) * 4
        more = f"{' interleaved' * interleaved}{' other share' * other}"
        yield Variant(
            f"multiply_heads bf16 1x{inputs} {kind} {dim} {rotary}{more}",
            few_heads.multiply_heads,
            (*(BF16,) * 3, I64, *(BF16,) * 8, *vectors, *("fp32",) * 4),
            {
                **{"HEADS": 32, "KV_HEADS": 8, "DIM": dim},
                **{"ROTARY": rotary, "INTERLEAVED": interleaved},
                "PAIRS": choose_pairs(inputs, dim, other=other),
                "HAS_BIAS": kind == "layer",
                "OVERLAPS": generation == "hopper",
                **{"ROWS": 1, "INPUTS": inputs, "PADDED": pad_dim(inputs)},
                **{"ADDS": True, "ADDS_SECOND": False, "SCALES": False},
                "FIRST_KIND": first,
                "HAS_FIRST_GAIN": bool(first),
                "HAS_FIRST_BIAS": False,
                **{"KIND": kind, "HAS_GAIN": True, "HAS_NORM_BIAS": kind == "layer"},
            },
            warps=WARPS,
        )


def _several_rows(generation: Generation) -> Iterator[Variant]:
    for rows in (16, 32, 64):
        for outputs, inputs, act in (
            *((2048, 2048, ""), (4096, 4096, ""), (28672, 4096, "")),
            *((14336, 4096, "silu"), (2880, 2880, "gelu")),
        ):
            tile = choose_several_tile(rows, outputs, inputs, generation, gated=bool(act))
            more = (f"{tile.parts} parts" if tile.parts > 1 else "", act)
            yield Variant(
                " ".join(filter(None, (f"multiply_several bf16 {rows}x{inputs}", *more))),
                several_rows.multiply_several,
                (*(BF16,) * 4, F32, I32, "i32", "i32"),
                {
                    "INPUTS": inputs,
                    "HAS_BIAS": False,
                    "ACT": act,
                    "ROWS": tile.rows,
                    "OUTPUTS": tile.outputs,
                    "DEPTH": tile.depth,
                    "PARTS": tile.parts,
                    "AHEAD": tile.ahead,
                    "OVERLAPS": generation == "hopper",
                },
                warps=tile.warps,
            )


def _latent_keys() -> Iterator[Variant]:
    compressed, plain = 1536, 3072  # of 16 heads
    for query, codes in (
        (compressed, ""),
        (plain, ""),
        *((compressed, word) for word in EIGHT_BITS),
    ):
        yield Variant(
            f"write_latents bf16 512+64 q{query}{f' {codes}' if codes else ''}",
            latents.write_latents,
            (U8 if codes else BF16, *(BF16,) * 4, I64, *(BF16,) * 4, *("fp32",) * 3, "i32"),
            {
                "QUERY": query,
                "PADDED_QUERY": pad_dim(query),
                "RANK": 512,
                "PADDED_RANK": 512,
                "ROTARY": 64,
                "PADDED_ROTARY": 64,
                "WIDTH": 576,
                "INTERLEAVED": True,
                "KIND": "rms",
                "HAS_GAIN": True,
                "HAS_BIAS": False,
                "CODES": codes,
            },
        )
