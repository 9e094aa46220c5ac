"""Models with images against transformers' whole ones: tokens and logits, in every order of steps.

Towers are transformers' own, the text is computed by us.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.shard.cpu_backend.kernel_support import GLM5, QWEN4, cpu_runner
from tests.shard.image_support import Told
from tests.shard.media.images_support import NEW, Maker, Model, Shard, arena
from tests.shard.media.pictures import CROSSED, END, FAMILIES, Prompt, picture
from tests.shard.speculation.mtp_support import add_layers
from tests.shard.torch_backend.models_support import BLOCK, GreedyRecorder, generated, load
from tgi_trio.ipc.messages import StateGrant
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.image_rules import image_rules
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

pytestmark = pytest.mark.usefixtures("one_thread")


def check(model: Model, runner: Runner, recorder: GreedyRecorder, budget: int = 1000) -> Shard:
    with arena() as memory:
        shard = Shard(runner, model.tower, memory, rules=model.rules)
        prompts = model.prompts()
        rows = [shard.add(i, prompt) for i, prompt in enumerate(prompts)]
        shard.run(budget)
        for prompt, row in zip(prompts, rows, strict=True):
            model.golden.check(prompt, row, recorder)
    assert len({tuple(generated(row)) for row in rows}) == len(rows)
    assert shard.seen == [(0, 0), (1, 0), (1, 1), (3, 0), (3, 1)]
    different = {image.key for prompt in prompts for image in prompt.pictures}
    assert shard.tower.encoded == len(different), "the features of an image are computed once"
    return shard


@pytest.mark.sampled(7)
@pytest.mark.parametrize("budget", [5, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_are_those_of_the_whole_model(
    model: Maker, family: str, budget: int
) -> None:
    own = model(family)
    runner, recorder = load(own.folder)
    assert runner.info.backend != "transformers"
    shard = check(own, runner, recorder, budget)
    if own.rules.image_attention != "prompt":  # of which no step may compute a part
        assert max(shard.pieces) <= budget, "images are cut, or end a step"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_says_the_same(model: Maker, family: str) -> None:
    own = model(family)
    runner, _ = load(own.folder)
    prompt = own.prompts()[1]
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules)
        row = shard.add(0, prompt)
        shard.run()
    assert generated(row) == own.golden.generate(prompt)


@pytest.mark.parametrize("budget", [5, 1000])
def test_gemma4_that_sees_ahead_where_layers_have_windows(model: Maker, budget: int) -> None:
    """Its larger models do; the others see what is behind them alone."""
    larger = {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    own = model("gemma4", use_bidirectional_attention="vision", sliding_window=8, **larger)
    assert (
        own.rules.image_attention == "image" and model("gemma4").rules.image_attention == "causal"
    )
    runner, recorder = load(own.folder)
    check(own, runner, recorder, budget)


@pytest.mark.parametrize("budget", [5, 1000])
def test_gemma4_unified_that_sees_nothing_ahead(model: Maker, budget: int) -> None:
    """It does unless its files say otherwise, and null is otherwise."""
    own = model("gemma4_unified", use_bidirectional_attention=None, sliding_window=8)
    assert (
        own.rules.image_attention == "causal"
        and model("gemma4_unified").rules.image_attention == "image"
    )
    config = read_config(own.folder)
    values = {k: v for k, v in config.values.items() if k != "use_bidirectional_attention"}
    assert image_rules(replace(config, values=values)).image_attention == "image"
    runner, recorder = load(own.folder)
    check(own, runner, recorder, budget)


def test_granite_multiplies_features_as_it_does_embeddings(model: Maker) -> None:
    """Granite Vision, which is LLaVA-NeXT around its text; there its logits are not divided."""
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.8, "logits_scaling": 1.0}
    own = model("llava_next", model_type="granite", attention_multiplier=0.2, **scales)
    runner, recorder = load(own.folder)
    check(own, runner, recorder)


def test_behind_the_end_of_a_text_no_image_of_idefics_is_seen(model: Maker) -> None:
    own = model("idefics")
    runner, recorder = load(own.folder)
    one, two = (picture(own.family, seed) for seed in (1, 2))
    prompts = [Prompt.of(5, one, 6, END, 7, 8), Prompt.of(one, END, 7, two, 8), Prompt.of(one, END)]
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules)
        rows = [shard.add(i, prompt) for i, prompt in enumerate(prompts)]
        shard.run(4)
    for prompt, row in zip(prompts, rows, strict=True):
        own.golden.check(prompt, row, recorder)


TURNS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]}
}
GLM = {
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
    **TURNS,
}
NUMBERED = {
    "rope_parameters": {
        **{"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 3.0, "factor": 1.0},
        "mrope_section": [5, 4, 4, 3],
    }
}
BLOCKS = {
    **{"intermediate_size": 64, "index_head_dim": 32},
    **{"index_block_size": 16, "index_topk_blocks": 1},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gemma3n", {"laurel_rank": 32, "hidden_size_per_layer_input": 32}),
        ("granite4_vision", {"hidden_size": 128}),
        ("idefics3", {}),
        ("glm4v", GLM),
        ("hunyuan_vl", NUMBERED),
        ("minimax_m3_vl", BLOCKS),
        ("muse_glimmer", {}),
        ("paddleocr_vl", TURNS),
        ("step3p7", {"share_expert_dim": 64}),
        ("qwen3_5", {"linear_key_head_dim": 32, "linear_value_head_dim": 32}),
        ("glm5_next", GLM5),
        ("qwen4_exp", QWEN4 | {"indexer_budget": 4}),
    ],
)
def test_the_cpu_kernels(model: Maker, family: str, sizes: dict[str, Any]) -> None:
    own = model(family, head_dim=32, **sizes)
    with cpu_runner(own.folder) as (runner, recorder):
        check(own, runner, recorder)
        check(own, runner, recorder, 5)


@pytest.fixture
def llava(model: Maker) -> Iterator[tuple[Model, Shard, GreedyRecorder]]:
    own = model("llava")
    runner, recorder = load(own.folder)
    with arena() as memory:
        yield own, Shard(runner, own.tower, memory), recorder


def test_a_prefix_with_an_image_is_read_from_the_cache(
    llava: tuple[Model, Shard, GreedyRecorder],
) -> None:
    """Whole images in it are not computed again, and one that it cuts gives its other features."""
    own, shard, recorder = llava
    image = picture("llava", 1)
    first = Prompt.of(*range(5, 19), image, 50, 51)  # 14 tokens, so the block ends in the image
    row = shard.add(0, first)
    shard.run()
    encoded = shard.tower.encoded
    for id, prompt in enumerate((first, Prompt.of(*range(5, 19), image, 60)), start=1):
        again = shard.add(id, prompt, blocks=row.block_ids[:1], cached=BLOCK)
        shard.run()
        own.golden.check(prompt, again, recorder)
    assert shard.tower.encoded == encoded
    long = Prompt.of(*range(5, 14), image, *range(30, 40))
    row = shard.add(3, long)
    shard.run()
    again = shard.add(4, long, blocks=row.block_ids[:1], cached=BLOCK)
    assert shard.queue.seen == {(4, 0): 0} and 4 not in shard.queue, "it needs no feature"
    shard.run()
    own.golden.check(long, again, recorder)


def test_a_replay_begins_with_what_was_said(llava: tuple[Model, Shard, GreedyRecorder]) -> None:
    """As after a preemption, or the death of a shard: prompt and tokens are computed anew."""
    own, shard, _ = llava
    prompt = own.prompts()[1]
    row = shard.add(0, prompt)
    shard.run()
    whole = generated(row)
    longer = Prompt([*prompt.ids, *whole[:3]], prompt.pictures)
    again = shard.add(1, longer, NEW - 3)
    shard.run(5)
    assert whole[:3] + generated(again) == whole


def test_drafts_change_nothing(llava: tuple[Model, Shard, GreedyRecorder]) -> None:
    own, shard, recorder = llava
    image = picture("llava", 3)
    prompt = Prompt.of(*[7, 8, 9] * 6, image, *[7, 8, 9] * 4)
    row = shard.add(0, prompt, 16)
    plain = shard.add(1, prompt, 16, top_n=1)
    shard.run()
    own.golden.check(prompt, row, recorder)
    assert generated(row) == generated(plain)


@pytest.mark.parametrize("boundary", [BLOCK, 3 * BLOCK])
def test_a_hybrid_goes_on_behind_a_snapshot_with_images(model: Maker, boundary: int) -> None:
    """The first boundary is within the image, whose other features are given then."""
    own = model("qwen3_5")
    runner, recorder = load(own.folder)
    image = picture(own.family, 1)
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules)
        first = Prompt.of(*range(5, 17), image, *range(20, 60))  # tokens 12 to 17 are the image's
        row = shard.add(0, first, states=StateGrant((1, 2), saves=((boundary, 3),)))
        shard.run(7)
        own.golden.check(first, row, recorder)
        kept = row.block_ids[: boundary // BLOCK]
        prompts = (first, Prompt([*first.ids[:boundary], 70, 71, 72], (image,)))
        for id, prompt in enumerate(prompts[: 1 + (boundary > BLOCK)], start=1):
            grant = StateGrant((2 + 2 * id, 3 + 2 * id), source=3)
            again = shard.add(id, prompt, blocks=kept, cached=boundary, states=grant)
            shard.run()
            own.golden.check(prompt, again, recorder)
        assert shard.tower.encoded == 1


@pytest.mark.parametrize("family", ["qwen3_5", "qwen4_exp"])
def test_drafts_of_a_hybrid_behind_images(model: Maker, family: str) -> None:
    """Wrong ones are undone in states as well."""
    own = model(family)
    runner, recorder = load(own.folder, speculate=2)
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules)
        image = picture(own.family, 3)
        prompt = Prompt.of(*[7, 8, 9] * 6, image, *[7, 8, 9] * 4)
        row, plain = shard.add(0, prompt, 16), shard.add(1, prompt, 16, top_n=1)
        shard.run()
        own.golden.check(prompt, row, recorder)
    assert generated(row) == generated(plain)


@pytest.mark.parametrize("kernels", [False, True])
def test_layers_of_its_own_draft_behind_images(model: Maker, kernels: bool, tmp_path: Path) -> None:
    sizes = ("head_dim", "linear_key_head_dim", "linear_value_head_dim")
    own = model("qwen3_5", **dict.fromkeys(sizes, 32))
    folder = add_layers(shutil.copytree(own.folder, tmp_path / "model"))
    settings = ShardSettings(model_path=folder, speculate=2, drafter="mtp", cpu_threads=1)
    recorder = GreedyRecorder()
    with contextlib.ExitStack() as at_end, arena() as memory:
        runner: Any
        if kernels:
            runner = load_cpu_runner(settings, read_config(folder), sampler=recorder)
            at_end.callback(runner.close)
        else:
            runner = load_torch_runner(settings, read_config(settings.model_path), sampler=recorder)
        runner.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        shard = Shard(runner, own.tower, memory, rules=own.rules)
        prompts = own.prompts()[:2]
        rows = [shard.add(i, prompt, 16) for i, prompt in enumerate(prompts)]
        shard.run(20)
        for prompt, row in zip(prompts, rows, strict=True):
            own.golden.check(prompt, row, recorder)
    assert shard.drafted


@pytest.mark.parametrize("family", CROSSED)
def test_drafts_and_prefixes_where_layers_attend_to_images(model: Maker, family: str) -> None:
    """What is read of images is there for every token, though blocks have those before it."""
    own = model(family)
    runner, recorder = load(own.folder, speculate=2)
    prompt = Prompt.of(*range(7, 25), picture(own.family, 2), *range(30, 42))
    longer = Prompt([*prompt.ids, 40], prompt.pictures)
    told = Told([own.golden.generate(prompt), []], [prompt, longer])
    with arena() as memory:
        shard = Shard(runner, own.tower, memory, rules=own.rules, drafter=told)
        row = shard.add(0, prompt)
        shard.run()
        own.golden.check(prompt, row, recorder)
        assert shard.drafted
        again = shard.add(1, longer, blocks=row.block_ids[:1], cached=BLOCK)
        shard.run(7)
        own.golden.check(longer, again, recorder)
        assert shard.tower.encoded == 1
