"""Models whose layers differ in what they keep of a token, in the batch that a shard runs.

All at once in steps of any size, with drafts, computed twice, behind a cached prefix, and again
after they were pushed out: the tokens and what they were chosen from are those of transformers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.torch_backend.golden import Golden
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    advance,
    load,
    prompts,
    sequence,
)
from tests.shard.torch_backend.states.test_hybrid_models import TextDrafter
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.messages import PrefillRow
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import find_unsupported
from tgi_trio.model.tensors import decoder_claims
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.plan_parts import slice_plan
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape, KVSize
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.tiny_families import GEMMA3N_SPARSE, GEMMA4_E, GEMMA4_MOE

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 10
BLOCKS = 512
WIDEST = 8  # blocks of the longest sequence here
PROMPTS = prompts(18)[2:]  # sixteen
# Family, changes, and the bytes that a token takes: (K and V) * heads * width, of layers that keep.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "keys as values": ("gemma4_text", {}, 4 * (2 * 2 * 16 + 2 * 1 * 32)),
    "shared": ("gemma4_text", GEMMA4_E, 4 * (2 * 2 * 16 + 2 * 2 * 32)),
    "streams": ("gemma3n_text", GEMMA3N_SPARSE, 4 * 2 * (2 * 2 * 16)),
    "experts beside": ("gemma4_text", GEMMA4_MOE, 4 * (2 * 2 * 16 + 2 * 1 * 32)),
    "narrower values": ("mimo_v2_flash", {}, 4 * (2 * (16 + 12) + 4 * (16 + 12))),
}


@pytest.fixture(scope="module", params=MODELS)
def model(
    checkpoint: Checkpoint, request: pytest.FixtureRequest
) -> tuple[Runner, GreedyRecorder, Golden, dict[int, list[int]], int]:
    """A runner, what it chose from, transformers, the whole texts it expects, bytes of a token."""
    family, changes, size = MODELS[request.param]
    folder = checkpoint(family, **changes)
    runner, recorder = load(folder, BLOCKS)
    golden = Golden(folder)
    texts = {id: [*prompt, *golden.greedy(prompt, NEW)[0]] for id, prompt in enumerate(PROMPTS)}
    return runner, recorder, golden, texts, size


def row(
    id: int, known: Sequence[int], prompt: int, *, cached: int = 0, like: int = 0
) -> PrefillRow:
    """Return a sequence that knows `known` tokens; those `cached` lie in the blocks of `like`."""
    own = list(range(1 + WIDEST * id, 1 + WIDEST * (id + 1)))
    shared = list(range(1 + WIDEST * like, 1 + WIDEST * like + cached // BLOCK))
    return PrefillRow(
        sequence=id,
        token_ids=np.array(known, np.int32),
        prompt_length=prompt,
        cached_length=cached,
        block_ids=[*shared, *own[len(shared) :]],
        max_new_tokens=NEW - (len(known) - prompt),
    )


def batch_of(drafter: TextDrafter | None = None) -> Batch:
    return Batch(
        vocab_size=512,
        block_size=BLOCK,
        blocks=BLOCKS,
        eos_ids=(),
        drafter=drafter,
        draft_budget=256,
        clock=lambda: 0,
    )


def step(batch: Batch, runner: Runner, budget: int, *, twice: bool) -> dict[int, list[int]]:
    """Run a step of at most `budget` tokens; return what each sequence got, {}: nothing is left."""
    plan = batch.plan(budget)
    if plan is None:
        return {}
    result = runner.step(plan)
    if twice:  # in halves, as the worker does with a step that has raised
        middle = len(plan.rows) // 2
        for first, end in ((0, middle), (middle, len(plan.rows))):
            assert first == end or not runner.step(slice_plan(plan, first, end)).choices.faults
    columns = batch.settle(plan, result).columns
    batch.check()
    counts = columns["token_count"].tolist()
    ends = np.cumsum(counts).tolist()
    tokens = columns["token_ids"].tolist()
    return {
        id: tokens[end - count : end]
        for id, count, end in zip(columns["sequence"].tolist(), counts, ends, strict=True)
    }


def run(batch: Batch, runner: Runner, seed: int) -> dict[int, list[int]]:
    """Run to the end in steps of any size, some of them twice; return what each generated."""
    rng = random.Random(seed)
    texts: dict[int, list[int]] = {}
    while got := step(batch, runner, rng.choice([3, 17, 40, 200]), twice=rng.random() < 0.3):
        for id, tokens in got.items():
            texts.setdefault(id, []).extend(tokens)
    return texts


def check(golden: Golden, recorder: GreedyRecorder, id: int, text: Sequence[int], at: int) -> None:
    """Check what the tokens of `text` from `at` on were chosen from."""
    wanted = golden.logits(text[:at], text[at:])
    found = torch.stack([recorder.by_place[id][place] for place in range(at, len(text))])
    assert wanted.argmax(-1).tolist() == list(text[at:])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("drafted", [False, True])
def test_a_full_batch_says_what_transformers_says(model: Any, drafted: bool) -> None:
    runner, recorder, golden, whole, size = model
    assert runner.info.kv_bytes_per_token == size and runner.info.prefix_reuse
    batch = batch_of(TextDrafter(whole) if drafted else None)
    for id, prompt in enumerate(PROMPTS):
        batch.add(row(id, prompt, len(prompt)))
    texts = run(batch, runner, seed=5)
    for id, prompt in enumerate(PROMPTS):
        assert [*prompt, *texts[id]] == whole[id]
        check(golden, recorder, id, whole[id], len(prompt))


def test_behind_a_prefix_and_again_after_it_was_pushed_out(model: Any) -> None:
    runner, recorder, golden, whole, _ = model
    id = max(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))
    prompt = PROMPTS[id]
    assert len(prompt) > 3 * BLOCK
    batch = batch_of()
    batch.add(row(id, prompt, len(prompt)))
    run(batch, runner, seed=1)
    other = [*prompt[: 2 * BLOCK], 9, 8, 7]
    batch.add(row(20, other, len(other), cached=2 * BLOCK, like=id))
    batch.add(row(21, prompt, len(prompt), cached=3 * BLOCK, like=id))
    # Pushed out after four tokens: it comes back with them, and nothing of it is cached.
    batch.add(row(22, whole[id][: len(prompt) + 4], len(prompt)))
    texts = run(batch, runner, seed=2)
    assert [*prompt, *texts[21]] == whole[id]
    assert [*whole[id][: len(prompt) + 4], *texts[22]] == whole[id]
    check(golden, recorder, 20, [*other, *texts[20]], len(other))
    check(golden, recorder, 21, whole[id], len(prompt))
    check(golden, recorder, 22, whole[id], len(prompt) + 4)


def test_layers_that_read_others_read_them_as_they_were_stored(checkpoint: Checkpoint) -> None:
    """Of 8 bits, too: in one step or in several, K and V are what the cache holds."""
    folder, prompt, found = checkpoint("gemma4_text", **GEMMA4_E), PROMPTS[-1], []
    for chunk in (len(prompt), 5):
        runner, recorder = load(folder, 32, kv_cache_dtype="fp8_e4m3fn")
        one = sequence(0, prompt, range(1, 12), new=3)
        while one.remaining:
            advance(runner, [one], [min(chunk, one.length - one.computed)])
        found.append(recorder.logits(0))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)
    runner, recorder = load(folder, 32)
    advance(runner, [sequence(0, prompt, range(1, 12), new=3)], [len(prompt)])
    assert (recorder.logits(0)[0] - found[0][0]).abs().max() > 1e-4  # it was rounded at all


def test_a_layer_has_its_part_of_every_block() -> None:
    sizes = (KVSize(2, 16, 16), KVSize(1, 32, 24))
    shape = KVShape.of(sizes)
    assert shape == KVShape(2, 2, 32, sizes=sizes)
    assert shape.bytes_per_token(torch.bfloat16) == 2 * (2 * 2 * 16 + 32 + 24)
    cache = KVCache(shape, 3, torch.float32, torch.device("cpu"))
    assert cache.nbytes == 3 * BLOCK_SIZE * shape.bytes_per_token(torch.float32)
    assert [part.shape for part in cache.value_blocks] == [
        (3, BLOCK_SIZE, heads, width) for heads, _, width in sizes
    ]
    cache.write(1, torch.tensor([17]), torch.ones(1, 1, 32), 2 * torch.ones(1, 1, 24))
    assert not cache.key_slots[0].any() and not cache.value_slots[0].any()
    assert cache.key.sum() == 32 and cache.value.sum() == 48
    assert cache.value_blocks[1][1, 1].sum() == 48


def test_layers_that_are_alike_are_no_groups() -> None:
    assert KVShape.of((KVSize(2, 16, 16),) * 3) == KVShape(3, 2, 16)
    assert KVShape.of(()) == KVShape(0, 0, 0)


def test_published_files_may_have_keys_that_nobody_reads(checkpoint: Checkpoint) -> None:
    spec = decoder_spec(read_config(checkpoint("gemma4_text", **GEMMA4_E)))
    assert spec is not None
    claims = decoder_claims(spec)
    for part in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm"):
        assert f"model.layers.3.{part}.weight" in claims.known.keys() - claims.needed.keys()
        assert f"model.layers.1.{part}.weight" in claims.needed


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gemma3n_text", "detours of 8 numbers, which is no multiple of 32"),
        (
            "mimo_v2_flash",
            "heads have 16 numbers, which is no multiple of 32, and all of them together 48, "
            "which is none either",
        ),
    ],
)
def test_the_cpu_kernels_say_why_they_do_not_serve_them(
    checkpoint: Checkpoint, family: str, why: str
) -> None:
    spec = decoder_spec(read_config(checkpoint(family)))
    assert spec is not None
    wide = replace(spec, head_dim=32)  # which they have
    assert find_unsupported(wide, "float32") == why


def test_layers_without_a_source_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """All layers with a window are among those that keep nothing."""
    folder = checkpoint("gemma4_text", **GEMMA4_E)
    text = (folder / "config.json").read_text().replace('shared_layers": 2', 'shared_layers": 4')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="no layer whose keys and values are read"):
        load_torch_runner(ShardSettings(model_path=tmp_path), read_config(tmp_path))
