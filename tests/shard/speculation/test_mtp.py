"""Layers of the model's own that draft: what transformers says they do, and nobody's tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.cpu_backend.kernel_support import GLM5, QWEN4
from tests.shard.moved_tokens import tokens_of
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.speculation.heads_support import BLOCK, Answers, Watched, answer
from tests.shard.speculation.mtp_references import reference
from tests.shard.speculation.mtp_support import add_layers, counting, mtp_checkpoint
from tests.shard.speculation.test_same_tokens import ASKED, EVENTS
from tests.shard.torch_backend.models_support import GreedyRecorder
from tests.shard.torch_backend.own_names import CASES, make_case
from tests.support.quantised import (
    Store,
    quantise,
    store_fp8,
    store_gptq,
    store_pairs,
    store_powers,
)
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, StateGrant
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.mtp_layers import LAYOUTS
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.runner import Runner
from tgi_trio.testing.checkpoints import make_checkpoint

MOST, NEW = 3, 14
PROMPTS = [
    [5, 6, 7, 8, 9],
    [40, 41, 42],
    [7, 300, 21, 22, 4, 9, 9, 3, 12, 90, 91, 14, 33, 8, 2, 6, 7],
]
GREEDY = SamplingParameters(ignore_eos=True)
# Texts of families that have only images' models have the same layers as these; MiMo is Qwen 2.
FAMILIES = sorted(LAYOUTS.keys() - {"glm4v_moe_text", "glm_ocr_text", "mimo"})
RENAMED = [family for family in FAMILIES if family in CASES]  # which transformers has not
_LATENT = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 32)
_DELTA = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 32)
_MAMBA = {"mamba_head_dim": 32, "mamba_num_heads": 4, "ssm_state_size": 32, "head_dim": 32}
# What makes a family's tiny model fit the CPU kernels; those of others compute the same layers.
WIDER: dict[str, dict[str, int]] = {
    "deepseek_v3": _LATENT | {"qk_rope_head_dim": 32},
    "glm_moe_dsa": _LATENT | {"qk_rope_head_dim": 32, "index_head_dim": 32},
    "hy_v4": _LATENT | {"qk_rope_head_dim": 32, "index_head_dim": 32},
    "ernie4_5_moe": {},
    "mimo_v2_flash": {"head_dim": 32, "v_head_dim": 32},
    "step3p5": {"head_dim": 32, "share_expert_dim": 64},
    "nemotron_h": _MAMBA | {"moe_shared_expert_intermediate_size": 64},
    "qwen3_next": _DELTA,
    "qwen4_exp_text": _DELTA | QWEN4,
    "glm5_next_text": GLM5,
}
pytestmark = pytest.mark.usefixtures("one_thread")


def load(folder: Path, **options: Any) -> Runner:
    plain: dict[str, Any] = {"cpu_backend": "torch", "cpu_threads": 1}
    drafting: dict[str, Any] = {"drafter": "mtp", "speculate": MOST}
    return load_runner(ShardSettings(model_path=folder, **plain | drafting | options))


def find_drafts(
    runner: Runner, prompts: list[list[int]] = PROMPTS, **event: Any
) -> tuple[list[tuple[list[int], list[int]]], Answers]:
    """Return what was drafted behind which tokens, and the answers."""
    drafter = runner.drafter(MOST)
    assert drafter is not None
    watched = Watched(drafter)
    found = answer(runner, prompts, [GREEDY] * len(prompts), NEW, drafter=watched, **event)
    return [(known, own) for known, own in watched.drafted if own], found


def check_drafts(drafted: list[tuple[list[int], list[int]]], says: Any) -> None:
    assert len(drafted) >= 6 and max(len(own) for _, own in drafted) >= 2
    for known, own in drafted:
        for token, best in zip(own, says.drafts(known, len(own)), strict=True):
            assert token in best
            if len(best) > 1:  # what follows depends on which it was
                break


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(RENAMED)))
def test_it_drafts_what_transformers_says(family: str, tmp_path: Path) -> None:
    layers = 3 if family == "step3p5" else 1  # as published
    folder = mtp_checkpoint(tmp_path / "model", family, layers=layers, **WIDER.get(family, {}))
    theirs = reference(family, folder, tmp_path / "theirs")
    for backend in ("torch", "kernels")[: 1 + (family in WIDER)]:
        drafted, found = find_drafts(load(folder, cpu_backend=backend))
        check_drafts(drafted, theirs)
        plain = load(folder, cpu_backend=backend, drafter=None, speculate=0)
        assert found.tokens == answer(plain, PROMPTS, [GREEDY] * len(PROMPTS), NEW).tokens


def test_it_drafts_what_transformers_says_of_a_relative(tmp_path: Path) -> None:
    """Ling 2, whose layers are those of GLM-4.5 in other names."""
    assert RENAMED == ["bailing_moe", "bailing_moe_v2"]  # one layout for both

    def make(family: str, **changes: Any) -> Path:
        return mtp_checkpoint(tmp_path / "made", family, **changes)

    relative, own = make_case("bailing_moe of version 2", make, tmp_path)
    drafted, found = find_drafts(load(own))
    check_drafts(drafted, reference("glm4_moe", relative, tmp_path / "theirs"))
    plain = load(own, drafter=None, speculate=0)
    assert found.tokens == answer(plain, PROMPTS, [GREEDY] * len(PROMPTS), NEW).tokens


def test_it_drafts_what_the_layer_of_mimo_says(tmp_path: Path) -> None:
    """MiMo-7B, which is Qwen 2 to transformers; its layer reads the state before the embedding."""
    folder = make_checkpoint(tmp_path / "model", "qwen2", head_dim=32)
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"model_type": "mimo"}))
    add_layers(folder)
    relative = Path(shutil.copytree(folder, tmp_path / "relative"))
    (relative / "config.json").write_text(json.dumps(stated))
    theirs = reference("mimo", relative, tmp_path / "theirs")
    for backend in ("torch", "kernels"):
        drafted, found = find_drafts(load(folder, cpu_backend=backend))
        check_drafts(drafted, theirs)
        plain = load(folder, cpu_backend=backend, drafter=None, speculate=0)
        assert found.tokens == answer(plain, PROMPTS, [GREEDY] * len(PROMPTS), NEW).tokens


def test_prompts_in_pieces_and_right_drafts(tmp_path: Path) -> None:
    folder = counting(mtp_checkpoint(tmp_path / "model", "glm4_moe", tie_word_embeddings=False))
    drafted, found = find_drafts(load(folder), budget=12)
    check_drafts(drafted, reference("glm4_moe", folder, tmp_path / "theirs"))
    assert found.steps < NEW  # most are right


# The second family keeps states, the others draft from several of a token.
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        *(("glm4_moe", "torch"), ("qwen3_5_text", "torch"), ("qwen3_5_text", "kernels")),
        *(("deepseek_v4", "torch"), ("qwen4_exp_text", "kernels")),
    ],
)
@pytest.mark.parametrize("event", EVENTS)
def test_the_tokens_are_those_of_decoding_one_by_one(
    event: str, family: str, backend: str, counted: Callable[..., tuple[Runner, Answers]]
) -> None:
    runner, plain = counted(family, backend)
    found = answer(runner, PROMPTS, ASKED[:3], NEW, drafter=runner.drafter(MOST), **EVENTS[event])
    assert found.tokens == plain.tokens and found.drafts > 0
    sampled = np.diff(found.tokens[1])
    assert (sampled == 1).any() and (sampled != 1).sum() > 2  # where drafts are right, and wrong
    assert found.steps < plain.steps or "budget" in EVENTS[event]


@pytest.fixture(scope="module")
def counted(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], tuple[Runner, Answers]]:
    made: dict[tuple[str, str], tuple[Runner, Answers]] = {}

    def make(family: str, backend: str) -> tuple[Runner, Answers]:
        if (family, backend) not in made:
            folder = tmp_path_factory.mktemp(family)
            wider = WIDER.get(family, _DELTA if family == "qwen3_5_text" else {})
            counting(mtp_checkpoint(folder, family, tie_word_embeddings=False, **wider))
            runner = load(folder, cpu_backend=backend)
            made[family, backend] = runner, answer(runner, PROMPTS, ASKED[:3], NEW)
        return made[family, backend]

    return make


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4", "hy_v4"])
def test_what_a_prefix_has_stored_is_read_again(family: str, tmp_path: Path) -> None:
    """The second sequence starts behind two blocks of the first, whose layer has them as well."""
    folder = mtp_checkpoint(tmp_path / "model", family)
    runner = load(folder)
    room = runner.warm_up(WarmupRequest(64, 256, 4, 2048))
    drafter = runner.drafter(MOST)
    assert drafter is not None
    watched = Watched(drafter)
    info = runner.info
    batch = Batch(
        vocab_size=info.vocab_size, block_size=BLOCK, blocks=room.blocks, eos_ids=info.eos_ids,
        drafter=watched, draft_budget=8,
    )  # fmt: skip
    prompt = [i * 37 % 500 + 3 for i in range(2 * BLOCK + 3)]
    for i, (own, held) in enumerate(((prompt, 0), ([*prompt, 9, 8, 7], 2 * BLOCK))):
        blocks = [1, 2, *range(3 + 3 * i, 6 + 3 * i)]
        ids = np.array(own, np.int32)
        batch.add(PrefillRow(i, ids, len(own), held, blocks, NEW, 0, GREEDY))
        while (plan := batch.plan(64)) is not None:
            result = replace(runner.step(plan), forward_ns=0, sample_ns=0, processor_ns=0)
            moved = batch.settle(plan, result)
            assert dict(tokens_of(moved)).keys() <= {i}
            for gone in moved.dropped:
                runner.drop(gone)
    drafted = [(known, own) for known, own in watched.drafted if own]
    assert any(known[: len(prompt) + 3] == [*prompt, 9, 8, 7] for known, _ in drafted)
    check_drafts(drafted, reference(family, folder, tmp_path / "theirs"))


def after_others(runner: Runner, others: int) -> tuple[list[Any], list[float]]:
    """Return what is drafted for the last prompt, once others have ended, and its values."""
    room = runner.warm_up(WarmupRequest(64, 256, 4, 2048))
    drafter = runner.drafter(MOST)
    assert drafter is not None
    watched = Watched(drafter)
    info = runner.info
    batch = Batch(
        vocab_size=info.vocab_size, block_size=BLOCK, blocks=room.blocks, eos_ids=(),
        state_slots=room.state_slots, drafter=watched, draft_budget=8,
    )  # fmt: skip
    asked, values = replace(GREEDY, prompt_logprobs=True), list[float]()
    for i, prompt in enumerate([*PROMPTS[:others], PROMPTS[2]]):
        watched.drafted.clear()
        values = []
        row = PrefillRow(i, np.array(prompt, np.int32), len(prompt), 0, [1, 2, 3], NEW, 0, asked)
        batch.add(replace(row, states=StateGrant((1, 2))) if info.state_bytes else row)
        while (plan := batch.plan(64)) is not None:
            result = runner.step(plan)
            for found in result.prompts.values():
                values += found.logprobs
            own = replace(result, forward_ns=0, sample_ns=0, processor_ns=0)
            for gone in batch.settle(plan, own).dropped:
                runner.drop(gone)
    return watched.drafted, values


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen4_exp_text"])
def test_whoever_has_ended_changes_no_states(family: str, backend: str, tmp_path: Path) -> None:
    """Their last tokens are read in the step that follows, whose states are still wanted."""
    folder = mtp_checkpoint(tmp_path / "model", family, **WIDER[family])
    drafted, values = after_others(load(folder, cpu_backend=backend), 0)
    assert any(own for _, own in drafted) and len(values) == len(PROMPTS[2])
    again, same = after_others(load(folder, cpu_backend=backend), 2)
    assert again == drafted
    assert same[1:] == pytest.approx(values[1:], abs=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_v3", "deepseek_v4", "glm5_next_text", "hy_v4", "longcat_flash"),
        *("qwen3_next", "qwen4_exp_text", "step3p5"),
    ],
)
def test_beside_two_ranks_it_drafts_the_same(family: str, tmp_path: Path) -> None:
    folder = mtp_checkpoint(tmp_path / "model", family)
    expected, plain = find_drafts(load(folder))
    options = {"drafter": "mtp", "speculate": MOST}
    with ranks_of(folder, 2, GreedyRecorder(), **options) as runner:
        drafted, found = find_drafts(runner)
    assert drafted == expected and found.tokens == plain.tokens


STORES: dict[str, tuple[Store, dict[str, Any]]] = {
    "fp8": (
        store_fp8("block", "weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]},
    ),
    "gptq": (
        store_gptq(4, 32),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
    ),
}


# How often wrong drafts follow right ones decides what is read again.
@pytest.mark.parametrize("event", ["nothing", "prompts in pieces", "preempted"])
@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_of_several_layers_each_drafts_what_transformers_says(
    backend: str, event: str, several: tuple[Path, Any, dict[str, Any]]
) -> None:
    folder, theirs, runners = several
    runner = runners.get(backend) or runners.setdefault(backend, load(folder, cpu_backend=backend))
    alone = event == "nothing"  # then there is room for a draft of each layer
    prompts = PROMPTS[2:] if alone else PROMPTS
    drafted, found = find_drafts(runner, prompts, **EVENTS[event])
    check_drafts(drafted, theirs)
    plain = answer(runner, prompts, [GREEDY] * len(prompts), NEW)
    assert found.tokens == plain.tokens
    assert any(len(own) == 3 for _, own in drafted) or not alone
    assert found.steps < plain.steps or not alone


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Any]]:
    """A checkpoint with three layers, the first of which is mostly right; and transformers'."""
    folder, options = tmp_path_factory.mktemp("several"), WIDER["mimo_v2_flash"]
    mtp_checkpoint(folder, "mimo_v2_flash", layers=3, tie_word_embeddings=False, **options)
    counting(folder)
    theirs = reference("mimo_v2_flash", folder, tmp_path_factory.mktemp("theirs"))
    return folder, theirs, {}


