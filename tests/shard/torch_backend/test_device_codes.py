"""Quantised checkpoints over the stand-in device say what they say on the CPU, recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shard.test_mxfp4 import store
from tests.shard.test_quantised_models import STORED
from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import BLOCK, prompts
from tests.support.quantised import DATA, quantise, real_checkpoint
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.shard.torch_backend.layers.mlp import ExpertsMlp
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

need_triton()

from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402  (Triton's)
from tests.shard.torch_backend.stand_in_support import (  # noqa: E402
    agree,
    drive,
    start,
)
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.shard.torch_backend.layers.experts import grouped_matrices, grouping  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears import code_tiles, coded_linear  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

TEXTS = prompts(2, longest=BLOCK + 4)
# How tokens are chosen is test_device_requests.py's and test_device_sampler.py's.
ASKED: list[dict[str, Any]] = [{}, {}]
Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an interpreter, which has but one, not do the work of hundreds."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)
    few, some = (tile._replace(outputs=256) for tile in code_tiles._WIDE_TILES)
    monkeypatch.setattr(code_tiles, "_WIDE_TILES", (few, some))
    monkeypatch.setattr(coded_linear, "_PROGRAMS", 4)


def check(folder: Path, **settings: Any) -> Counter[str]:
    """The tokens are the CPU's, each decode is one replay, and codes are what is multiplied.

    Rows come and go together: others, of all families, are test_device_families.py's.

    Return what the warm-up has launched.
    """
    expected = drive(start(folder, "cpu", **settings), TEXTS, ASKED, 3, late=0)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (2,), **settings)
        launches = Counter(device.counts.launches)
        assert launches["multiply_codes"] or launches["multiply_coded_groups"]
        ours = drive(runner, TEXTS, ASKED, 3, device=device, late=0)
    agree(ours, expected)
    assert ours.decodes and all(counts.replays == 1 for counts in ours.decodes)
    return launches


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", sorted(each.name for each in DATA.iterdir() if each.is_dir()))
def test_what_other_tools_made(tmp_path: Path, name: str) -> None:
    check(real_checkpoint(name, tmp_path))


def test_a_gguf_of_several_types(tmp_path: Path) -> None:
    check(gguf_folder(Path(__file__).parents[1] / "gguf/tiny-Q4_K_M.gguf", tmp_path))


def test_groups_of_16_in_any_order(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Those of other tools are of 128, or of a channel."""
    check(quantise(checkpoint("llama", **SMALL), tmp_path / "q", *STORED["gptq 4 bits, acts"]))


@pytest.mark.parametrize("stored", ["bitnet", "bitnet, trained"])
def test_ternary_codes(checkpoint: Checkpoint, tmp_path: Path, stored: str) -> None:
    """One scale for a matrix, and norms before the last products."""
    check(quantise(checkpoint("bitnet", **SMALL), tmp_path / "q", *STORED[stored]))


def test_experts_stay_codes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """And are multiplied together, so that steps can be recorded."""
    folder = quantise(checkpoint("mixtral", **SMALL), tmp_path / "q", *STORED["gptq 4 bits, acts"])
    assert check(folder)["multiply_coded_groups"]


def test_experts_of_gpt_oss_stay_codes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Its own layout of them: MXFP4 with biases, gates in pairs; all else are numbers."""
    source = checkpoint("gpt_oss", head_dim=16, intermediate_size=64, **SMALL)
    launches = check(store(source, tmp_path / "q"))
    assert launches["multiply_coded_groups"] and not launches["multiply_groups"]


def test_experts_that_are_rounded_stay_codes(checkpoint: Checkpoint) -> None:
    """One of every token is computed beside them."""
    assert check(checkpoint("qwen2_moe", **SMALL), quantize="q8_0")["multiply_coded_groups"]


def test_experts_that_are_not_stored_alike_are_numbers(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quantise(checkpoint("mixtral", **SMALL), tmp_path / "q", *STORED["gptq 4 bits"])
    told = ShardSettings(model_path=folder, dtype="float32")
    with StandInDevice():
        for kind in (grouped_matrices.CodedMatrices, grouped_matrices.PlainMatrices):
            runner = load_torch_runner(told, read_config(told.model_path), device="cuda:0")
            assert isinstance(runner, TorchRunner) and isinstance(runner.model, Decoder)
            for layer in runner.model.layers:
                assert isinstance(layer.mlp, ExpertsMlp) and layer.mlp.grouped is not None
                assert isinstance(layer.mlp.grouped._up, kind)
            monkeypatch.setattr(grouping, "stack", lambda every: None)


def test_two_ranks(checkpoint: Checkpoint) -> None:
    """Rows are split anywhere, inputs at borders of groups; other parts are plain numbers."""
    folder = checkpoint("llama", hidden_size=128, intermediate_size=192, **SMALL)
    expected = drive(start(folder, "cpu", quantize="q4_0"), TEXTS, ASKED, 3)
    with StandInDevice() as device, two_ranks(folder, device, (2,), quantize="q4_0") as pair:
        runner, steps = pair
        ours = drive(runner, TEXTS, ASKED, 3, device=device)
    agree(ours, expected)
    assert ours.decodes and all(counts.replays == 1 for counts in ours.decodes)
    assert not any(counts.waits for counts in steps)


@pytest.mark.parametrize(
    ("family", "word"), [("gemma2", "int4"), ("gpt2", "fp8"), ("qwen2", "bitsandbytes-nf4")]
)
def test_what_is_rounded_while_it_is_loaded(checkpoint: Checkpoint, family: str, word: str) -> None:
    check(checkpoint(family, **({"n_layer": 1} if family == "gpt2" else SMALL)), quantize=word)
