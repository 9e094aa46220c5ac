"""Batch invariance over the stand-in device: a sequence has the same bits alone and in a crowd.

Neither how many rows a step has, nor into which chunks a prompt is cut, nor in which blocks a
sequence lies, nor whether a step is recorded changes a number. What cannot be held to that is
refused. Kernel by kernel: `test_invariant_kernels.py`; of several ranks: `test_invariant_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.adapters.peft_support import adapted, install, write_adapter
from tests.shard.cpu_backend.kernel_support import FITTING
from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import (
    BLOCK,
    prompts,
    run,
    sequence,
)
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.shard.backend import load_runner

need_triton()

from tests.shard.torch_backend.invariant_support import (  # noqa: E402  (it imports Triton)
    Crowd,
    small_parts,  # noqa: F401  (a fixture)
    start_invariant,
)
from tests.shard.torch_backend.stand_in_support import drive, start  # noqa: E402
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.tiny_families import GEMMA4_E, GEMMA4_MOE  # noqa: E402

Checkpoint = Callable[..., Path]

TEXTS = [[5], *prompts(3)[2:], *prompts(8, longest=40)[6:]]
NEW = 4
CROWD = Crowd(TEXTS, new=NEW, chunk=7, joins=4)
FEW = Crowd(TEXTS[1::2], chunk=7)
# One for each kind of attention that is not refused: plain, windows and caps, sinks, latents,
# chunks, heads that differ; with experts.
FAMILIES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text", "mimo_v2_flash")
# Of layers around it: norms, positions, biases, experts.
OTHERS = (
    *("qwen2", "qwen3", "gpt2", "gpt_neox", "bloom", "olmo2", "cohere", "qwen3_moe"),
    *("gemma4_text", "bitnet", "cohere2_moe", "laguna", "longcat_flash"),
    # Heads are normalised behind their rotation; queries over latents are scaled by position.
    *("hunyuan_v1_dense", "mistral4", "nanochat"),
)
# Of layers' own embeddings, and experts beside an MLP.
SHAPES = {"own inputs": GEMMA4_E, "experts beside": GEMMA4_MOE}
# Rotations by the length of a sequence: the whole prompt's, then as far as it has come. Rotated
# pairs are as many as two vectors of the processor that stands in have: unlike a device, it
# computes what fills none by other instructions.
LENGTHS: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(32)],
        "long_factor": [2.0 + 0.3 * i for i in range(32)],
        "original_max_position_embeddings": 16,
    },
}
NUMBERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "codes of 4 bits": {"quantize": "int4"},
    "codes of 8 bits": {"quantize": "q8_0"},
    "keys and values of 8 bits": {"kv_cache_dtype": "fp8_e4m3fn"},
    "recorded": {"graph_sizes": (1, 2, 4)},
}
# By what is said of them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "--activations 8": ("llama", {"activations": 8}),
    "an encoder": ("t5", {}),
}


def told(root: object) -> dict[str, set[bool]]:
    """Return what every part of a runner was told of invariance, by the name of its class."""
    found: dict[str, set[bool]] = {}
    seen: set[int] = set()
    left = [root]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, list | tuple | set | frozenset):
            left += each
        elif isinstance(each, dict):
            left += each.values()
        elif type(each).__module__.startswith("tgi_trio.shard.torch_backend"):
            for name in ("invariant", "_invariant"):
                if hasattr(each, name):
                    found.setdefault(type(each).__name__, set()).add(getattr(each, name))
            left += vars(each).values() if hasattr(each, "__dict__") else ()
            slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            left += [getattr(each, name) for name in slots if hasattr(each, name)]
    return found


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *(("llama", {"max_lora_rank": 16}), ("deepseek_v3", {})),
        *(("qwen3_moe", {"quantize": "q8_0"}), ("hy_v4", {}), ("qwen4_exp_text", {})),
        ("deepseek_v4", {}),
    ],
)
def test_every_part_of_a_model_is_told(
    checkpoint: Checkpoint, family: str, settings: dict[str, Any], invariant: bool
) -> None:
    options = ShardSettings(model_path=checkpoint(family), batch_invariant=invariant, **settings)
    with StandInDevice() as device, device.idle():
        parts = told(
            load_torch_runner(
                options, read_config(options.model_path), device="cuda:0", graph_sizes=(1, 2)
            )
        )
    attention = {"hy_v4": "PagedIndexedAttention", "qwen4_exp_text": "PagedPooled"}
    attention["deepseek_v4"] = "PagedEntriesAttention"
    assert set(parts) >= {"Linear", "Norm", "PromptLogprobs"}
    assert attention.get(family, "PagedAttention") in parts
    hyper = family in ("hy_v4", "deepseek_v4")
    assert ("HyperWeights" in parts) == ("HyperEnds" in parts) == hyper
    assert ("SharedKey" in parts) == (family == "deepseek_v4")
    assert ("NgramsLayer" in parts) == (family == "qwen4_exp_text")
    assert ("SlotMemory" in parts) == (family == "llama")
    assert ("LatentProjections" in parts) == (family in ("deepseek_v3", "hy_v4"))
    assert ("CodedMatrices" in parts) == (family == "qwen3_moe")
    assert {name: kept for name, kept in parts.items() if kept != {invariant}} == {}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    CROWD.check_alone(checkpoint(family), monkeypatch)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", OTHERS)
def test_a_family_whose_attention_is_that_of_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    FEW.check_alone(checkpoint(family), monkeypatch)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_layers_of_other_shapes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    FEW.check_alone(checkpoint("gemma4_text", **changes), monkeypatch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", LENGTHS)
def test_rotations_by_length(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    turns = {"rope_type": kind, "rope_theta": 10000.0} | LENGTHS[kind]
    limits = {"max_position_embeddings": 16 if kind == "dynamic" else 64}
    folder = checkpoint("llama", **SMALL, head_dim=64, rope_parameters=turns, **limits)
    FEW.check_alone(folder, monkeypatch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
def test_of_other_numbers(checkpoint: Checkpoint, numbers: dict[str, Any]) -> None:
    folder = checkpoint("llama", **SMALL)
    with StandInDevice() as device:
        crowd = CROWD if "graph_sizes" in numbers else FEW
        assert not crowd.differing(*start_invariant(folder, device, **numbers))


def test_latents_of_8_bits(checkpoint: Checkpoint) -> None:
    folder = checkpoint("deepseek_v3", **SMALL)
    with StandInDevice() as device:
        ours = start_invariant(folder, device, kv_cache_dtype="fp8_e5m2")
        assert not FEW.differing(*ours)


def test_experts_that_stay_codes(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_moe", **SMALL)
    with StandInDevice() as device:
        ours = start_invariant(folder, device, quantize="q8_0")
        assert not FEW.differing(*ours)


def test_adapters(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama", **SMALL)
    files = [write_adapter(folder, tmp_path / str(r), seed=r, r=r) for r in (4, 16)]
    with StandInDevice() as device:
        told = {"max_lora_rank": 16, "max_loaded_adapters": 2}
        runner, recorder = start_invariant(folder, device, **told)
        for number, file in enumerate(files, start=1):
            install(runner, number, file)
        crowd = replace(FEW, texts=TEXTS, prepare=lambda rows: adapted(rows, [1, 0, 2, 1]))
        assert not crowd.differing(runner, recorder)


def test_without_the_flag_bits_differ(checkpoint: Checkpoint) -> None:
    """So the tests above can tell: a library, and divided contexts, depend on the step."""
    folder = checkpoint("llama", **SMALL)
    with StandInDevice() as device:
        assert FEW.differing(*start_invariant(folder, device, batch_invariant=False))


def test_a_prefix_that_is_reused(checkpoint: Checkpoint) -> None:
    """Its keys and values were written in other chunks, and beside others."""
    text = [3 + 37 * i % 509 for i in range(3 * BLOCK + 2)]
    folder = checkpoint("llama", **SMALL)
    with StandInDevice() as device:
        runner, recorder = start_invariant(folder, device)
        alone = sequence(0, text, range(1, 5), NEW)
        run(runner, [alone])
        first = sequence(1, text[: 2 * BLOCK + 3], range(5, 9), NEW)
        run(runner, [first, sequence(2, TEXTS[3], range(9, 13), NEW)], chunk=9)
        again = sequence(3, text, [5, 6, 13, 14], NEW)
        again.computed = 2 * BLOCK
        run(runner, [again])
        assert torch.equal(recorder.logits(3), recorder.logits(0))


def test_a_sequence_that_is_computed_anew(checkpoint: Checkpoint) -> None:
    CROWD.check_anew(checkpoint("llama", **SMALL), 3, 8)


def test_recorded_steps_say_what_launched_ones_say(checkpoint: Checkpoint) -> None:
    """Drawn tokens and log-probabilities, of prompts as well, chosen on the device."""
    folder = checkpoint("llama", **SMALL)
    asked: list[dict[str, Any]] = [
        {"sample": True},
        {"prompt_logprobs": True},
        {"sample": True, "top_p": 0.8},
    ]
    said = []
    with StandInDevice() as device:
        for graphs, late, budget in (((), 0, 100), ((1, 2, 4), 2, 9), ((4,), 1, 30)):
            runner = start(folder, "cuda:0", graphs, batch_invariant=True)
            ours = drive(runner, TEXTS[1:], asked, NEW, device=device, late=late, budget=budget)
            assert bool(graphs) == any(counts.replays for counts in ours.decodes)
            said.append((ours.tokens, sorted(ours.logprobs), sorted(ours.prompts)))
    assert said[0] == said[1] == said[2] and said[0][1] and said[0][2]


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_kept_is_refused(checkpoint: Checkpoint, reason: str) -> None:
    family, options = REFUSED[reason]
    Crowd.check_refused(checkpoint(family), reason, **options)


def test_the_cpu_kernels_take_the_flag(checkpoint: Checkpoint) -> None:
    """Which says nothing new to them: `tests/shard/cpu_backend/test_at_any_load.py`."""
    folder = checkpoint("llama", **FITTING["llama"])
    runner = load_runner(ShardSettings(model_path=folder, batch_invariant=True))
    assert runner.info.backend.startswith("kernels")


def test_torch_on_a_cpu_refuses_it(checkpoint: Checkpoint) -> None:
    told = ShardSettings(model_path=checkpoint("llama"), batch_invariant=True)
    with pytest.raises(ConfigurationError, match="torch computes the model on cpu"):
        load_torch_runner(told, read_config(told.model_path), device="cpu")
