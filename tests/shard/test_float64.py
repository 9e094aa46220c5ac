"""Checkpoints in float64, as scientific programs save them: they are computed in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.support import Asked
from tests.shard.cpu_backend.kernel_support import cpu_runner
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import load, prompts, run, sequences
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "backend"),
    [("llama", "torch"), ("llama", "kernels"), ("mixtral", "torch"), ("gpt2", "torch")],
)
def test_float64(checkpoint: Make, tmp_path: Path, family: str, backend: str) -> None:
    """Experts and transposed matrices are cut as others are."""
    sizes = {"llama": {"head_dim": 32}}.get(family, {})
    folder = Path(shutil.copytree(checkpoint(family, **sizes), tmp_path / "wide"))
    tensors = load_file(folder / "model.safetensors")
    wide = {name: tensor.double() * (1 + 1e-10) for name, tensor in tensors.items()}
    assert not torch.equal(next(iter(wide.values())).float().double(), next(iter(wide.values())))
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float64"}))
    assert check_model(read_config(folder), Asked()) == []
    golden, rows = Golden(folder), sequences(prompts(2), new=8)
    loaded = nullcontext(load(folder)) if backend == "torch" else cpu_runner(folder)
    with loaded as (runner, recorder):
        assert runner.info.dtype == "float32"
        run(runner, rows)
        for row in rows:
            assert_greedy(golden, recorder, row, tolerance=5e-4)
