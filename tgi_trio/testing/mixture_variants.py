"""Every kind of launch of the kernels for mixtures of experts, for well-known models."""

from __future__ import annotations

from collections.abc import Iterator

from tgi_trio.shard.torch_backend.kernels import combining
from tgi_trio.shard.torch_backend.kernels.experts import grouped, weighing
from tgi_trio.shard.torch_backend.kernels.experts import routing as routing_kernel
from tgi_trio.shard.torch_backend.layers.experts.grouped_experts import (
    router_tile,
    router_warps,
    tokens_of_a_program,
)
from tgi_trio.shard.torch_backend.layers.experts.grouped_matrices import TOGETHER, choose_group_tile
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.variant import BF16, F32, I32, TYPES, Variant


def mixture_variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation."""
    yield from _routing()
    yield from _combining()
    yield from _experts(generation)


def _routing() -> Iterator[Variant]:
    """Mixtral, Phi-3.5-MoE, gpt-oss, Qwen 3 and 3 Next, Gemma 4, Kolibri, DeepSeek V2, V3, V4."""
    kinds: tuple[tuple[str, int, int, int, int, int], ...] = (
        ("softmax", 8, 2, 1, 1, 4096),
        ("sparse-mixer", 16, 2, 1, 1, 4096),
        ("softmax", 32, 4, 1, 1, 2880),
        ("biased-softmax", 64, 6, 1, 1, 2560),
        ("softmax", 128, 8, 1, 1, 2048),
        ("softmax", 128, 8, 1, 1, 2816),
        ("softmax", 512, 10, 1, 1, 2048),
        ("sigmoid", 384, 6, 1, 1, 2560),
        ("grouped-softmax", 160, 6, 8, 3, 5120),
        ("grouped-sigmoid", 256, 8, 8, 4, 7168),
        ("sqrt-softplus", 256, 6, 1, 1, 4096),
    )
    for routing, count, each, groups, used, inputs in kinds:
        logits = BF16 if routing in ("softmax", "sparse-mixer") else F32
        constants = {
            "EXPERTS": count,
            "PER_TOKEN": each,
            "ROUTING": routing,
            "NORMALISE": routing != "sparse-mixer",
            "CAP": 30.0 if routing == "sigmoid" else 0.0,
            "GROUPS": groups,
            "PADDED_GROUPS": groups,
            "GROUPS_USED": used,
            "HAS_BIAS": routing
            in ("grouped-sigmoid", "biased-softmax", "sigmoid", "sqrt-softplus"),
            "HAS_FACTORS": inputs == 2816,
            "SHARED": {"grouped-softmax": 2, "grouped-sigmoid": 1, "sqrt-softplus": 1}.get(
                routing, 0
            ),
        }
        more = " factors" if constants["HAS_FACTORS"] else ""
        gated = count == 512
        yield Variant(
            f"route_tokens {routing} {count}{more}",
            routing_kernel.route_tokens,
            (BF16, I32, I32, I32, logits, F32, F32, "i32", "fp32", "fp32"),
            constants | {"PADDED": next_power_of_2(count), "BLOCK": tokens_of_a_program(count)},
        )
        tile = router_tile(count, inputs)
        yield Variant(
            f"ask_router {routing} {count}{more}{' gate' * gated}",
            routing_kernel.ask_router,
            (
                *(BF16, *(I32,) * 3, BF16, F32, I32, BF16, logits, logits, BF16),
                *(F32, F32, "i32", "fp32", "fp32"),
            ),
            constants | tile | {"HAS_ROUTER_BIAS": count == 32, "HAS_GATE": gated},
            warps=router_warps(tile["PADDED"]),
        )


def _combining() -> Iterator[Variant]:
    """Sums of what a token's experts return, and Llama 4's inputs, weighed before they do."""
    for size, each, shared, beside in (
        *((2880, 4, 0, False), (2048, 8, 4, False), (7168, 8, 1, False)),
        *((2048, 8, 0, True), (7168, 8, 0, True)),
    ):
        yield Variant(
            f"combine_experts bf16 {size}{' shared' * (shared > 0)}{' beside' * beside}",
            combining.combine_experts,
            (BF16,) * 5,
            {
                "SIZE": size,
                "PER_TOKEN": each,
                "SHARED": shared,
                "HAS_GATE": size == 2048,
                "BESIDE": beside,
                "BLOCK": 1024,
            },
        )

    yield Variant(
        "weigh_inputs bf16 5120",  # Llama 4
        weighing.weigh_inputs,
        (BF16,) * 4,
        {"SIZE": 5120, "PER_TOKEN": 1, "SHARED": 1, "BLOCK": 1024},
    )


def _experts(generation: Generation) -> Iterator[Variant]:
    for dtype, most in ((BF16, 96), (BF16, 48), (BF16, 0), (F32, 0)):  # pairs per expert
        for kind in (
            *("in", "in gated", "in gated limits", "in gated limits paired"),
            *("in gated limits of some", "out"),
        ):
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
                    "RAISED": "paired" in kind,
                    "PAIRED": "paired" in kind,
                    "BOUNDED": 120 if "some" in kind else 0,
                    "ROWS": tile.rows,
                    "OUTPUTS": tile.outputs,
                    "DEPTH": tile.depth,
                    "TOGETHER": TOGETHER,
                },
                warps=tile.warps,
                stages=tile.stages,
            )
