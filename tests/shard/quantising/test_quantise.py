"""`quantize`: what is written is read again, by every backend, and is near the original."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.cpu_backend.kernel_support import cpu_runner
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import load, prompts, run, sequences
from tests.support.warm_start import run_warm
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.model.quantised.recognise import find_layout
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.quantising.__main__ import main
from tgi_trio.shard.quantising.job import Job
from tgi_trio.shard.quantising.quantise import quantise_model

pytestmark = pytest.mark.usefixtures("one_thread")
Checkpoint = Callable[..., Path]
PROMPTS, NEW = prompts(6), 8
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def every(parts: Iterable[Any]) -> Iterable[Any]:
    return parts


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Weights are read once for all sequences of a batch. " * 60)
    return path


@pytest.fixture
def job(checkpoint: Checkpoint, tmp_path: Path, text: Path) -> Job:
    return Job(
        model=checkpoint("llama", **SIZES),
        output=tmp_path / "out",
        group=32,
        damping=0.01,
        by_activation=False,
        samples=6,
        sample_tokens=48,
        calibration_text=text,
    )


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    """Return the matrices of a GPTQ folder, by module, as the format's description has them."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    found = {}
    for name, words in tensors.items():
        module, _, part = name.rpartition(".")
        if part != "qweight":
            continue
        shifts = torch.arange(0, 32, 4)
        codes = ((words[:, None] >> shifts[:, None]) & 15).reshape(-1, words.shape[1]).T
        zeros = ((tensors[f"{module}.qzeros"][..., None] >> shifts) & 15).flatten(1) + 1
        groups = tensors[f"{module}.g_idx"].long()
        scales = tensors[f"{module}.scales"].float()
        found[module] = scales[groups].T * (codes - zeros[groups].T)
    return found


@pytest.mark.parametrize("by_activation", [False, True])
def test_a_gptq_checkpoint_is_read_by_both_backends(job: Job, by_activation: bool) -> None:
    job = replace(job, by_activation=by_activation)
    quantise_model(job, every)
    layout = find_layout(read_config(job.output))
    assert layout is not None and layout.name == "gptq"
    said = json.loads((job.output / "quantize_config.json").read_text())
    assert (said["bits"], said["group_size"], said["desc_act"]) == (4, 32, by_activation)
    golden = Golden(job.model)
    modules = dict(golden.model.named_modules())
    weights = dequantised(job.output)
    assert len(weights) == 7 * golden.model.config.num_hidden_layers
    for module, weight in weights.items():
        exact = modules[module].weight.detach()
        assert (weight - exact).norm() < 0.3 * exact.norm()
        modules[module].weight = torch.nn.Parameter(weight)
    runner, recorder = load(job.output, dtype="float32")
    rows = sequences(PROMPTS, 3, new=NEW)
    run(runner, rows)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance=5e-4)
    with cpu_runner(job.output) as (kernels, again):
        rows = sequences(PROMPTS, 3, new=NEW)
        run(kernels, rows)
        for row in rows:
            assert_greedy(golden, again, row, tolerance=5e-3)


class Stopped(Exception):
    """Somebody pulls the plug."""


def test_a_run_that_is_stopped_goes_on_where_it_was(job: Job, tmp_path: Path) -> None:
    whole = replace(job, output=tmp_path / "whole")
    quantise_model(whole, every)

    def stop_at_the_second(layers: Iterable[int]) -> Iterable[int]:
        for layer in layers:
            if layer == 1:
                raise Stopped
            yield layer

    with pytest.raises(Stopped):
        quantise_model(job, stop_at_the_second)
    assert not job.output.exists()
    (first,) = job.staging.glob("model-layer-*.safetensors")
    before = first.stat().st_mtime_ns, first.stat().st_ino
    done: list[int] = []

    def count(layers: Iterable[int]) -> Iterable[int]:
        for layer in layers:
            if layer == 1:
                assert (first.stat().st_mtime_ns, first.stat().st_ino) == before
            done.append(layer)
            yield layer

    quantise_model(job, count)
    assert not job.staging.exists() and len(done) > 1
    names = {path.name for path in whole.output.iterdir()}
    assert {path.name for path in job.output.iterdir()} == names
    for name in names:
        assert (job.output / name).read_bytes() == (whole.output / name).read_bytes(), name


