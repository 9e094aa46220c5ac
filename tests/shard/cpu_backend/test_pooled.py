"""Qwen 4 in the CPU kernels: pooled keys, n-grams, gated states; beside what all are asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.shard.cpu_backend.chooser_checks import (
    ROUNDED,
    SQUARES,
    WAYS,
    check_adapters,
    check_long_context,
    check_rounded,
    check_unwritten,
)
from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner
from tests.shard.cpu_backend.test_at_any_load import check_invariance
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    prompts,
    run,
    sequences,
)
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import find_undivided, find_unsupported
from tgi_trio.model.matrices.decoder import table_refs

pytestmark = pytest.mark.usefixtures("one_thread")
Checkpoint = Callable[..., Path]

FAMILY, END = "qwen4_exp_text", 1  # the token that ends a text in tiny checkpoints


def make(checkpoint: Checkpoint, **changes: Any) -> Path:
    return checkpoint(FAMILY, **FITTING[FAMILY] | changes)


@pytest.mark.sampled(3)  # two threads and rounded numbers are asked of the others, too
@pytest.mark.parametrize("numbers", WAYS)
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, numbers: dict[str, Any]
) -> None:
    check_invariance(make(checkpoint, num_attention_heads=4), **numbers)


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_compress_ratio": 24, "indexer_budget": 240, "indexer_n_heads": 20},
        {"indexer_compress_ratio": 3, "indexer_budget": 60, "indexer_head_dim": 32, "hc_count": 2},
    ],
)
def test_a_long_context(checkpoint: Checkpoint, changes: dict[str, int]) -> None:
    check_long_context(make(checkpoint, max_position_embeddings=2048, **changes), SQUARES)


@pytest.mark.parametrize(
    "changes",
    [
        {"ngram_size": 2, "heads_per_ngram": 4, "ple_layer_ids": [3], "split_ngram_parts": 1},
        {
            **{"ngram_size": 4, "heads_per_ngram": 1, "ple_embed_dim": 96},
            **{"ple_conv_kernel_size": 2, "output_gate_type": "sigmoid", "attention_bias": True},
        },
    ],
)
def test_ngrams_do_not_reach_over_the_end_of_a_text(
    checkpoint: Checkpoint, changes: dict[str, Any]
) -> None:
    draw, folder = random.Random(5), make(checkpoint, **changes)
    texts = [[END if draw.random() < 0.3 else id for id in text] for text in prompts(8)[2:6]]
    golden = Golden(folder)
    with cpu_runner(folder) as (runner, recorder):
        batch = sequences(texts, 3, new=8)
        run(runner, batch, chunk=3, joins=2)
        for row in batch:
            assert_greedy(golden, recorder, row, 3e-4)


def test_what_nobody_has_written_is_not_read(checkpoint: Checkpoint) -> None:
    check_unwritten(make(checkpoint), indexes=1, numbers=2 * 2 * 64 + 64 + 3)


@pytest.mark.parametrize("rounding", ROUNDED)
def test_rounded_numbers_are_those_of_torch(checkpoint: Checkpoint, rounding: str) -> None:
    tolerance = 0.15 if "weights" in rounding else 2e-3  # a quarter of what rounding does
    folder = make(checkpoint, num_experts_per_tok=4)  # all, so that none is a choice
    check_rounded(folder, rounding, tolerance)


def test_what_does_not_fit_is_refused(checkpoint: Checkpoint) -> None:
    def refusal(**changes: Any) -> str | None:
        spec = decoder_spec(read_config(make(checkpoint, **changes)))
        return find_unsupported(spec, "float32")

    assert refusal() is None
    for changes, words in (
        ({"indexer_head_dim": 48}, "an index has keys of 48 numbers, which is no multiple of 32"),
        ({"head_dim": 48}, "heads have 48 numbers, which is no multiple of 32, and gates"),
        ({"hc_lowrank": 24}, "gates of rank 24, which is no multiple of 32"),
        ({"hc_count": 17}, "a token has 17 hidden states, which are more than 16"),
        (
            {"ple_embed_dim": 48},
            "rows of n-grams have 12 numbers, which is no multiple of 16",
        ),
    ):
        assert refusal(**changes) == words
    spec = decoder_spec(read_config(make(checkpoint)))
    assert spec is not None
    alone = replace(spec, gated_streams=None)
    assert find_unsupported(alone, "float32") == "there is no norm before the head"
    plain = tuple(replace(layer, experts=None, mixer=None) for layer in spec.layers)
    assert find_undivided(replace(spec, layers=plain), 2) == (
        "ranks divide every layer, which the kernels do not do with several hidden states"
    )


def test_tables_that_steps_read_are_known(checkpoint: Checkpoint) -> None:
    """Their pages are not given back."""
    spec = decoder_spec(read_config(make(checkpoint)))
    assert spec is not None
    names = [piece.matrix.name for table in table_refs(spec) for piece in table.pieces]
    place = "model.layers.{}.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    parts = [place.format(layer, i) for layer in (0, 2) for i in range(3)]
    assert names == ["model.embed_tokens.weight", *parts]


def test_adapters_change_what_gates_let_through(checkpoint: Checkpoint, tmp_path: Path) -> None:
    check_adapters(make(checkpoint), tmp_path, 5e-4)
