"""Attention to what an index chooses, in the CPU kernels: beside what all families are asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.cpu_backend.chooser_checks import SQUARES, check_long_context, check_unwritten
from tests.shard.cpu_backend.kernel_support import COMPRESSED, cpu_runner
from tests.shard.cpu_backend.test_at_any_load import DOTS, check_invariance
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    load,
    prompts,
    run,
    sequences,
)
from tests.shard.torch_backend.test_kv_dtype import with_scales
from tests.support.quantised import store_fp8
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import find_unsupported
from tgi_trio.shard.cpu_backend.weight_layout import CacheNumbers
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.usefixtures("one_thread")
Checkpoint = Callable[..., Path]

NUMBERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "8-bit weights": {"int8": True},
    "keys and values of 8 bits": {"kv": CacheNumbers("fp8_e4m3fn", [(0.5, 0.5)] * 2)},
    "two threads": {"cores": (0, 0)},
    "dot products": {"dtype": "bfloat16", "pairs": "dot"},
}

ENDINGS = ("_proj.weight", "_mqa.weight", ".wq_b.weight", ".wk.weight")


def make(checkpoint: Checkpoint, **changes: Any) -> Path:
    return checkpoint("deepseek_v32", **COMPRESSED["deepseek_v32"] | changes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "numbers", [pytest.param(each, marks=[DOTS] * (each == "dot products")) for each in NUMBERS]
)
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, numbers: str
) -> None:
    check_invariance(make(checkpoint), **NUMBERS[numbers])


@pytest.mark.parametrize("cores", [(0,), (0, 0)])
def test_a_long_context_with_equal_scores(checkpoint: Checkpoint, cores: tuple[int, ...]) -> None:
    """Chunks that threads share; of few heads often none is positive, and then the first count."""
    folder = make(checkpoint, index_n_heads=3, index_topk=40, max_position_embeddings=2048)
    check_long_context(folder, SQUARES, cores=cores)


def test_what_nobody_has_written_is_not_read(checkpoint: Checkpoint) -> None:
    # Latents are K and V; each layer has an index.
    check_unwritten(make(checkpoint), indexes=2, numbers=2 * 2 * (64 + 32) + 2 * 64)


def test_what_is_kept_of_a_token(checkpoint: Checkpoint) -> None:
    """Its latent twice, and an index key in each layer that has an index."""
    sizes = COMPRESSED["glm_moe_dsa"]
    with cpu_runner(checkpoint("glm_moe_dsa", **sizes)) as (runner, _):
        assert [layer.chooses for layer in runner._forward.spec.layers] == [True, False, True]
        assert runner.info.kv_bytes_per_token == 4 * (3 * 2 * (64 + 32) + 2 * 32)


@pytest.mark.parametrize("word", ["fp8_e4m3fn", "fp8_e5m2"])
def test_8_bit_keys_are_those_of_torch(checkpoint: Checkpoint, tmp_path: Path, word: str) -> None:
    """With scales of the checkpoint; what is half-way may be rounded either way."""
    names = [f"model.layers.{i}.self_attn.k_scale" for i in range(2)]
    folder = with_scales(make(checkpoint), tmp_path, dict.fromkeys(names, 0.125))
    found = []
    runner, recorder = load(folder, dtype="float32", kv_cache_dtype=word)
    rows = sequences(prompts(6), 3, new=6)
    run(runner, rows)
    expected = [recorder.logits(row.id) for row in rows]
    with cpu_runner(folder, kv=CacheNumbers(word, [(0.125, 0.125)] * 2)) as (runner, recorder):
        rows = sequences(prompts(6), 3, new=6)
        run(runner, rows, chunk=20, joins=2)
        found = [recorder.logits(row.id) for row in rows]
    apart = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    assert float(np.median(apart)) < 1e-3


def test_weights_that_stay_fp8(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As in DeepSeek's files, where the weights of an index's heads are not quantised."""
    source = make(checkpoint)
    config = json.loads((source / "config.json").read_text())
    store = store_fp8("block", "weight_scale_inv")
    quantised: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        own, numbers = {name: weight}, weight
        if name.endswith(ENDINGS) and "weights_proj" not in name:
            own, array = store(name.removesuffix(".weight"), weight.numpy())
            numbers = torch.from_numpy(array.astype(np.float32))
        quantised |= own
        exact[name] = numbers.contiguous()
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]}
    kinds = {"exact": (exact, {}), "fp8": (quantised, {"quantization_config": said})}
    for kind, (tensors, more) in kinds.items():
        (tmp_path / kind).mkdir()
        save_file(tensors, tmp_path / kind / "model.safetensors")
        (tmp_path / kind / "config.json").write_text(json.dumps(config | more))
    golden = Golden(tmp_path / "exact")
    with cpu_runner(tmp_path / "fp8") as (runner, recorder):
        assert "as they are stored (e4m3" in runner.info.backend
        batch = sequences(prompts(8), 3, new=8)
        run(runner, batch, chunk=20, joins=3)
        for row in batch:
            assert_greedy(golden, recorder, row, 1e-3)


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral Large 4: layers read latents of others, some turn and some do not."""
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
    sizes |= {"v_head_dim": 64, "index_head_dim": 64, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("sharing")
    return make_wrapped(folder, "mistral_large4", num_key_value_heads=2, **sizes)


def test_layers_that_read_latents_of_others(sharing: Path) -> None:
    """Each that chooses has index keys of its own."""
    golden = Golden(sharing)
    with cpu_runner(sharing) as (runner, recorder):
        assert runner.info.kv_bytes_per_token == 4 * (2 * (64 + 32) + 2 * 64 + 4 * 64)
        rows = sequences(prompts(8), 5, new=8)
        run(runner, rows, chunk=20, joins=3)
        for row in rows:
            assert_greedy(golden, recorder, row, 1e-3)
    check_invariance(sharing)


def test_8_bit_keys_of_others_are_those_of_torch(sharing: Path) -> None:
    found = []
    runner, recorder = load(sharing, dtype="float32", kv_cache_dtype="fp8_e4m3fn")
    with cpu_runner(sharing, kv=CacheNumbers("fp8_e4m3fn", [(1.0, 1.0)] * 5)) as (kernels, own):
        for each, chosen in ((runner, recorder), (kernels, own)):
            rows = sequences(prompts(8), 3, new=8)
            run(each, rows)
            found.append([chosen.logits(row.id) for row in rows])
    apart = [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]
    assert float(np.median(apart)) < 1e-3


def test_indexes_that_fill_no_panels_are_refused(checkpoint: Checkpoint) -> None:
    spec = decoder_spec(read_config(make(checkpoint, index_head_dim=48)))
    reason = "an index has keys of 48 numbers, which is no multiple of 32"
    assert find_unsupported(spec, "float32") == reason
