"""Families that transformers has not say what it says of a relative with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import generated, load, prompts, run, sequences
from tests.shard.torch_backend.own_names import CASES, Checkpoint, make_case
from tests.support.quantised import Store, quantise, store_fp8, store_gptq
from tgi_trio.model.check import check_checkpoint, supported_spec
from tgi_trio.model.config import read_config

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = prompts(8)[2:]
NEW = 12
_BLOCKS: Final = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]}
_GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": 32}
# Packed matrices in formats whose scales are of blocks of rows, or of columns.
STORED: Final[dict[str, tuple[Store, dict[str, Any], tuple[str, ...]]]] = {
    "internlm2": (store_gptq(4, 32), _GPTQ, ("wqkv", "wo", "w1", "w2", "w3")),
    "chatglm": (
        store_fp8("block", "weight_scale_inv"),
        _BLOCKS,
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    "bailing_moe of version 2": (
        store_fp8("block", "weight_scale_inv"),
        _BLOCKS,
        ("query_key_value", "dense", "gate_proj", "up_proj", "down_proj"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    relative, own = make_case(name, checkpoint, tmp_path)
    config = read_config(own)
    check_checkpoint(config, supported_spec(config))
    runner, recorder = load(own)
    assert runner.info.backend == "torch"
    rows = sequences(PROMPTS, shuffle=3, new=NEW)
    run(runner, rows, chunk=20, joins=2)
    golden = Golden(relative)
    for row in rows:
        assert_greedy(golden, recorder, row)
    assert len({tuple(generated(row)) for row in rows}) == len(rows)


@pytest.mark.parametrize("name", STORED)
def test_quantised_weights(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """They say what the numbers say that they stand for."""
    own = make_case(name, checkpoint, tmp_path)[1]
    store, said, parts = STORED[name]
    folder = quantise(
        own, tmp_path / "q", store, said, endings=tuple(f".{part}.weight" for part in parts)
    )
    config = read_config(folder)
    check_checkpoint(config, supported_spec(config))
    found = []
    for each in (folder, folder / "plain"):
        runner = load(each)[0]
        rows = sequences(PROMPTS, shuffle=3, new=NEW)
        run(runner, rows, chunk=20, joins=2)
        found.append([generated(row) for row in rows])
    assert found[0] == found[1]
