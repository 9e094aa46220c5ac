"""Checkpoints that other people's tools make on the spot, of a random model: read to their numbers.

What weights mean is said by the tool itself, where it dequantises, and the tokens by transformers
with those. Each tool is skipped where it is not installed: `make test-quantisers` installs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.support import Asked
from tests.shard.torch_backend.models_support import (
    Golden,
    assert_greedy,
    load,
    prompts,
    run,
    sequence,
    sequences,
    tables,
)
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.shard.checkpoint.lookup import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
Make = Callable[..., Path]
WEIGHTS = "model.safetensors"
SIZES = {"hidden_size": 128, "intermediate_size": 256}


@pytest.fixture
def source(checkpoint: Make) -> Path:
    return checkpoint("llama", **SIZES)


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


EXPONENTS = {
    **{"type": "float", "strategy": "group", "group_size": 32},
    **{"scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
}
# Of weights: form, and arguments; of activations, where they are quantised as well.
COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4a16, asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 64},
        None,
    ),
    "w8a16": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, None),
    "w8a8": (
        "int-quantized",
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "strategy": "token", "dynamic": True},
    ),
    "fp8 of the tensor": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        None,
    ),
    "fp8 of channels": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        None,
    ),
    "fp8 of blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]},
        None,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            **{"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            **{"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn},
        },
        None,
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, **EXPONENTS}, None),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, **EXPONENTS}, None),
}


def extremes(weight: torch.Tensor, said: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest weight of each run that shares a scale."""
    rows, columns = weight.shape
    if said["strategy"] in ("group", "tensor_group"):
        runs = weight.reshape(rows, -1, said["group_size"])
        return runs.amin(-1), runs.amax(-1)
    if said["strategy"] == "block":
        tall, wide = said["block_structure"]
        runs = weight.reshape(rows // tall, tall, columns // wide, wide)
        return runs.amin((1, 3)), runs.amax((1, 3))
    if said["strategy"] == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    return weight.amin().reshape(1), weight.amax().reshape(1)


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors(source: Path, tmp_path: Path, case: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    form, said, activations = COMPRESSED[case]
    weights = QuantizationArgs(**said)
    inputs = None if activations is None else QuantizationArgs(**activations)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=inputs, format=form
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format=form,
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    model = open_model(source, dtype=torch.float32)
    apply_quantization_config(model, config)
    exact: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "weight_scale"):
            continue
        weight = module.weight.data.float()
        factor = getattr(module, "weight_global_scale", None)
        if factor is not None:
            factor.data.copy_(generate_gparam(weight.amin(), weight.amax()))
        scale, zero = calculate_qparams(*extremes(weight, said), weights, factor)
        kept = module.weight_scale
        kept.data.copy_(scale.reshape(kept.shape).to(kept.dtype))
        offset = getattr(module, "weight_zero_point", None)
        if offset is not None:
            offset.data.copy_(zero.reshape(offset.shape).to(offset.dtype))
        codes = quantize(weight, kept.data, offset, weights, global_scale=factor)
        exact[f"{name}.weight"] = dequantize(codes, kept.data, offset, weights, global_scale=factor)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    made = tmp_path / "made"
    model.save_pretrained(made)
    compressor.update_config(made)
    assert len(exact) == 14
    check(made, exact, source, tmp_path)


BYTES: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4, double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
}


@pytest.mark.parametrize("case", BYTES)
def test_bitsandbytes(source: Path, tmp_path: Path, case: str) -> None:
    library = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    options = BitsAndBytesConfig(**BYTES[case], bnb_4bit_compute_dtype=torch.float32)
    model = open_model(
        source, dtype=torch.float32, quantization_config=options, device_map={"": "cpu"}
    )
    exact: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, library.nn.Linear4bit):
            assert weight is not None
            exact[f"{name}.weight"] = library.functional.dequantize_4bit(
                weight.data, weight.quant_state
            )
        elif isinstance(module, library.nn.Linear8bitLt):
            assert weight is not None
            exact[f"{name}.weight"] = weight.data.float() * weight.SCB[:, None] / 127
    made = tmp_path / "made"
    model.save_pretrained(made)
    assert len(exact) == 14
    check(made, exact, source, tmp_path)