@pytest.mark.parametrize("kind", STORES)
def test_quantised_layers_draft_by_the_numbers_that_they_stand_for(
    kind: str, tmp_path: Path
) -> None:
    """As in DeepSeek's files, all but what joins state and embedding is quantised."""
    store, said = STORES[kind]
    options = WIDER["deepseek_v3"]
    plain = mtp_checkpoint(tmp_path / "plain", "deepseek_v3", **options)
    stored = mtp_checkpoint(tmp_path / "stored", "deepseek_v3", **options)
    tensors: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        own, numbers = {name: weight}, weight
        if "proj" in name and weight.dim() == 2 and "eh_proj" not in name:
            own, array = store(name.removesuffix(".weight"), weight.numpy())
            numbers = torch.from_numpy(array.astype(np.float32))
        tensors |= own
        exact[name] = numbers.contiguous()
    save_file(exact, plain / "model.safetensors")
    save_file(tensors, stored / "model.safetensors")
    config = json.loads((stored / "config.json").read_text()) | {"quantization_config": said}
    (stored / "config.json").write_text(json.dumps(config))
    expected = find_drafts(load(plain))[0]
    assert find_drafts(load(stored))[0] == expected
    kernels = load(stored, cpu_backend="kernels", activations=16)
    assert find_drafts(kernels)[0] == expected


