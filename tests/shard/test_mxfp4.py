"""gpt-oss' own layout of experts: the numbers that transformers makes of it, in any cut and over
ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.model.support import Asked
from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    load,
    prompts,
    run,
    sequence,
    sequences,
    tables,
)
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import read_model_facts
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.checkpoint.unpacked import unpack_matrix
from tgi_trio.shard.cpu_backend.tables import Code

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS = ("gate_up_proj", "down_proj")
PLACE = "model.layers.0.mlp.experts."


@pytest.fixture
def source(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("gpt_oss", head_dim=16, intermediate_size=64)


def store(source: Path, folder: Path) -> Path:
    """Write a copy of a checkpoint with random experts in MXFP4; `plain` has their numbers."""
    plain, draw = folder / "plain", torch.Generator().manual_seed(3)
    plain.mkdir(parents=True)
    stored, exact = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(EXPERTS):
            stored[name] = exact[name] = tensor
            continue
        count, inputs, outputs = tensor.shape
        shape = (count, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape[:3], generator=draw, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert exact[name].shape == tensor.shape
    config = json.loads((source / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    for each in (folder, plain):
        (each / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_numbers_are_those_of_transformers_in_any_cut(source: Path, tmp_path: Path) -> None:
    folder = store(source, tmp_path / "q")
    exact = load_file(folder / "plain/model.safetensors")
    with open_checkpoint(read_config(folder)) as weights:
        for part in EXPERTS:
            for expert, numbers in enumerate(exact[f"{PLACE}{part}"].transpose(1, 2).numpy()):
                name = f"{PLACE}{expert}.{part}"
                matrix = weights.matrix(name, numbers.shape, transposed=True)
                assert (matrix.bits, matrix.group) == (4, 32)
                np.testing.assert_array_equal(matrix.dequantised(), numbers)
                cut = matrix.rows(slice(3, 40)).columns(slice(7, 49))
                np.testing.assert_array_equal(cut.dequantised(), numbers[3:40, 7:49])
                parts = unpack_matrix(matrix.columns(slice(32, 64)))
                assert parts is not None and parts.table is not None and parts.lows is None
                values = parts.table[parts.codes] * np.repeat(parts.scales, 32, axis=1)
                np.testing.assert_array_equal(values, numbers[:, 32:64])


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_those_of_the_numbers(source: Path, tmp_path: Path, ranks: int) -> None:
    folder = store(source, tmp_path / "q")
    assert check_model(read_config(folder), Asked(quantize="mxfp4")) == []
    assert read_model_facts(folder).quantize == "mxfp4"
    golden, some = Golden(folder / "plain"), prompts(4)
    blocks = tables(some, new=8)
    rows = [sequence(i, prompt, blocks[i], 8) for i, prompt in enumerate(some)]
    if ranks == 1:
        runner, recorder = load(folder, dtype="float32")
        run(runner, rows, chunk=20)
    else:
        recorder = GreedyRecorder()
        with ranks_of(folder, 2, recorder, dtype="float32") as runner:
            runner.warm_up(WarmupRequest(64, 256, 16, 511 * BLOCK))
            run(runner, rows, chunk=20)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance=2e-4)


def test_cpu_kernels_multiply_them_as_they_are_stored(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint("gpt_oss", **FITTING["gpt_oss"])
    folder = store(source, tmp_path / "q")
    golden, rows = Golden(folder / "plain"), sequences(prompts(8), 3, new=12)
    with cpu_runner(folder) as (runner, recorder):
        operations = runner._forward.program.operations
        experts = operations[operations["code"] == Code.EXPERTS]
        assert len(experts) and experts["multiply"].all()
        run(runner, rows, chunk=20, joins=3, seed=1)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance=2e-4)


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("down_proj_scales", lambda t: t.fill_(255), "down_proj_scales' .* a scale that is infin"),
        ("down_proj_scales", lambda t: None, "down_proj_scales' is missing"),
        ("down_proj_scales", lambda t: t[..., :1].clone(), r"down_proj_scales' .* \[64, 1\], but"),
        ("gate_up_proj_blocks", lambda t: t[..., :8].clone(), r"_blocks' .* has shape .*8\], but"),
        ("gate_up_proj_blocks", lambda t: t.to(torch.int16), "_blocks' .* is of type I16"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    source: Path,
    tmp_path: Path,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    reason: str,
) -> None:
    folder = store(source, tmp_path / "q")
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(f"{PLACE}{part}"))
    if changed is not None:
        tensors[f"{PLACE}{part}"] = changed
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=reason):
        check_model(read_config(folder), Asked())


def test_a_flag_that_contradicts_it_is_refused_with_both_names(
    source: Path, tmp_path: Path
) -> None:
    folder = store(source, tmp_path / "q")
    with pytest.raises(ConfigurationError, match=r"--quantize gptq contradicts .* holds mxfp4"):
        check_model(read_config(folder), Asked(quantize="gptq"))
