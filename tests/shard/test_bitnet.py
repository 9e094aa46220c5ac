"""BitNet's checkpoints say what transformers says of them, but for the rounding of activations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner
from tests.shard.torch_backend.golden import Golden
from tests.shard.torch_backend.models_support import generated, load, prompts, run, sequences
from tests.support.bitnet import BITNET_OFFLINE, BITNET_ONLINE, store_bitnet
from tests.support.quantised import quantise

pytestmark = pytest.mark.usefixtures("one_thread")
Checkpoint = Callable[..., Path]

FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "packed": (store_bitnet("packed"), BITNET_OFFLINE),
    "packed, divided": (store_bitnet("packed", divides=True), {"quant_method": "bitnet"}),
    "unpacked": (store_bitnet("unpacked"), BITNET_OFFLINE),
    "trained": (store_bitnet("trained"), BITNET_ONLINE),
}


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Have transformers' functions run as they are written."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def make(checkpoint: Checkpoint, folder: Path, family: str, form: str) -> Path:
    # Where transformers multiplies by the scale, it scales biases too; no published model has any.
    unbiased = {"attention_bias": False, "mlp_bias": False} if family == "llama" else {}
    source = checkpoint(family, **FITTING[family] | unbiased)
    return quantise(source, folder / "q", *FORMS[form])


@contextmanager
def exact_activations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave activations as they are in transformers' linears."""
    from transformers.integrations import bitnet

    with monkeypatch.context() as patch:
        patch.setattr(bitnet.ActQuant, "apply", lambda x: x)
        patch.setattr(bitnet.BitLinear, "activation_quant", lambda _, x: (x, torch.ones(())))
        yield


@pytest.mark.parametrize("family", ["bitnet", "llama"])
@pytest.mark.parametrize("form", FORMS)
def test_it_says_what_transformers_says(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    form: str,
) -> None:
    folder = make(checkpoint, tmp_path, family, form)
    golden = Golden(folder)
    some = prompts(4)
    runner, recorder = load(folder)
    rows = sequences(some, new=8)
    run(runner, rows, chunk=20, joins=2)
    apart = []
    for row, prompt in zip(rows, some, strict=True):
        tokens = generated(row)
        ours = recorder.logits(row.id).log_softmax(-1)
        with exact_activations(monkeypatch):
            exact = golden.logits(prompt, tokens).log_softmax(-1)
        torch.testing.assert_close(ours, exact, atol=5e-4, rtol=0.0)
        apart.append((golden.logits(prompt, tokens).log_softmax(-1) - ours).abs().mean())
    assert 1e-4 < float(torch.stack(apart).mean()) < 0.1  # what rounding activations changes


@pytest.mark.parametrize("form", FORMS)
def test_the_cpu_kernels_multiply_two_bits(
    checkpoint: Checkpoint, tmp_path: Path, form: str
) -> None:
    folder = make(checkpoint, tmp_path, "bitnet", form)
    golden, some = Golden(folder / "plain"), prompts(4)
    for bits, limit in ((16, 2e-3), (8, 0.1)):
        rows = sequences(some, new=8)
        with cpu_runner(folder, active_bits=bits) as (runner, recorder):
            assert "2 bits in groups" in runner.info.backend
            run(runner, rows, chunk=20, joins=2)
            for row, prompt in zip(rows, some, strict=True):
                exact = golden.logits(prompt, generated(row)).log_softmax(-1)
                apart = (recorder.logits(row.id).log_softmax(-1) - exact).abs().mean()
                assert float(apart) < limit


def test_what_is_left_plain(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Modules of the description's list, in the way that transformers reads it."""
    store, said = FORMS["trained"]
    left = said | {"modules_to_not_convert": ["lm_head", "model.layers.0", "v_proj"]}
    folder = quantise(checkpoint("llama"), tmp_path / "q", store, left)
    golden, some = Golden(folder), prompts(3)
    assert type(golden.model.model.layers[0].mlp.up_proj).__name__ == "Linear"
    runner, recorder = load(folder)
    rows = sequences(some, new=4)
    run(runner, rows)
    for row, prompt in zip(rows, some, strict=True):
        theirs = golden.logits(prompt, generated(row)).log_softmax(-1)
        assert float((recorder.logits(row.id).log_softmax(-1) - theirs).abs().mean()) < 0.1
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == left
