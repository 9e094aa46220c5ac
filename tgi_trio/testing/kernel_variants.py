"""Every kind of kernel that is launched, for the shapes of well-known models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from tgi_trio.shard.torch_backend.attention import (
    latent_kernel,
    merging_kernel,
    paged_kernel,
    tiling_kernel,
)
from tgi_trio.shard.torch_backend.attention.projecting import count_heads
from tgi_trio.shard.torch_backend.attention.tiles import (
    choose_latent_tile,
    choose_tile,
    pad_dim,
)
from tgi_trio.shard.torch_backend.attention.tiling import count_listed
from tgi_trio.shard.torch_backend.kernels import (
    choosing,
    combining,
    counting,
    few_rows,
    filling,
    following,
    fused,
    grouped,
    lookup,
    sixteen_rows,
    surveying,
)
from tgi_trio.shard.torch_backend.kernels import routing as routing_kernel
from tgi_trio.shard.torch_backend.kernels.shortlisting import DEPTHS
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS
from tgi_trio.shard.torch_backend.layers.few_rows import (
    WARPS,
    choose_few_tile,
    choose_sixteen_tile,
)
from tgi_trio.shard.torch_backend.layers.grouped_experts import (
    router_tile,
    router_warps,
    tokens_of_a_program,
)
from tgi_trio.shard.torch_backend.layers.grouped_matrices import TOGETHER, choose_group_tile
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.sampling import choice_kernels
from tgi_trio.shard.torch_backend.torch_device import Generation

TYPES: Final[dict[torch.dtype, str]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
F32, BF16, F64, I32, I64, F16, U8, I8, E4M3 = TYPES
_MANY: Final = 64  # rows of decodes
EVEN: Final = ", a multiple of 16"  # behind the type of a whole number that is


@dataclass(frozen=True)
class Variant:
    """A kernel as it is launched: types of its arguments, in order, and its constants.

    Whole numbers and fractions are strings, those that Triton knows more of with `EVEN` behind.
    """

    name: str
    kernel: Any
    arguments: tuple[torch.dtype | str, ...]  # a dtype: a pointer to such numbers
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3


def variants(generation: Generation) -> Iterator[Variant]:
    """Yield what devices of a generation are given."""
    yield from _attention(generation)
    yield from _between_products(generation)
    yield from _few_rows(generation)
    yield from _sixteen_rows(generation)
    yield from _latent_keys()
    yield from _sampler()
    yield from _routing()
    yield from _experts(generation)


def _attention(generation: Generation) -> Iterator[Variant]:
    kinds: list[dict[str, Any]] = [
        {"WINDOW": 4096},
        {"SOFT_CAP": True},
        {"ALIBI": True},
        {"SINKS": True, "WINDOW": 128},
        {"AHEAD": True, "WINDOW": 4096},
    ]
    cases: list[tuple[int, torch.dtype, dict[str, Any]]] = [
        (dim, dtype, {}) for dim in (64, 80, 96, 128, 192, 256) for dtype in (BF16, F32)
    ]
    cases += [(128, dtype, kind) for kind in kinds for dtype in (BF16, F32)]
    cases += [(128, BF16, {"CODES": word}) for word in EIGHT_BITS]
    cases += [(dim, BF16, {"CODES": "fp8_e4m3fn"}) for dim in (64, 256)]
    cases += [(256, BF16, {"SOFT_CAP": True, "WINDOW": 4096}), (64, BF16, kinds[3])]
    for dim, dtype, kind in cases:
        for decodes in (True, False):
            for group, divided in ((4, False), (4, True), (7, False)):
                if group == 7 and dim != 128:
                    continue
                rows = _MANY if decodes else 0
                yield _attend(generation, dtype, dim, group, rows, divided, kind)
        if dtype is BF16 and dim == 64 and "CODES" not in kind:  # another tile
            yield _attend(generation, dtype, dim, 4, 1, True, kind)
    for dtype, heads, decodes, codes in (
        (BF16, 16, True, ""),
        (BF16, 16, False, ""),
        (BF16, 128, True, ""),
        (F32, 16, True, ""),
        *((BF16, 128, decodes, word) for decodes in (True, False) for word in EIGHT_BITS),
    ):
        for divided in (True, False):
            yield _attend_latents(dtype, heads, decodes, divided, codes)
    overlaps = generation == "hopper"
    for dim in (64, 128, 256, 512):
        yield Variant(
            f"merge_parts bf16 {dim}",
            merging_kernel.merge_parts,
            (BF16, F32, F32, F32, "i32"),
            {"DIM": dim, "PADDED_DIM": dim, "MOST": 32, "OVERLAPS": overlaps},
            warps=4 if dim > 256 else 2,
        )
    for rows in (64, 256, 1024):
        for lanes, above, upto in ((128, 16, 0), (16, 0, 16)):
            yield Variant(
                f"list_tiles {rows} rows, {lanes} lanes",
                tiling_kernel.list_tiles,
                (I32, I32, I32, "i32", "i32"),
                {
                    **{"GROUP": 4, "LANES": lanes, "ABOVE": above, "UPTO": upto},
                    **{"ROWS": rows, "BLOCK": count_listed(rows)},
                },
            )


def _attend(
    generation: Generation,
    dtype: torch.dtype,
    dim: int,
    group: int,
    decodes: int,
    divided: bool,
    kind: dict[str, Any],
) -> Variant:
    eight_bits = "CODES" in kind
    tile = choose_tile(dtype, dim, generation, decodes=decodes, eight_bits=eight_bits)
    constants = {
        "KV_HEADS": 8,
        "GROUP": group,
        "DIM": dim,
        "PADDED_DIM": pad_dim(dim),
        "PAGE": 16,
        "LANES": tile.lanes,
        "KEYS": tile.keys,
        "DIVIDED": divided,
        "WINDOW": 0,
        "SOFT_CAP": False,
        "ALIBI": False,
        "SINKS": False,
        "AHEAD": False,
        "CODES": "",
        "OVERLAPS": generation == "hopper",
    }
    cached = U8 if eight_bits else dtype
    mode = "decode" if decodes else "prefill"
    mode += " of one row" if decodes == 1 else ""
    named = ({"DIVIDED": True} if divided else {}) | kind
    more = "".join(f" {n.lower() if n != 'CODES' else word}" for n, word in named.items())
    tables = (I32,) * 6 + (F32, F32, I32)  # slopes, sinks and lasts behind them
    return Variant(
        f"attend_tile {mode} {TYPES[dtype]} {dim} g{group}{more}",
        paged_kernel.attend_tile,
        (dtype, *(F32,) * 3, dtype, cached, cached, *tables, *("fp32",) * 3, "i32", "i32"),
        constants | kind,
        warps=tile.warps,
        stages=tile.stages,
    )


def _attend_latents(
    dtype: torch.dtype, heads: int, decodes: bool, divided: bool, codes: str
) -> Variant:
    tile = choose_latent_tile(dtype, heads, decodes=decodes)
    mode = "decode" if decodes else "prefill"
    more = f"{' divided' if divided else ''}{f' {codes}' if codes else ''}"
    return Variant(
        f"attend_latents {mode} {TYPES[dtype]} 512+64 h{heads}{more}",
        latent_kernel.attend_latents,
        (
            *(dtype, F32, F32, F32),
            *(*(dtype,) * 4, U8 if codes else dtype),
            *(*(I32,) * 6, "fp32", "fp32", *("i32",) * 4),
        ),
        {
            "HEADS": heads,
            "RANK": 512,
            "PADDED_RANK": 512,
            "ROTARY": 64,
            "PADDED_ROTARY": 64,
            "ROTATES": True,
            "INTERLEAVED": True,
            "PAGE": 16,
            "LANES": tile.lanes,
            "KEYS": tile.keys,
            "DIVIDED": divided,
            "CODES": codes,
        },
        warps=tile.warps,
        stages=tile.stages,
    )


def _between_products(generation: Generation) -> Iterator[Variant]:
    overlaps = generation == "hopper"
    sums: tuple[tuple[int, str, int, int, bool], ...] = (
        *((2048, "rms", 0, 0, False), (5120, "rms", 0, 0, False)),
        *((3584, "rms_plus_one", 0, 0, False), (8192, "layer", 0, 0, False)),
        *((2880, "rms", 4, 0, False), (2048, "rms", 8, 4, False), (7168, "rms", 8, 1, False)),
        (7168, "rms", 0, 0, True),
    )
    for size, kind, experts, shared, widens in sums:
        padded = 1 << (size - 1).bit_length()
        post = kind == "rms_plus_one"
        vectors = (F32,) * 4 if post else (BF16,) * 4
        found = f" of {experts} experts{' and shared' if shared else ''}" if experts else ""
        yield Variant(
            f"add_and_normalise bf16 {size} {kind}{found}{' wide' if widens else ''}",
            fused.add_and_normalise,
            (BF16, F32, *(BF16,) * 6, *vectors, "fp32", "fp32", "fp32"),
            {
                "SIZE": size,
                "PADDED": padded,
                "ADDS": True,
                "PER_TOKEN": experts,
                "SHARED": shared,
                "HAS_DOOR": shared == 4,
                "ADDS_SECOND": False,
                "SCALES": False,
                "FIRST_KIND": kind if post else "",
                "HAS_FIRST_GAIN": post,
                "HAS_FIRST_BIAS": False,
                "KIND": kind,
                "HAS_GAIN": True,
                "HAS_BIAS": kind == "layer",
                "WIDENS": widens,
                "OVERLAPS": overlaps,
            },
            warps=count_warps(padded),
        )
    plain = ("silu", "gelu", "gelu_tanh")
    for act, limits in (*((act, False) for act in plain), ("quick_gelu", True)):
        yield Variant(
            f"gate bf16 {act}{' limits paired' if limits else ''}",
            fused.gate,
            (BF16, BF16, "fp32"),
            {"SIZE": 14336, "BLOCK": 1024, "ACT": act, "LIMITS": limits, "PAIRED": limits}
            | {"OVERLAPS": overlaps},
        )
    for dim, rotary, norm, interleaved, codes in (
        (64, 64, "", False, ""),
        (128, 128, "", False, ""),
        (128, 128, "rms", False, ""),
        (256, 64, "", True, ""),
        (256, 256, "rms_plus_one", False, ""),
        (128, 32, "layer", True, ""),
        *((128, 128, "", False, word) for word in EIGHT_BITS),
    ):
        gain = F32 if norm == "rms_plus_one" else BF16
        more = f"{' interleaved' if interleaved else ''}{f' {codes}' if codes else ''}"
        yield Variant(
            f"rotate_and_write bf16 {dim} {rotary}{more} {norm}".rstrip(),
            fused.rotate_and_write,
            (
                *(BF16, *(U8 if codes else BF16,) * 2, *(BF16,) * 3),
                *(I64, gain, BF16, *("fp32",) * 4, "i32"),
            ),
            {
                "HEADS": 32,
                "KV_HEADS": 8,
                "DIM": dim,
                "PADDED_DIM": pad_dim(dim),
                "ROTARY": rotary,
                "INTERLEAVED": interleaved,
                "CLIPS": False,
                "NORM": norm,
                "HAS_BIAS": norm == "layer",
                "CODES": codes,
                "FIRST": 0,
                "BLOCK": count_heads(dim),
                "OVERLAPS": overlaps,
            },
        )


def _few_rows(generation: Generation) -> Iterator[Variant]:
    cases = [("", inputs, "", "") for inputs in (2048, 4096, 8192, 14336)]
    cases += [(kind, 4096, "", act) for kind in ("rms", "layer") for act in ("", "silu")]
    cases += [("rms_plus_one", 3584, "rms_plus_one", "gelu_tanh")]
    for kind, inputs, first, act in cases:
        for rows in (1, 2):
            tile = choose_few_tile(inputs, rows, gated=bool(act))
            vectors = (F32 if first else BF16,) * 4
            yield Variant(
                " ".join(filter(None, ("multiply_few bf16", f"{rows}x{inputs}", kind, act))),
                few_rows.multiply_few,
                ((BF16,) * 7 + vectors + ("fp32",) * 3 + ("i32",)),
                {
                    "ROWS": rows,
                    "INPUTS": inputs,
                    "PADDED": pad_dim(inputs),
                    "HAS_BIAS": kind == "layer",
                    "ADDS": bool(kind),
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


def _sixteen_rows(generation: Generation) -> Iterator[Variant]:
    for outputs, inputs, act in ((4096, 4096, ""), (28672, 4096, ""), (14336, 4096, "silu")):
        tile = choose_sixteen_tile(outputs, inputs, generation, gated=bool(act))
        more = (f"{tile.parts} parts" if tile.parts > 1 else "", act)
        yield Variant(
            " ".join(filter(None, ("multiply_sixteen bf16", str(inputs), *more))),
            sixteen_rows.multiply_sixteen,
            (*(BF16,) * 4, F32, I32, "i32", "i32"),
            {
                "INPUTS": inputs,
                "HAS_BIAS": False,
                "ACT": act,
                "ROWS": 16,
                "OUTPUTS": tile.outputs,
                "DEPTH": tile.depth,
                "PARTS": tile.parts,
                "AHEAD": tile.ahead,
                "OVERLAPS": generation == "hopper",
            },
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
            fused.write_latents,
            (U8 if codes else BF16, *(BF16,) * 4, I64, *(BF16,) * 4, *("fp32",) * 3, "i32"),
            {
                "QUERY": query,
                "PADDED_QUERY": pad_dim(query),
                "RANK": 512,
                "PADDED_RANK": 512,
                "ROTARY": 64,
                "PADDED_ROTARY": 64,
                "INTERLEAVED": True,
                "KIND": "rms",
                "HAS_GAIN": True,
                "HAS_BIAS": False,
                "CODES": codes,
            },
        )


def _sampler() -> Iterator[Variant]:
    yield Variant("fill_tokens", filling.fill_tokens, (I64, I64, I32, I64, "i32"), {"BLOCK": 256})
    yield Variant(
        "judge_guesses",
        following.judge_guesses,
        (I64, I32, I64, F64, I64, I64, I32, I64, "i32"),
        {"MOST": 5, "TAKES": True},
    )
    yield Variant(
        "move_rows",
        following.move_rows,
        (*(I64,) * 4, I32, F64, I32, I32, F64, I32, I32, I32, I64, "i32"),
        {"PAGE": 16},
    )
    yield Variant("write_texts", lookup.write_texts, (*(I32,) * 5, "i32"), {"BLOCK": 1024})
    yield Variant(
        "keep_tokens",
        lookup.keep_tokens,
        (I32, I32, I64, I32, I64, I64, F64, I32, "i32"),
        {},
    )
    yield Variant(
        "look_up",
        lookup.look_up,
        (I64, I64, *(I32,) * 4, I64, I32, I64, I32, I32, I32, "i32"),
        {"EOS": 3, "PADDED_EOS": 4, "MOST": 4, "BLOCK": 1024, "LONGEST": lookup.LONGEST},
    )
    yield Variant(
        "count_tokens",
        counting.count_tokens,
        (I32, I32, I32, I32, I32, I32, I64, "i32"),
        {"BLOCK": 1024},
    )
    asked = (F32, I32, F64, I32, F64, F64, F64, I32)
    of_edits = (I32, I32, I32, I32, F64, F64, F64, F32, *(I32,) * 5, "fp32")
    seen, sizes = (F64, I32, I32, F64, I32), ("i32" + EVEN,) * 3
    for dtype in (F32, BF16):  # of scores that were kept, and of logits
        yield Variant(
            f"survey_scores {TYPES[dtype]}",
            surveying.survey_scores,
            (F64, I64, I64, dtype, F32, *of_edits, *asked, *seen, "i32", "i32", *sizes),
            {
                "EOS": 3,
                "PARTS": 64,
                "PART": choice_kernels.PART,
                "STRIP": choice_kernels.STRIP,
                "DEPTHS": DEPTHS,
                "ROOM": choice_kernels.SHORTLIST,
            },
            warps=choice_kernels.SURVEY_WARPS,
        )
        yield Variant(
            f"choose_tokens {TYPES[dtype]}",
            choosing.choose_tokens,
            (F64, I64, I32, I64, dtype, F32, *asked, F64, I32, F64, I32, "i32", *sizes),
            {
                "FEW": 512,
                "PART": choice_kernels.PART,
                "BLOCK": choice_kernels.CHOSEN_BLOCK,
                "DEPTHS": DEPTHS,
                "ROOM": choice_kernels.SHORTLIST,
            },
            warps=choice_kernels.CHOSEN_WARPS,
        )


def _routing() -> Iterator[Variant]:
    """Mixtral, Phi-3.5-MoE, gpt-oss, Qwen 3, DeepSeek V2 and V3."""
    kinds: tuple[tuple[str, int, int, int, int, int], ...] = (
        ("softmax", 8, 2, 1, 1, 4096),
        ("sparse-mixer", 16, 2, 1, 1, 4096),
        ("softmax", 32, 4, 1, 1, 2880),
        ("biased-softmax", 64, 6, 1, 1, 2560),
        ("softmax", 128, 8, 1, 1, 2048),
        ("grouped-softmax", 160, 6, 8, 3, 5120),
        ("grouped-sigmoid", 256, 8, 8, 4, 7168),
    )
    for routing, count, each, groups, used, inputs in kinds:
        logits = F32 if routing.startswith(("grouped", "biased")) else BF16
        constants = {
            "EXPERTS": count,
            "PER_TOKEN": each,
            "ROUTING": routing,
            "NORMALISE": routing != "sparse-mixer",
            "GROUPS": groups,
            "PADDED_GROUPS": groups,
            "GROUPS_USED": used,
            "HAS_BIAS": routing in ("grouped-sigmoid", "biased-softmax"),
            "SHARED": {"grouped-softmax": 2, "grouped-sigmoid": 1}.get(routing, 0),
        }
        yield Variant(
            f"route_tokens {routing} {count}",
            routing_kernel.route_tokens,
            (BF16, I32, I32, I32, logits, F32, "i32", "fp32", "fp32"),
            constants
            | {"PADDED": 1 << (count - 1).bit_length(), "BLOCK": tokens_of_a_program(count)},
        )
        tile = router_tile(count, inputs)
        yield Variant(
            f"ask_router {routing} {count}",
            routing_kernel.ask_router,
            (BF16, *(I32,) * 3, F32, I32, BF16, logits, logits, F32, "i32", "fp32", "fp32"),
            constants | tile | {"HAS_ROUTER_BIAS": count == 32},
            warps=router_warps(tile["PADDED"]),
        )
    for size, each, shared in ((2880, 4, 0), (2048, 8, 4), (7168, 8, 1)):
        yield Variant(
            f"combine_experts bf16 {size}{' shared' if shared else ''}",
            combining.combine_experts,
            (BF16,) * 4,
            {
                "SIZE": size,
                "PER_TOKEN": each,
                "SHARED": shared,
                "HAS_DOOR": size == 2048,
                "BLOCK": 1024,
            },
        )


def _experts(generation: Generation) -> Iterator[Variant]:
    for dtype, most in ((BF16, 96), (BF16, 48), (BF16, 0), (F32, 0)):  # pairs per expert
        for kind in ("in", "in gated", "in gated limits paired", "out"):
            gathers, gated, limits = kind != "out", "gated" in kind, "limits" in kind
            tile = choose_group_tile(dtype, generation, most, gated=gated)
            yield Variant(
                f"multiply_groups {TYPES[dtype]} {most} pairs {kind}",
                grouped.multiply_groups,
                (dtype, dtype, dtype, dtype, I32, I32, "i32", "fp32"),
                {
                    "N": 1536,
                    "K": 2048,
                    "GROUPS": 128,
                    "PADDED_GROUPS": 128,
                    "PER_ROW": 8,
                    "GATHERS": gathers,
                    "HAS_BIAS": True,
                    "ACT": "silu" if gated else "",
                    "LIMITS": limits,
                    "PAIRED": limits,
                    "ROWS": tile.rows,
                    "OUTPUTS": tile.outputs,
                    "DEPTH": tile.depth,
                    "TOGETHER": TOGETHER,
                },
                warps=tile.warps,
                stages=tile.stages,
            )
