"""What `quantize` writes is opened by transformers with gptqmodel, and says the same there.

Skipped where gptqmodel is not installed: it brings a torch of its own, and compilers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.shard.torch_backend.golden import Golden
from tgi_trio.model.config import read_config
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.quantising.job import Job
from tgi_trio.shard.quantising.quantise import quantise_model

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@pytest.mark.parametrize("by_activation", [False, True])
def test_transformers_reads_the_same_weights(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_activation: bool,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)  # it wants three at least
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    pytest.importorskip("gptqmodel")
    from transformers import AutoModelForCausalLM, GPTQConfig

    text = tmp_path / "text.txt"
    text.write_text("Weights are read once for all sequences of a batch. " * 60)
    source, output = checkpoint("llama", **SIZES), tmp_path / "out"
    options = {"group": 32, "damping": 0.01, "samples": 6, "sample_tokens": 48}
    quantise_model(
        Job(source, output, by_activation=by_activation, calibration_text=text, **options),  # type: ignore[arg-type]
        lambda parts: parts,
    )
    ids = torch.arange(3, 40)[None]
    theirs = AutoModelForCausalLM.from_pretrained(
        output,
        device_map={"": "cpu"},
        dtype=torch.float32,
        quantization_config=GPTQConfig(bits=4, backend="torch"),
    )(ids).logits[0]
    golden = Golden(source)
    with open_checkpoint(read_config(output)) as weights, torch.no_grad():
        for name, module in golden.model.named_modules():
            if name.endswith("_proj"):
                rows, columns = module.weight.shape
                matrix = weights.matrix(f"{name}.weight", (rows, columns))
                module.weight = torch.nn.Parameter(torch.from_numpy(matrix.dequantised().copy()))
        ours = golden.model(ids).logits[0]
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert (ours - theirs).abs().max() < 0.005 * ours.abs().max()  # they compute in 16 bits
