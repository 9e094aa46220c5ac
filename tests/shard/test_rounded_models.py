"""`--quantize` on plain numbers: every backend computes with rounded weights, and holds less."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.support import write_safetensors
from tests.shard.cpu_backend.kernel_support import cpu_runner
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    generated,
    load,
    prompts,
    run,
    sequences,
)
from tests.support.quantised import real_checkpoint
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.quantised.recognise import MADE_AT_LOAD
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.checkpoint.rounding.encoding import round_matrix
from tgi_trio.shard.checkpoint.unpacked import unpack_matrix
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.torch_backend.layers.linears.quantised_linear import (
    QuantisedLinear,
    QuantisedWeight,
)
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS, NEW = prompts(6), 8
Checkpoint = Callable[..., Path]
# What a rank has of a matrix's inputs is whole groups of each encoding, but for one that is split.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def dequantised(golden: Golden, word: str) -> Golden:
    """Replace the weights of all linear layers; embeddings stay, also where the head is tied."""
    for layer in golden.model.modules():
        if isinstance(layer, torch.nn.Linear):
            exact = PlainMatrix(layer.weight.detach().numpy().copy())
            values = round_matrix(exact, ENCODINGS[word]).dequantised()
            layer.weight = torch.nn.Parameter(torch.from_numpy(values))
    return golden


@contextmanager
def torch_runner(folder: Path, word: str) -> Iterator[tuple[Runner, GreedyRecorder]]:
    yield load(folder, dtype="float32", quantize=word)


@contextmanager
def kernel_runner(folder: Path, word: str) -> Iterator[tuple[Runner, GreedyRecorder]]:
    with cpu_runner(folder, quantize=word) as (runner, recorder):
        yield runner, recorder


@contextmanager
def two_ranks(folder: Path, word: str) -> Iterator[tuple[Runner, GreedyRecorder]]:
    recorder = GreedyRecorder()
    with ranks_of(folder, 2, recorder, dtype="float32", quantize=word) as runner:
        runner.warm_up(WarmupRequest(64, 256, 16, 511 * BLOCK))
        yield runner, recorder


@pytest.fixture(scope="module")
def golden(checkpoint: Checkpoint) -> Callable[[str], Golden]:
    """Return a function word -> transformers' model of weights rounded so, made once for each."""
    return lru_cache(lambda word: dequantised(Golden(checkpoint("llama", **SIZES)), word))


RUNNERS = {"torch": torch_runner, "kernels": kernel_runner, "two ranks": two_ranks}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", RUNNERS)
@pytest.mark.parametrize("word", MADE_AT_LOAD)
def test_tokens_are_those_of_the_rounded_weights(
    checkpoint: Checkpoint, golden: Callable[[str], Golden], backend: str, word: str
) -> None:
    with RUNNERS[backend](checkpoint("llama", **SIZES), word) as (runner, recorder):
        rows = sequences(PROMPTS, 3, new=NEW)
        run(runner, rows, chunk=20, joins=2)
        for row in rows:
            # The kernels round activations to 16 bits.
            tolerance = 5e-3 if backend == "kernels" else 5e-4
            assert_greedy(golden(word), recorder, row, tolerance=tolerance)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "gpt2", "gemma2"])
def test_any_family_is_rounded_by_torch(checkpoint: Checkpoint, family: str) -> None:
    """Mixtures, latents, transposed matrices and tied heads: the same answers on one rank and two,
    and others than those of the plain weights.
    """
    folder = checkpoint(family)
    with torch_runner(folder, "int4") as (runner, recorder):
        rows = sequences(PROMPTS, 3, new=NEW)
        run(runner, rows)
        logits = [recorder.logits(row.id) for row in rows]
        assert QuantisedLinear in {type(linear) for linear in linears(runner)}
    with two_ranks(folder, "int4") as (runner, recorder):
        again = sequences(PROMPTS, 3, new=NEW)
        run(runner, again)
        for row, other, found in zip(again, rows, logits, strict=True):
            assert generated(row) == generated(other)
            torch.testing.assert_close(recorder.logits(row.id), found, atol=1e-4, rtol=0)
    plain, recorder = load(folder, dtype="float32")
    rows = sequences(PROMPTS, 3, new=1)
    run(plain, rows)
    distance = max(
        float((recorder.logits(row.id)[0] - found[0]).abs().max())
        for row, found in zip(rows, logits, strict=True)
    )
    assert distance > 1e-3