def test_the_beginning_of_another_job_is_left_alone(job: Job, text: Path) -> None:
    job.staging.mkdir()
    (job.staging / "job").write_text(job.digest(text.read_text()))
    for other in (replace(job, group=64), replace(job, damping=0.1)):
        with pytest.raises(ConfigurationError, match="holds the beginning of another job"):
            quantise_model(other, every)
    text.write_text(text.read_text() + "more")
    with pytest.raises(ConfigurationError, match="calibration text"):
        quantise_model(job, every)


def test_what_cannot_be_asked_for(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"has \d+ tokens, and one sample is 100000"):
        quantise_model(replace(job, sample_tokens=100_000, model=unbounded(job)), every)
    with pytest.raises(ConfigurationError, match=r"--calibration-text .*nowhere cannot be read"):
        quantise_model(replace(job, calibration_text=Path("/nowhere")), every)
    quantise_model(job, every)
    with pytest.raises(ConfigurationError, match="is there already"):
        quantise_model(job, every)
    with pytest.raises(ConfigurationError, match="holds quantised weights"):
        quantise_model(replace(job, model=job.output, output=job.output / "x"), every)
    words = {name: getattr(job, name) for name in ("group", "damping", "by_activation", "samples")}
    words |= {
        "model": str(job.output),
        "output": "/x",
        "sample_tokens": 9,
        "calibration_text": None,
    }
    assert main(json.dumps(words | {"quiet": True})) == 1
    assert "holds quantised weights" in capsys.readouterr().err
    file = job.output / "config.json"
    for made in ("gptq", "gguf:q4_0"):  # below a file there can be no other
        asked = words | {"model": str(job.model), "output": str(file / "x"), "format": made}
        asked |= {"samples": job.samples, "sample_tokens": job.sample_tokens}
        assert main(json.dumps(asked | {"quiet": True})) == 1
        told = capsys.readouterr().err
        assert told.startswith("tgi-trio: ") and "Errno" not in told and str(file) in told


def unbounded(job: Job) -> Path:
    """Return the job's model, which says that it can read anything."""
    folder = job.output.with_name("unbounded")
    folder.mkdir()
    for file in job.model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    return folder


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "gemma3_text", "deepseek_v2", "phi3"])
def test_other_families_are_quantised(checkpoint: Checkpoint, job: Job, family: str) -> None:
    """Mixtures, transposed and fused matrices, two kinds of layers, latents: all linear layers,
    each near its own weights; what is written can be served.
    """
    job = replace(job, model=checkpoint(family))
    quantise_model(job, every)
    exact = load_file(job.model / "model.safetensors")
    weights = dequantised(job.output)
    for module, weight in weights.items():
        own = exact[f"{module}.weight"]
        own = own.T if family == "gpt2" else own
        assert (weight - own).norm() < 0.35 * own.norm(), module
    fitting = {
        name
        for name, tensor in exact.items()
        if tensor.dim() == 2 and not any(size % 32 for size in tensor.shape)
    }
    left = fitting - {f"{module}.weight" for module in weights}
    outer = ("embed", "lm_head", "wte", "wpe", "gate.weight", "kv_b_proj", "kv_a_proj")
    assert all(any(word in name for word in outer) for name in left), left
    runner, _ = load(job.output, dtype="float32")
    rows = sequences(PROMPTS, 3, new=2)
    run(runner, rows)


