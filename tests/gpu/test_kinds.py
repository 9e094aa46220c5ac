"""What a device says of every kind of layer, weight, cache and request is what the CPU says.

Recorded, launched ahead and with drafts; in float32, so that tokens are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.adapters.peft_support import install, write_adapter
from tests.shard.conftest import checkpoint  # noqa: F401  (a fixture)
from tests.shard.torch_backend.device_kinds import KINDS
from tests.shard.torch_backend.models_support import prompts
from tests.shard.torch_backend.stand_in_support import TakingTurns, agree, blinded, drive, start
from tests.support.exl3 import EXL3, store_exl3
from tests.support.quantised import quantise
from tgi_trio.shard.speculation.payoff import Payoff
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS
from tgi_trio.shard.torch_backend.recordings import carveouts
from tgi_trio.shard.torch_backend.recordings.carveouts import Carveouts

WHERE = os.environ.get("TESTED_DEVICE", "cuda")  # "cpu": to try the tests themselves
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        WHERE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]
TEXTS = prompts(3, longest=20)
PLAIN: list[dict[str, Any]] = [{}, {}, {}]
GRAPHS = (2, 4, 16)
NEW = 8
FAMILIES = (
    *("gemma3_text", "phi3", "gpt_neox", "cohere", "olmo2"),
    *("qwen3_moe", "gpt_oss", "deepseek_v2"),  # mixtures, sinks, latents
    *("lfm2", "qwen3_5_text", "bamba", "jamba", "recurrent_gemma"),  # states
    *("gemma4_text", "gemma3n_text", "mimo_v2_flash"),  # layers that differ in what they keep
    "llama4_text",  # chunks, and weights of what goes into experts
    *("minimax_m3_vl_text", "qwen4_exp_text"),  # blocks that an index chooses
)

Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def everything_is_recorded(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """A capture that fails is told, and its steps are launched: the same tokens, later."""
    yield
    assert "none could be recorded" not in capfd.readouterr().err


def compare(folder: Path, asked: list[dict[str, Any]], **settings: Any) -> None:
    """Have the device and the CPU say the same."""
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = drive(start(folder, "cpu", grammars=TakingTurns(), **settings), TEXTS, asked, NEW)
    runner = start(folder, WHERE, GRAPHS, TakingTurns(), **settings)
    agree(drive(runner, TEXTS, asked, NEW), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(checkpoint: Checkpoint, family: str) -> None:  # noqa: F811
    compare(checkpoint(family), KINDS["plain"])


def test_large_heads(checkpoint: Checkpoint) -> None:  # noqa: F811
    compare(checkpoint("gemma4_text", head_dim=256, global_head_dim=512), KINDS["plain"])


@pytest.mark.parametrize("kind", KINDS)
def test_requests(checkpoint: Checkpoint, kind: str) -> None:  # noqa: F811
    compare(checkpoint("llama"), KINDS[kind])


def test_carve_outs(
    checkpoint: Checkpoint,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The driver takes them, and what is recorded with them finds the same."""

    def choose(own: Carveouts, sizes: object, idle: object) -> None:
        own.chosen = {2: 100, 4: 72, 16: 44}

    monkeypatch.setattr(Carveouts, "choose", choose)
    compare(checkpoint("llama"), KINDS["plain"])
    assert carveouts._LEFT not in capsys.readouterr().err


@pytest.mark.parametrize("word", ["int4", "bitsandbytes-nf4", "eetq", "fp8", "q8_0", "q4_0"])
def test_weights_that_stay_codes(checkpoint: Checkpoint, word: str) -> None:  # noqa: F811
    compare(checkpoint("llama"), PLAIN, quantize=word)


@pytest.mark.parametrize(("bits", "book"), [(3, "3inst"), (6, "mcg"), (2.5, "mul1")])
def test_weights_that_stay_on_a_trellis(
    checkpoint: Checkpoint,  # noqa: F811
    tmp_path: Path,
    bits: float,
    book: str,
) -> None:
    source = checkpoint("llama", hidden_size=128, intermediate_size=256)
    endings = ("_proj.weight", "lm_head.weight")
    compare(quantise(source, tmp_path / "q", store_exl3(bits, book), EXL3, endings=endings), PLAIN)


def test_experts_that_stay_codes(checkpoint: Checkpoint) -> None:  # noqa: F811
    compare(checkpoint("qwen3_moe"), PLAIN, quantize="q8_0")


def test_adapters_beside_prompts(checkpoint: Checkpoint, tmp_path: Path) -> None:  # noqa: F811
    """Of steps with rows of any and of none."""
    torch.backends.cuda.matmul.allow_tf32 = False
    folder, asked = checkpoint("llama"), [{"adapter": number} for number in (1, 0, 2)]
    adapters = [write_adapter(folder, tmp_path / str(r), seed=r, r=r) for r in (4, 16)]
    said = []
    for where, graphs in (("cpu", ()), (WHERE, GRAPHS)):
        runner = start(folder, where, graphs, max_lora_rank=16, max_loaded_adapters=2)
        for number, adapter in enumerate(adapters, start=1):
            install(runner, number, adapter)
        said.append(drive(runner, TEXTS, asked, NEW, budget=12))
    agree(said[1], said[0])


@pytest.mark.parametrize("codes", EIGHT_BITS)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_keys_and_values_of_8_bits(checkpoint: Checkpoint, family: str, codes: str) -> None:  # noqa: F811
    compare(checkpoint(family), PLAIN, kv_cache_dtype=codes)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_drafts_of_n_grams(
    checkpoint: Checkpoint,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
) -> None:
    """Looked up on the device, and step after step unread."""
    monkeypatch.setattr(Payoff, "allows", lambda self, rows: True)  # a matter of time
    monkeypatch.setattr(Payoff, "is_resting", lambda self, rows: False)
    folder = blinded(checkpoint(family, num_hidden_layers=1), tmp_path / family)
    host, begins = start(folder, "cpu"), [[7], [50]]
    walks = drive(host, begins, PLAIN, 20, late=0).tokens
    texts = [[*begin, *walk, *begin, *walk[:2]] for begin, walk in zip(begins, walks, strict=True)]
    expected = drive(host, texts, PLAIN, NEW)
    runner = start(folder, WHERE, GRAPHS, speculate=2)
    ours = drive(runner, texts, PLAIN, NEW, drafter=runner.drafter(2))
    assert ours.tokens == expected.tokens
    assert ours.drafts > 0 and (ours.moved > 0 or WHERE == "cpu")