def linears(runner: Runner) -> list[Any]:
    layers = runner.model.layers  # type: ignore[attr-defined]
    return [each for layer in layers for each in (layer.attention.qkv, layer.attention.output)]


@pytest.mark.parametrize("word", MADE_AT_LOAD)
def test_torch_holds_what_is_stored(checkpoint: Checkpoint, word: str) -> None:
    folder = checkpoint("llama", **SIZES)
    plain, _ = load(folder, dtype="bfloat16")
    small, _ = load(folder, dtype="bfloat16", quantize=word)
    most = max(
        16 * linear.nbytes() / before.nbytes()  # bits of a weight
        for before, linear in zip(linears(plain), linears(small), strict=True)
    )
    # Codes of 5 bits take a byte; scales and lows of 32 inputs are float32.
    assert most <= (6.1 if "4" in word else 10.1)


def test_weights_at_load_take_no_more_than_file_and_result(tmp_path: Path) -> None:
    """In a process of its own: the most it ever held, above what the imports took."""
    folder = make_checkpoint(
        tmp_path,
        "llama",
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
    )
    file = (folder / "model.safetensors").stat().st_size
    layer = file // 6
    script = f"""
import json, sys
from pathlib import Path
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.shard.machine.memory import peak_bytes, reset_peak
import torch
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
torch.nn.functional.linear(torch.ones(2, 64), torch.ones(64, 64))
base = reset_peak()
folder = Path({str(folder)!r})
settings = ShardSettings(model_path=folder, dtype="float32", quantize="q4_k", cpu_threads=1)
runner = load_torch_runner(settings, read_config(folder))
print(json.dumps([peak_bytes() - base, runner.model.nbytes()]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, result = json.loads(done.stdout.splitlines()[-1])
    assert result < 0.25 * file
    # Pages of the file count as long as it is mapped.
    assert peak <= file + result + layer + (32 << 20)


def test_models_of_transformers_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "codegen", "vocab_size": 10, "n_embd": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", {"some.weight": ("F32", (2, 2))})
    with pytest.raises(ConfigurationError, match=r"--quantize fp8 rounds.*through transformers"):
        load_torch_runner(ShardSettings(model_path=tmp_path, quantize="fp8"), read_config(tmp_path))


@pytest.mark.parametrize("name", ["gptq-act-g128", "ar-awq-asym", "bnb-nf4"])
def test_quantised_checkpoints_stay_so_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A file's matrices become numbers where those fit, and else in every call."""
    folder = real_checkpoint(name, tmp_path)
    tokens = []
    for free in (1 << 40, 1 << 10):
        monkeypatch.setattr(
            "tgi_trio.shard.torch_backend.loading.target.free_bytes", lambda *_, free=free: free
        )
        runner, _ = load(folder, dtype="float32")
        kept = any(isinstance(linear, QuantisedLinear) for linear in linears(runner))
        assert kept == (free == 1 << 10)
        rows = sequences(PROMPTS, 3, new=NEW)
        run(runner, rows)
        tokens.append([generated(row) for row in rows])
    assert tokens[0] == tokens[1]


def test_parts_of_one_layer_may_be_stored_in_different_ways() -> None:
    draw = np.random.default_rng(0)
    exact = [draw.standard_normal((48, 128)).astype(np.float32) for _ in range(3)]
    bias, x = torch.randn(144), torch.randn(5, 128)
    parts: list[QuantisedWeight | torch.Tensor] = [torch.from_numpy(exact[0])]
    dense = [torch.from_numpy(exact[0])]
    for word, values in (("int4", exact[1]), ("bitsandbytes-nf4", exact[2])):
        matrix = round_matrix(PlainMatrix(values), ENCODINGS[word])
        taken = unpack_matrix(matrix)
        assert taken is not None
        parts.append(QuantisedWeight(taken, torch.device("cpu")))
        dense.append(torch.from_numpy(np.asarray(matrix.dequantised())))
    expected = torch.nn.functional.linear(x, torch.cat(dense), bias)
    torch.testing.assert_close(QuantisedLinear(parts, bias)(x), expected, atol=1e-4, rtol=0)
