"""Checkpoints that other people's tools make on the spot, of a random model: read to their numbers.

What weights mean is said by the tool itself, where it dequantises, and the tokens by transformers
with those. Each tool is skipped where it is not installed: `make test-quantisers` installs them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.model.support import Asked
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import load, prompts, run, sequence, tables
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.shard.checkpoint.lookup import open_checkpoint

Make = Callable[..., Path]
WEIGHTS = "model.safetensors"
SIZES = {"hidden_size": 128, "intermediate_size": 256}


def open_model(source: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, **options)


def check(made: Path, exact: dict[str, torch.Tensor], source: Path, tmp_path: Path) -> None:
    """Hold a checkpoint's numbers, and its tokens, to what its matrices mean by `exact`."""
    config = read_config(made)
    assert check_model(config, Asked()) == []
    with open_checkpoint(config) as weights:
        for name, expected in exact.items():
            found = weights.matrix(name, (expected.shape[0], expected.shape[1])).dequantised()
            torch.testing.assert_close(
                torch.from_numpy(found.copy()), expected.float(), rtol=2**-8, atol=1e-6
            )
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_bytes((source / "config.json").read_bytes())
    whole = load_file(source / "model.safetensors")
    with open_checkpoint(config) as weights:
        for name in exact:
            rows, columns = whole[name].shape
            numbers = weights.matrix(name, (rows, columns)).dequantised()
            whole[name] = torch.from_numpy(numbers.copy())
    save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
    golden, some = Golden(plain), prompts(3)
    runner, recorder = load(made, dtype="float32")
    blocks = tables(some, new=8)
    rows_of = [sequence(i, prompt, blocks[i], 8) for i, prompt in enumerate(some)]
    run(runner, rows_of)
    for row in rows_of:
        assert_greedy(golden, recorder, row, tolerance=2e-4)