def test_layers_of_deepseek_v4_as_they_are_published(tmp_path: Path) -> None:
    """FP8 with powers of two, experts of 4 bits."""

    def store(module: str, weight: Any) -> Any:
        own = store_pairs if ".experts." in module else store_powers
        return own(module, weight, "scale")

    parts = ("w1", "w2", "w3", "wq_a", "wq_b", "wkv", "wo_a", "wo_b", "e_proj", "h_proj")
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]}
    said |= {"scale_fmt": "ue8m0", "expert_dtype": "fp4", "activation_scheme": "dynamic"}
    source, endings = mtp_checkpoint(tmp_path, "deepseek_v4"), tuple(f".{p}.weight" for p in parts)
    folder = quantise(source, tmp_path / "q", store, said, endings=endings)
    expected, plain = find_drafts(load(folder / "plain"))
    drafted, found = find_drafts(load(folder))
    assert drafted == expected and found.tokens == plain.tokens


def test_with_cheaper_numbers_it_still_drafts_in_the_kernels(tmp_path: Path) -> None:
    """Weights of 8 bits, K and V of 8 bits, two threads: drafts may differ, tokens do not."""
    folder = counting(mtp_checkpoint(tmp_path, "ernie4_5_moe", tie_word_embeddings=False))
    options: tuple[dict[str, Any], ...] = (
        {"quantize": "eetq"}, {"kv_cache_dtype": "fp8_e4m3fn"}, {"cpu_threads": 2},
    )  # fmt: skip
    for own in options:
        runner = load(folder, cpu_backend="kernels", **own)
        _, found = find_drafts(runner)
        plain = answer(runner, PROMPTS, [GREEDY] * len(PROMPTS), NEW)
        assert found.tokens == plain.tokens and found.steps < plain.steps
