"""Two ranks give what transformers gives, for every family that is split."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.ranks.rank_processes import groups, ranks_of
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    ALONE,
    BLOCK,
    TOLERANCES,
    GreedyRecorder,
    advance,
    drafting_plan,
    load,
    plan,
    prompts,
    run,
    sequence,
    sequences,
)
from tests.shard.torch_backend.own_names import CASES, make_case
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.frame_codec import Frame, frame_bytes
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.media.features import CrossStates, ImageFeatures
from tgi_trio.shard.media.held_image import HeldImage
from tgi_trio.shard.media.placed_features import PlacedFeatures
from tgi_trio.shard.ranks.plan_frames import decode_plan, encode_plan
from tgi_trio.testing.tiny_families import GEMMA3N_SPARSE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 5
SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}

THREE_GROUPS = {
    **SIX_HEADS,
    "num_key_value_heads": 2,
    "mamba_n_groups": 3,
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
}


def rows_for(count: int = 4) -> list[ShardSequence]:
    return sequences(prompts(8)[8 - count :], shuffle=3, new=NEW)


def check_ranks(
    folder: Path,
    ranks: int,
    rows: list[ShardSequence],
    tolerance: float,
    oracle: Path | None = None,
    **order: int,
) -> None:
    """Run `rows` over several ranks, in the `order` that `run` takes; they say what one says.

    `oracle`: the folder that transformers reads, if it cannot read this one.
    """
    recorder = GreedyRecorder()
    with ranks_of(folder, ranks, recorder) as runner:
        runner.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        run(runner, rows, **order)
    golden = Golden(oracle or folder)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("family", ALONE)
def test_two_ranks_say_what_one_says(checkpoint: Checkpoint, family: str) -> None:
    tolerance = TOLERANCES.get(family, 2e-4)
    check_ranks(checkpoint(family), 2, rows_for(3), tolerance, chunk=20, joins=2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_share_families_that_transformers_has_not(
    checkpoint: Checkpoint, tmp_path: Path, name: str
) -> None:
    relative, own = make_case(name, checkpoint, tmp_path)
    check_ranks(own, 2, rows_for(3), 2e-4, oracle=relative, chunk=20, joins=2)


@pytest.mark.parametrize(
    "family", ["glm5_next", "hunyuan_vl", "mistral_large4", "muse_glimmer", "step3p7"]
)
def test_two_ranks_write_the_text_of_what_sees_images(tmp_path: Path, family: str) -> None:
    folder = make_wrapped(tmp_path, family)
    tolerance = TOLERANCES.get(family, 2e-4)
    check_ranks(folder, 2, rows_for(3), tolerance, chunk=20, joins=2)


@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 2), ("llama", 1), ("qwen3", 1)])
def test_four_ranks_share_the_heads_there_are(
    checkpoint: Checkpoint, family: str, kv_heads: int
) -> None:
    check_ranks(checkpoint(family, num_key_value_heads=kv_heads), 4, rows_for(3), 2e-4)


@pytest.mark.parametrize(
    ("family", "changes", "ranks"),
    [
        ("cohere", {"use_qk_norm": True, "num_key_value_heads": 2}, 4),
        ("stablelm", {"qk_layernorm": True}, 2),
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}, 2),
    ],
)
def test_ranks_share_what_few_families_have(
    checkpoint: Checkpoint, family: str, changes: dict[str, int], ranks: int
) -> None:
    check_ranks(checkpoint(family, **changes), ranks, rows_for(3), 2e-4, chunk=20, joins=2)


@pytest.mark.parametrize(
    ("family", "changes", "ranks"),
    [
        ("granitemoehybrid", {"mamba_n_groups": 1}, 2),
        ("granitemoehybrid", {"mamba_n_groups": 2}, 4),
        ("falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": True}, 2),
    ],
)
def test_ranks_share_the_groups_there_are(
    checkpoint: Checkpoint, family: str, changes: dict[str, int], ranks: int
) -> None:
    """The norm of a group is over heads of several ranks."""
    check_ranks(checkpoint(family, **changes), ranks, rows_for(3), 2e-4, chunk=20, joins=2)


def test_a_vocabulary_that_does_not_divide(checkpoint: Checkpoint) -> None:
    check_ranks(checkpoint("llama", vocab_size=515), 2, rows_for(2), 1e-4)


def test_prompt_logprobs_of_two_ranks(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    prompt = prompts(8)[5]
    with ranks_of(folder, 2, GreedyRecorder()) as runner:
        runner.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        row = sequence(0, prompt, range(1, 5), new=2, prompt_logprobs=True)
        found = [*advance(runner, [row], [20])[0].prompt_logprobs]
        found += advance(runner, [row], [len(prompt) - 20])[0].prompt_logprobs
    assert math.isnan(found[0])
    assert found[1:] == pytest.approx(Golden(folder).prompt_logprobs(prompt), abs=1e-4)


def test_ranks_agree_on_the_smallest_cache() -> None:
    with groups(3) as (together, members):
        cpu = torch.device("cpu")
        assert together(lambda rank: members[rank].least(10 - rank, cpu)) == [8, 8, 8]


@pytest.mark.parametrize(
    ("family", "overrides", "size", "message"),
    [
        ("llama", {}, 3, r"4 attention heads.*3 shards.*--num-shard"),
        ("llama", SIX_HEADS, 2, "3 key-value heads"),
        ("laguna", {"num_attention_heads_per_layer": [4, 6, 6]}, 4, "6 attention heads"),
        ("llama", {"intermediate_size": 129}, 2, "129 MLP columns"),
        ("olmo2", {"num_key_value_heads": 1}, 2, "normalises all key heads together"),
        ("granitemoehybrid", THREE_GROUPS, 2, "3 groups of heads"),
        ("qwen4_exp_text", {"ple_embed_dim": 36}, 2, "9 channels cannot be split"),
        ("gemma3n_text", GEMMA3N_SPARSE, 2, "at a bound that all of them set together"),
    ],
)
def test_what_cannot_be_split_is_refused(
    checkpoint: Checkpoint, family: str, overrides: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        with ranks_of(checkpoint(family, **overrides), size, GreedyRecorder()):
            pass


def test_a_plan_survives_its_way_to_another_rank(checkpoint: Checkpoint) -> None:
    """Rank 1 computes from the frame, rank 0 from the plan: the K and V they write are the same."""
    rows = rows_for()
    rows[1].sampling = sequence(1, [3], [1], prompt_logprobs=True).sampling
    step = plan(rows, [min(9, row.length) for row in rows])
    frame = encode_plan(step)
    counts = {"rows": len(rows), "tokens": len(step.token_ids), "entries": step.block_tables.size}
    counts |= dict.fromkeys(("unknown", "features", "layers", "rotary", "limits", "images"), 0)
    counts["states"] = len(rows)
    assert len(frame) == frame_bytes(FrameKind.PLAN, **counts)
    got = decode_plan(Frame(memoryview(frame)))
    for name in ("token_ids", "positions", "kv_slots", "query_starts", "context_lengths"):
        ours, theirs = getattr(step, name), getattr(got, name)
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
    assert got.block_tables.tolist() == step.block_tables.tolist()
    assert got.samples.tolist() == step.samples.tolist() and got.drafts is None
    assert [row.prompt_length for row in got.rows] == [row.prompt_length for row in rows]
    runner, _ = load(checkpoint("llama"))
    ours = runner.step(step).rows
    theirs = runner.step(got).rows
    values = [len(row.prompt_logprobs) for row in ours]
    assert [len(row.prompt_logprobs) for row in theirs] == values == [0, 10, 0, 0]
    run(runner, rows[:2])
    rows[0].remaining = rows[1].remaining = 4
    for row in rows[:2]:
        row.token_ids = torch.cat((torch.from_numpy(row.token_ids), torch.zeros(4))).int().numpy()
    drafted = drafting_plan(rows[:2], [[5, 6], []])
    again = decode_plan(Frame(memoryview(encode_plan(drafted))))
    assert again.drafts is not None and again.drafts.tolist() == [2, 0] and again.inputs is None
    step.inputs = np.arange(len(step.token_ids), dtype=np.int32) - 1
    known = decode_plan(Frame(memoryview(encode_plan(step)))).inputs
    assert known is not None and known.tolist() == step.inputs.tolist()
    assert got.state_reads is not None and step.state_reads is not None
    assert got.state_reads.tolist() == step.state_reads.tolist() == [1, 3, 5, 7]
    assert got.state_writes is not None and got.state_writes.tolist() == [2, 4, 6, 8]
    step.state_reads = step.state_writes = None
    none = decode_plan(Frame(memoryview(encode_plan(step))))
    assert none.state_reads is None and none.state_writes is None


@pytest.mark.parametrize("parts", [3, 4])
def test_what_images_do_to_a_plan_survives_its_way_to_another_rank(parts: int) -> None:
    """But for the features: they come while the step is computed."""
    rows = rows_for()
    step = plan(rows, [min(9, row.length) for row in rows])
    places, count = np.array([0, 2]), len(step.token_ids)
    step.features = PlacedFeatures(
        places, np.ones((2, 8), np.float32), dict.fromkeys((0, 4, 7), np.ones((2, 8), np.float32))
    )
    step.rotary_positions = np.arange(parts * count).reshape(parts, count)
    step.visible = np.arange(count) + 4
    got = decode_plan(Frame(memoryview(encode_plan(step))))
    assert got.features is not None and got.features.places.tolist() == [0, 2]
    assert {layer: rows.shape for layer, rows in got.features.deep.items()} == {
        0: (2, 0),
        4: (2, 0),
        7: (2, 0),
    }
    assert got.features.rows.shape == (2, 0)
    assert got.rotary_positions is not None and got.visible is not None
    assert got.rotary_positions.tolist() == step.rotary_positions.tolist()
    assert got.visible.tolist() == step.visible.tolist()


def test_images_that_layers_attend_to_are_named_on_the_way_to_another_rank() -> None:
    """What is read of them comes while the step is computed."""
    rows = rows_for(3)
    for row, at, until, number in ((0, 2, None, 7), (2, 0, 5, 7), (2, 6, None, 8)):
        keys = (torch.zeros(6, 2, 4),) * 2
        states = CrossStates(keys, keys, tokens=6, visible=number - 4, number=number)
        features = ImageFeatures(np.empty((0, 0), np.float32), states=states)
        rows[row].images.append(HeldImage(np.array([at]), features, until))
    got = decode_plan(Frame(memoryview(encode_plan(plan(rows, [9, 9, 9])))))

    def facts(row: ShardSequence) -> list[tuple[object, ...]]:
        told = [(image, image.features.states) for image in row.images]
        return [
            (int(image.positions[0]), image.until, of.number, of.tokens, of.visible)
            for image, of in told
            if of is not None
        ]

    assert [facts(row) for row in got.rows] == [facts(row) for row in rows]
    assert [len(facts(row)) for row in got.rows] == [1, 0, 2]