TORCHAO: dict[str, Callable[[Any], Any]] = {
    "int8": lambda ao: ao.Int8WeightOnlyConfig(),
    "int8 of the tensor": lambda ao: ao.Int8WeightOnlyConfig(granularity=ao.PerTensor()),
    "w8a8": lambda ao: ao.Int8DynamicActivationInt8WeightConfig(),
    "fp8": lambda ao: ao.Float8WeightOnlyConfig(),
    "8da4w": lambda ao: ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]
        weight_granularity=ao.PerGroup(32),
    ),
    "3 bits, asymmetric": lambda ao: ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int3,  # type: ignore[attr-defined]
        granularity=ao.PerGroup(64),
        mapping_type=ao.MappingType.ASYMMETRIC,
    ),
    "modules that differ": lambda ao: ao.FqnToConfig(
        {
            "_default": ao.Int8WeightOnlyConfig(),
            "re:.*self_attn.*": ao.Float8WeightOnlyConfig(),
            "model.layers.1.mlp.up_proj": None,
            "lm_head": ao.Int8WeightOnlyConfig(),
        }
    ),
}


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("case", TORCHAO)
def test_torchao(source: Path, tmp_path: Path, case: str, embeddings: bool) -> None:
    library = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    in_all = embeddings and case == "modules that differ"
    options = TorchAoConfig(TORCHAO[case](library), include_input_output_embeddings=embeddings)
    model = open_model(source, dtype=torch.float32, quantization_config=options)
    exact = {
        name: weight.dequantize()
        for name, weight in model.named_parameters()
        if hasattr(weight, "tensor_data_names")
    }
    made = tmp_path / "made"
    model.save_pretrained(made)
    assert len(exact) == 14 - (case == "modules that differ") + (2 if in_all else embeddings)
    check(made, exact, source, tmp_path)


@pytest.mark.parametrize("case", ["int8", "fp8"])
def test_experts_of_torchao(checkpoint: Make, tmp_path: Path, case: str) -> None:
    """All of a layer in one tensor, gates before ups, as transformers holds and writes them."""
    library = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    source, config = checkpoint("qwen3_moe"), TORCHAO[case](library)
    every = {"re:.*experts.gate_up_proj": config, "re:.*experts.down_proj": config}
    options = TorchAoConfig(library.FqnToConfig(every | {"_default": config}))
    model = open_model(source, dtype=torch.float32, quantization_config=options)
    exact: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        if not hasattr(weight, "tensor_data_names"):
            continue
        place, _, own = name.rpartition(".")
        values = weight.dequantize()
        if own == "weight":
            exact[name] = values
            continue
        for expert, value in enumerate(values):
            parts = {"down": value}
            if own == "gate_up_proj":
                parts = dict(zip(("gate", "up"), value.chunk(2), strict=True))
            exact |= {f"{place}.{expert}.{part}_proj.weight": x for part, x in parts.items()}
    made = tmp_path / "made"
    model.save_pretrained(made)
    assert any(name.endswith("._gate_up_proj_qdata") for name in load_file(made / WEIGHTS))
    check(made, exact, source, tmp_path)


def load_mlx(source: Path) -> Any:
    """Return mlx-lm's model of a checkpoint, and its config; newer names are not known to it."""
    utils = pytest.importorskip("mlx_lm.utils")
    said = json.loads((source / "config.json").read_text())
    turning = said.get("rope_parameters", {})
    names = ("rope_theta", "partial_rotary_factor")
    older = {name: turning[name] for name in names if name in turning}
    older["num_experts"] = said.get("num_experts", said.get("num_local_experts", 0))
    return utils.load_model(source, model_config=older)


MODES = ("affine:2:32", "affine:3:64", "affine:5:64", "affine:8:32", "mxfp4:4:32", "mxfp8:8:32")


@pytest.mark.parametrize("packed", [*MODES, "nvfp4:4:16"])
def test_mlx(source: Path, tmp_path: Path, packed: str) -> None:
    """With embedding and head, and a module that differs."""
    core = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    mode, bits, group = packed.split(":")

    def choose(path: str, module: Any) -> Any:
        differs = path.endswith("layers.1.self_attn.q_proj")
        return {"group_size": 64, "bits": 6, "mode": "affine"} if differs else path != "lm_head"

    model, config = load_mlx(source)
    quantised = utils.quantize_model(
        model, config, int(group), int(bits), mode, quant_predicate=choose
    )
    made = tmp_path / "made"
    utils.save_model(made, quantised[0])
    utils.save_config(quantised[1], made / "config.json")
    exact: dict[str, torch.Tensor] = {}
    for name, module in quantised[0].named_modules():
        if hasattr(module, "scales"):
            biases = getattr(module, "biases", None)
            weight = core.dequantize(
                module.weight, module.scales, biases, module.group_size, module.bits, module.mode
            )
            exact[f"{name}.weight"] = torch.tensor(weight.astype(core.float32).tolist())
    assert len(exact) == 15
    check(made, exact, source, tmp_path)


# Families whose checkpoints mlx-lm changes.
CHANGED = (
    *("deepseek_v3", "glm4_moe_lite", "laguna", "lfm2_moe", "mistral4", "mixtral", "nemotron_h"),
    *("qwen3_moe", "qwen3_next"),
)
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32}


