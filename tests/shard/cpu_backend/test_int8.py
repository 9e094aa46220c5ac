"""8-bit weights: the kernels compute what the dequantised weights give, or refuse to serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner, stack
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import generated, prompts, run, sequences
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.checkpoint.formats.int8 import to_int8
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.cpu_backend import target
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.instructions import find_variant
from tgi_trio.shard.cpu_backend.kinds.table import KINDS
from tgi_trio.shard.cpu_backend.packing import Packer
from tgi_trio.shard.cpu_backend.tables import OPERATION, Buffer, Code, Epilogue
from tgi_trio.shard.cpu_backend.team import Team
from tgi_trio.shard.cpu_backend.weight_layout import PANEL, SPARE_ROWS

PROMPTS = prompts(8)
pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]


def rows() -> list[ShardSequence]:
    return sequences(PROMPTS, 3)


def dequantised(golden: Golden) -> Golden:
    """Replace the weights of all linear layers; embeddings stay, also where the head is tied."""
    for layer in golden.model.modules():
        if isinstance(layer, torch.nn.Linear):
            whole, scales = to_int8(layer.weight.detach().numpy())
            layer.weight = torch.nn.Parameter(torch.from_numpy(whole * scales[:, None]))
    return golden


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_tokens_are_those_of_the_dequantised_weights(checkpoint: Checkpoint, family: str) -> None:
    folder = checkpoint(family, **FITTING[family])
    golden = dequantised(Golden(folder))
    with cpu_runner(folder, int8=True) as (runner, recorder):
        batch = rows()
        run(runner, batch, chunk=20, joins=3, seed=1)
        for row in batch:
            assert_greedy(golden, recorder, row, tolerance=1e-3)  # the product is rounded there
    assert len({tuple(generated(row)) for row in batch}) == len(batch)


@pytest.fixture(scope="module")
def llama(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama", **FITTING["llama"])


@pytest.mark.parametrize("int8", [True, False])
@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 19),
    st.integers(1, 9).map(lambda n: 32 * n),
    st.integers(1, 70),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_a_product_is_numpys(
    llama: Path, int8: bool, tokens: int, inputs: int, outputs: int, biased: bool, seed: int
) -> None:
    """What lies behind the last row, where a tile may read, is in no result."""
    draw = np.random.default_rng(seed)
    magnitudes = 10.0 ** draw.uniform(-3, 3, (outputs, 1))
    weights = (draw.standard_normal((outputs, inputs)) * magnitudes).astype(np.float32)
    room = allocate_zeroed((tokens + SPARE_ROWS, inputs), np.float32)
    x = room[:tokens]
    room[tokens:] = np.nan
    x[:] = draw.standard_normal(x.shape)
    used = weights.astype(np.float64)
    if int8:
        whole, scales = to_int8(weights)
        used[:] = whole * scales[:, None].astype(np.float64)
    bias = np.zeros(-(-outputs // PANEL) * PANEL, np.float32)
    bias[:outputs] = draw.standard_normal(outputs) if biased else 0.0
    found = product(llama, x, weights, bias if biased else None, int8=int8)[:, :outputs]
    exact = x.astype(np.float64) @ used.T + bias[:outputs]
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weights, axis=1) + 1.0
    assert (np.abs(found - exact) <= 1e-5 * size).all()


def product(
    folder: Path, x: np.ndarray, weights: np.ndarray, bias: np.ndarray | None, *, int8: bool
) -> np.ndarray:
    """Return x W^T + bias by one operation, compiled as for the model in `folder`."""
    spec = decoder_spec(read_config(folder))
    assert spec is not None
    variant = find_variant(spec, "float32", int8=int8)
    with Packer(variant.weights, threads=1) as packer:
        panels, scales = packer.pack(stack(weights))
        packer.start()
    assert (scales is not None) == int8
    operation = np.zeros(1, OPERATION)
    result = allocate_zeroed((len(x), len(panels) * PANEL), np.float32)
    fields = {
        "code": Code.LINEAR,
        "source": Buffer.NORMED,
        "target": Buffer.QKV,
        "epilogue": Epilogue.STORE,
        "weights": address(panels),
        "scales": address(scales),
        "bias": address(bias),
        "inputs": x.shape[1],
        "outputs": result.shape[1],
        "width": result.shape[1],
        "scale": 1.0,
    }
    for name, value in fields.items():
        operation[name] = value
    scratch = allocate_zeroed((8, PANEL), np.float32)
    with Team(variant, operation, [0]) as team:
        team.step["end"], team.step["tokens"] = 1, len(x)
        team.step["scratch"] = address(scratch)
        team.step["buffers"][0, Buffer.NORMED] = address(x)
        team.step["buffers"][0, Buffer.QKV] = address(result)
        team.run()
    return result


def test_a_replacement_computes_the_same_bits(llama: Path) -> None:
    """Replays rely on it: weights are quantised anew at every start, on any number of threads."""
    found = []
    for _ in range(2):
        with cpu_runner(llama, int8=True) as (runner, recorder):
            batch = rows()
            run(runner, batch)
            found.append([recorder.logits(row.id) for row in batch])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_fewer_drafts_fill_a_step_of_8_bits(llama: Path) -> None:
    """Their arithmetic sets the pace from a few rows on, see docs/benchmarks/quantised.md."""
    with cpu_runner(llama, int8=True) as (runner, _):
        eight = runner.info.draft_budget
    with cpu_runner(llama) as (runner, _):
        assert 1 < eight < runner.info.draft_budget


def test_weights_take_a_byte_each(llama: Path) -> None:
    sizes = []
    for int8 in (False, True):
        with cpu_runner(llama, int8=int8) as (runner, _):
            program = runner._forward.program
            sizes.append(program.weight_bytes)
            sizes.append(program.caches.bytes_per_token)
    linear = sum(
        parameter.numel()
        for name, parameter in Golden(llama).model.named_parameters()
        if parameter.dim() == 2 and "embed" not in name
    )
    plain, kv, quantised, same_kv = sizes
    assert kv == same_kv
    assert plain - quantised == pytest.approx(3 * linear, rel=0.05)  # scales take some of it


@pytest.mark.parametrize(
    ("instructions", "dtype", "in_float32"),
    [("avx2", "bfloat16", False), ("avx2", "float32", True), ("vnni", "bfloat16", True)],
)
def test_weights_that_become_int8_are_multiplied_as_integers_without_avx512(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    instructions: str,
    dtype: str,
    in_float32: bool,
) -> None:
    """With 16 bits of activations; with float32 where that was asked for, and is as fast."""
    monkeypatch.setattr(target, "dots", lambda: instructions)
    monkeypatch.setattr(target, "multiplies_codes", lambda: False)
    asked = ShardSettings(model_path=llama, quantize="eetq", dtype=dtype)
    found = target.find_target(asked, read_config(llama), None, None)
    assert found.int8 == in_float32
    assert found.find_bits(KINDS["int8"].kind) == 16
