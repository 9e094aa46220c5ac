"""Batch invariance where an index chooses what is attended to, over the stand-in device.

A row that sees no more than is chosen has the same bits, whether or not others have longer
contexts. What attention to all tokens is held to: `test_batch_invariance.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shard.torch_backend.interpreter import need_triton

need_triton()

from tests.shard.torch_backend.invariant_support import (  # noqa: E402  (it imports Triton)
    Crowd,
    small_parts,  # noqa: F401  (a fixture)
    start_invariant,
)
from tests.shard.torch_backend.stand_in_support import (  # noqa: E402
    drive,
    start,
)
from tgi_trio.shard.torch_backend.attention.indexed import paged_blocks, selecting  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import spans  # noqa: E402
from tgi_trio.shard.torch_backend.layers.streams import hyper_kernels  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.wrapped_checkpoints import make_wrapped  # noqa: E402

Checkpoint = Callable[..., Path]

CHOSEN = 36  # more than a span has
# A lone token, more tokens than are chosen, and fewer: with what is said they become more.
SIZES = (1, 42, CHOSEN - 1)
TEXTS = [[3 + (31 * i + 7 * j) % 500 for j in range(n)] for i, n in enumerate(SIZES)]
CROWD = Crowd(TEXTS, new=3, chunk=11)
FEW_LAYERS = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
FAMILIES: dict[str, dict[str, Any]] = {
    # Several hidden states of a token, sinks, values with gates.
    "hy_v4": FEW_LAYERS | {"index_topk": CHOSEN, "indexer_types": ["full", "shared"]},
    "deepseek_v32": FEW_LAYERS | {"index_topk": CHOSEN},
    # The second layer attends to what the first one chose.
    "glm_moe_dsa": FEW_LAYERS | {"index_topk": CHOSEN, "indexer_types": ["full", "shared"]},
    # Behind norms with gates, and with gates of values. The gates' rank is that of full vectors of
    # the processor that stands in, as in `test_batch_invariance.py`.
    "axk2": {"num_hidden_layers": 2, "index_topk": CHOSEN, "gated_norm_rank": 32},
    # Blocks of 4 tokens, chosen for each KV head.
    "minimax_m3_vl_text": FEW_LAYERS
    | {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_topk_blocks": CHOSEN // 4},
    # Whole blocks, beside states of linear attention and of n-grams; several hidden states.
    "qwen4_exp_text": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        "ple_layer_ids": [1],
        "indexer_budget": CHOSEN,
    },
    # A window, and means of runs of tokens, of which some are chosen: together two spans and one.
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "sliding_window": CHOSEN,
        "index_topk": 9,
    },
}

# Of models that see images as well. Runs of tokens, by the mean of their keys, beside states;
# layers that read the latents of others, and queries that are scaled by their position.
WRAPPED: dict[str, dict[str, Any]] = {
    "glm5_next": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_types": ["full", "full"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_topk": CHOSEN,
    },
    "mistral_large4": {"index_topk": CHOSEN},
}
# What is launched in a layer with an index, whatever a step has of contexts.
CHOOSING = {
    *("score_units", "score_blocks", "select_best", "attend_latent_spans"),
    *("write_indexed_latents", "write_latents", "write_heads_and_index"),
}


@pytest.fixture(autouse=True)
def small_lists(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Have programs share a row that is selected from, and few of them share hidden states."""
    monkeypatch.setattr(hyper_kernels, "_PROGRAMS", 8)
    monkeypatch.setattr(spans, "_PROGRAMS", 8)  # chunks of prompts share none
    for name, number in (("READ", 16), ("PART", 4), ("SAMPLE", 8), ("READERS", 16)):
        monkeypatch.setattr(selecting, name, number)


@pytest.mark.sampled(7, first=6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = checkpoint(family, **FAMILIES[family])
    CROWD.check_alone(folder, monkeypatch, near=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("family", WRAPPED)
def test_text_models_beside_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = make_wrapped(tmp_path, family, **WRAPPED[family])
    CROWD.check_alone(folder, monkeypatch, near=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text", "deepseek_v4"])
def test_without_the_flag_bits_differ(checkpoint: Checkpoint, family: str) -> None:
    """So the test above can tell."""
    folder = checkpoint(family, **FAMILIES[family])
    with StandInDevice() as device:
        assert CROWD.differing(*start_invariant(folder, device, batch_invariant=False))


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["glm_moe_dsa", "minimax_m3_vl_text", "deepseek_v4"])
def test_a_sequence_that_is_computed_anew(checkpoint: Checkpoint, family: str) -> None:
    CROWD.check_anew(checkpoint(family, **FAMILIES[family]), 2)


@pytest.mark.sampled(3, first=1)
@pytest.mark.parametrize(
    "family", ["deepseek_v32", "minimax_m3_vl_text", "qwen4_exp_text", "deepseek_v4"]
)
def test_recorded_steps_and_drafts_say_what_launched_ones_say(
    checkpoint: Checkpoint, family: str
) -> None:
    CROWD.check_recorded(checkpoint(family, **FAMILIES[family]), 30)


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text"])
def test_short_contexts_are_listed_as_well(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """What attends to a row's tokens is compiled once, and so is what scores them."""
    folder, tiles = checkpoint(family, **FAMILIES[family]), set[tuple[int, int]]()
    for module in (selecting, paged_blocks):
        own = module.choose_tile_tokens

        def record(*args: Any, own: Callable[..., tuple[int, int]] = own, **how: Any) -> Any:
            tiles.add(found := own(*args, **how))
            return found

        monkeypatch.setattr(module, "choose_tile_tokens", record)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", batch_invariant=True)
        tiles.clear()
        short, long = (drive(runner, [text], [{}], 2, device=device, late=0) for text in TEXTS[:2])
    steps = (*short.prefills, *short.decodes, *long.prefills, *long.decodes)
    kinds = {
        tuple((name, count) for name, count in sorted(counts.launches.items()) if name in CHOOSING)
        for counts in steps
    }
    assert len(steps) == 4 and len(kinds) == len(tiles) == 1
    assert dict(kinds.pop())["select_best"] > 0
