"""Every kind of launch of the kernels around choices: texts, drafts, counts, scores."""

from __future__ import annotations

from collections.abc import Iterator

from tgi_trio.shard.torch_backend.kernels.drafting import prompt_lookup, verifying
from tgi_trio.shard.torch_backend.kernels.sampling import choosing, counting, filling, surveying
from tgi_trio.shard.torch_backend.kernels.sampling.shortlisting import DEPTHS
from tgi_trio.shard.torch_backend.sampling import choice_kernels
from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.variant import BF16, EVEN, F32, F64, I32, I64, TYPES, Variant


def choice_variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation."""
    yield from _texts(generation == "hopper")
    yield from _scores(generation == "hopper")


def _texts(overlaps: bool) -> Iterator[Variant]:
    yield Variant(
        "fill_tokens",
        filling.fill_tokens,
        (I64, I64, I32, I64, "i32"),
        {"BLOCK": 256, "OVERLAPS": overlaps},
    )
    yield Variant(
        "judge_drafts",
        verifying.judge_drafts,
        (I64, I32, I64, F64, I64, I64, I32, I64, "i32"),
        {"MOST": 5, "TAKES": True},
    )
    yield Variant(
        "move_rows",
        verifying.move_rows,
        (*(I64,) * 4, I32, F64, I32, I32, F64, I32, I32, I32, I64, "i32"),
        {"PAGE": 16},
    )
    yield Variant("write_texts", prompt_lookup.write_texts, (*(I32,) * 5, "i32"), {"BLOCK": 1024})
    yield Variant(
        "keep_tokens",
        prompt_lookup.keep_tokens,
        (I32, I32, I64, I32, I64, I64, F64, I32, "i32"),
        {},
    )
    yield Variant(
        "look_up",
        prompt_lookup.look_up,
        (I64, I64, *(I32,) * 4, I64, I32, I64, I32, I32, I32, "i32"),
        {"EOS": 3, "PADDED_EOS": 4, "MOST": 4, "BLOCK": 1024, "LONGEST": prompt_lookup.LONGEST},
    )


def _scores(overlaps: bool) -> Iterator[Variant]:
    yield Variant(
        "count_tokens",
        counting.count_tokens,
        (I32, I32, I32, I32, I32, I32, I64, "i32"),
        {"BLOCK": 1024, "OVERLAPS": overlaps},
    )
    asked = (F32, I32, F64, I32, F64, F64, F64, I32)
    of_edits = (I32, I32, I32, I32, F64, F64, F64, F32, *(I32,) * 5, "fp32")
    seen, sizes = (F64, I32, I32, F64, I32), ("i32" + EVEN,) * 3
    for dtype in (F32, BF16):  # of kept scores, and of logits
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
                "OVERLAPS": overlaps,
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
                "OVERLAPS": overlaps,
            },
            warps=choice_kernels.CHOSEN_WARPS,
            registers=choice_kernels.CHOSEN_REGISTERS,
        )