def exactly_rounded(folder: Path, target: Path, word: str) -> Path:
    """Write a checkpoint whose matrices a type of GGUF's holds exactly."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        outer = "embed_tokens" in name or "lm_head" in name
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            encoding = ENCODINGS["q8_0" if outer else word]
            values = encoding.decode(encoding.encode(tensor.float().numpy(), 32))
            tensors[name] = torch.from_numpy(values.reshape(tensor.shape))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


WITHOUT_TORCH = """
import sys
from tgi_trio.shard.quantising.__main__ import main
print(main(sys.argv[1]), "torch" in sys.modules)
"""


def test_a_gguf_file_is_written_without_torch(job: Job, tmp_path: Path) -> None:
    """It is two seconds of each run, and not needed."""
    file = tmp_path / "small.gguf"
    words = asdict(replace(job, output=file, format="gguf:q8_0")) | {"quiet": True}
    done = run_warm("-c", WITHOUT_TORCH, json.dumps(words, default=str))
    assert (done.stdout, done.stderr) == ("0 False\n", "")
    assert file.is_file()


@pytest.mark.parametrize("word", ["q4_0", "q8_0"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_has_the_weights_and_the_tokenizer(
    checkpoint: Checkpoint, job: Job, tmp_path: Path, family: str, word: str
) -> None:
    library = pytest.importorskip("gguf", reason="gguf is not installed")
    changes: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {}
    source = exactly_rounded(checkpoint(family, **changes), tmp_path / "source", word)
    file = tmp_path / "small.gguf"
    quantise_model(replace(job, model=source, output=file, format=f"gguf:{word}"), every)
    read = library.GGUFReader(file)
    types = read.fields["tokenizer.ggml.token_type"].types  # llama.cpp takes no others
    assert types == [library.GGUFValueType.ARRAY, library.GGUFValueType.INT32]
    types = {tensor.name: tensor.tensor_type.name for tensor in read.tensors}
    assert types["blk.0.ffn_down.weight"] == word.upper()
    assert types["token_embd.weight"] == "Q8_0" and types["output_norm.weight"] == "F32"
    folder = gguf_folder(file, tmp_path / "cache")
    golden = Golden(source)
    runner, recorder = load(folder, dtype="float32")
    rows = sequences(PROMPTS, 3, new=NEW)
    run(runner, rows)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance=5e-4)
    before, after = (
        json.loads((path / "tokenizer_config.json").read_text()) for path in (source, folder)
    )
    if before.get("chat_template"):
        assert after["chat_template"] == [{"name": "default", "template": before["chat_template"]}]


def test_the_file_appears_with_its_last_tensor(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "new" / "small.gguf"
    job = replace(job, output=file, format="gguf:q4_0")

    def stop(tensors: Iterable[Any]) -> Iterable[Any]:
        for place, tensor in enumerate(tensors):
            if place == 3:
                raise Stopped
            yield tensor

    with pytest.raises(Stopped):
        quantise_model(job, stop)
    assert not file.exists()
    quantise_model(job, every)
    assert file.is_file() and not list(file.parent.glob("*.part"))
    with pytest.raises(ConfigurationError, match="is there already"):
        quantise_model(job, every)


def test_models_and_weights_that_no_file_can_hold(
    checkpoint: Checkpoint, job: Job, tmp_path: Path
) -> None:
    asked = replace(job, output=tmp_path / "x.gguf", format="gguf:q8_0")
    with pytest.raises(ConfigurationError, match="'gpt2' is not written as GGUF; written are"):
        quantise_model(replace(asked, model=checkpoint("gpt2")), every)
    with pytest.raises(ConfigurationError, match=r"windows of 24 tokens"):
        quantise_model(replace(asked, model=checkpoint("mistral", sliding_window=24)), every)
    bad = tmp_path / "bad"
    bad.mkdir()
    for path in job.model.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = np.nan
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    for output, form in ((tmp_path / "y", "gptq"), (tmp_path / "y.gguf", "gguf:q4_0")):
        with pytest.raises(ModelLoadError, match=r"up_proj\.weight' holds a weight that is no num"):
            quantise_model(replace(job, model=bad, output=output, format=form), every)
        assert not output.exists()
