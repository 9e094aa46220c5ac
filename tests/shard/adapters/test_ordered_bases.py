"""Adapters on weights whose inputs the kernels sort read activations in the order of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.adapters.peft_support import adapted, install, write_adapter
from tests.shard.cpu_backend.kernel_support import cpu_runner
from tests.shard.torch_backend.models_support import load, prompts, run, sequences
from tests.support.quantised import Store, quantise, store_fp8, store_gptq

pytestmark = pytest.mark.usefixtures("one_thread")
GPTQ = {"quant_method": "gptq", "sym": False, "bits": 4, "group_size": 32, "desc_act": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]}
STORED: dict[str, tuple[Store, dict[str, Any]]] = {
    "gptq": (store_gptq(4, 32, shuffled=True), GPTQ),
    "fp8": (store_fp8("block", "weight_scale_inv"), FP8),
}


@pytest.mark.parametrize("stored", STORED)
def test_what_torch_computes(checkpoint: Callable[..., Path], tmp_path: Path, stored: str) -> None:
    base = checkpoint("llama", hidden_size=128, head_dim=32, intermediate_size=256)
    folder = quantise(base, tmp_path / "q", *STORED[stored])
    adapter = write_adapter(base, tmp_path / "a", r=4)
    reference, recorder = load(folder, dtype="float32", max_lora_rank=4)
    install(reference, 1, adapter)
    some = [prompts(5)[4]] * 2
    run(reference, adapted(sequences(some, new=1), [0, 1]))
    wanted = [recorder.logits(i) for i in range(2)]
    with cpu_runner(folder, max_lora_rank=4) as (runner, recorder):
        assert any(runner._forward.program.operations["order"])
        install(runner, 1, adapter)
        run(runner, adapted(sequences(some, new=1), [0, 1]))
        found = [recorder.logits(i) for i in range(2)]
    assert not torch.allclose(wanted[0], wanted[1], atol=0.5)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=0.0)