@pytest.mark.parametrize("family", CHANGED)
def test_families_of_mlx(checkpoint: Make, tmp_path: Path, family: str) -> None:
    """In 4 bits: tokens and logits are mlx-lm's own."""
    core = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    sizes: dict[str, Any] = {"hidden_size": 128}
    if family in ("deepseek_v3", "glm4_moe_lite", "mistral4"):
        sizes |= LATENT
    model, config = load_mlx(checkpoint(family, **sizes))
    model, config = utils.quantize_model(model, config, 32, 4)
    made = tmp_path / "made"
    utils.save_model(made, model)
    utils.save_config(config, made / "config.json")
    assert check_model(read_config(made), Asked()) == []
    runner, recorder = load(made, dtype="float32")
    rows = sequences(prompts(3), new=8)
    run(runner, rows)
    for row, prompt in zip(rows, prompts(3), strict=True):
        ids = list(prompt)
        for own in recorder.logits(row.id):
            logits = torch.tensor(model(core.array([ids]))[0, -1].astype(core.float32).tolist())
            torch.testing.assert_close(own, logits, rtol=0, atol=1e-3)
            ids.append(int(logits.argmax()))


@pytest.mark.parametrize(
    ("bits", "group", "axis", "as_numbers"),
    [
        *((1, 32, 1, False), (3, 64, 1, False), (4, 64, 1, True), (8, 128, 1, False)),
        *((2, 64, 0, True), (3, 64, 0, False), (4, 64, 0, False)),
    ],
)
def test_hqq(
    source: Path, tmp_path: Path, bits: int, group: int, axis: int, as_numbers: bool
) -> None:
    """As transformers saves it: what its modules say of themselves, and `HqqConfig`."""
    library = pytest.importorskip("hqq.core.quantize")
    said = library.BaseQuantizeConfig(
        nbits=bits, group_size=group, axis=axis, view_as_float=as_numbers
    )
    model = open_model(source, dtype=torch.float32)
    exact: dict[str, torch.Tensor] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            own = library.HQQLinear(module, said, compute_dtype=torch.float32, device="cpu")
            exact[f"{name}.weight"] = own.dequantize()
            model.set_submodule(name, own)
    made = tmp_path / "made"
    made.mkdir()
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(stored, made / "model.safetensors", metadata={"format": "pt"})
    described = {"quant_method": "hqq", "quant_config": said, "skip_modules": ["lm_head"]}
    values = json.loads((source / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(values | {"quantization_config": described}))
    assert len(exact) == 14
    check(made, exact, source, tmp_path)


MIXED = {"layers.0.mlp.down_proj": {"bits": 8}, "layers.1.self_attn.q_proj": {"bits": 16}}


def quantise_by_auto_round(source: Path, made: Path, form: str, **scheme: Any) -> Path:
    """Write a checkpoint, and return its folder, of which nothing is refused."""
    library = pytest.importorskip("auto_round")
    rounder = library.AutoRound(
        str(source), iters=0, group_size=32, device_map="cpu", disable_opt_rtn=True, **scheme
    )
    rounder.quantize_and_save(str(made), format=form)
    (folder,) = (path.parent for path in made.rglob("config.json"))
    assert json.loads((folder / "config.json").read_text())["quantization_config"]
    assert check_model(read_config(folder), Asked()) == []
    return folder


@pytest.mark.parametrize("symmetric", [True, False])
def test_auto_round_in_its_own_form(source: Path, tmp_path: Path, symmetric: bool) -> None:
    """With modules that differ: products by its library, which has them in float16."""
    layers = {f"model.{name}": scheme for name, scheme in MIXED.items()}
    scheme: dict[str, Any] = {"bits": 4, "sym": symmetric, "layer_config": layers}
    folder = quantise_by_auto_round(source, tmp_path / "made", "auto_round", **scheme)
    model = open_model(folder, dtype=torch.float32, device_map="cpu")
    products = 0
    with open_checkpoint(read_config(folder)) as weights, torch.inference_mode():
        for name, module in model.named_modules():
            if hasattr(module, "qweight"):
                expected = module(torch.eye(module.infeatures)).float().T
                found = weights.matrix(f"{name}.weight", tuple(expected.shape)).dequantised()
                torch.testing.assert_close(
                    torch.from_numpy(found.copy()), expected, rtol=2**-9, atol=1e-6
                )
                products += 1
    assert products == 13


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("auto_gptq", {"bits": 4}),
        ("auto_gptq", {"bits": 8}),
        ("auto_round:auto_awq", {"bits": 4, "sym": False}),
    ],
)
def test_auto_round(source: Path, tmp_path: Path, form: str, scheme: dict[str, Any]) -> None:
    """Nothing of it dequantises on its own: its files are read as near to the original."""
    folder = quantise_by_auto_round(source, tmp_path / "made", form, **scheme)
    original = load_file(source / "model.safetensors")
    with open_checkpoint(read_config(folder)) as weights:
        for name, weight in original.items():
            if name.endswith("_proj.weight"):
                rows, columns = weight.shape
                found = weights.matrix(name, (rows, columns)).dequantised()
                error = (torch.from_numpy(found.copy()) - weight).norm() / weight.norm()
                assert error < 0.02 if scheme["bits"] == 8 else error < 0.15
