"""Quantised checkpoints that are served: what their headers must say, and what a flag may."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.quantised_formats import CONFIG, FORMATS, OPTIONAL, Changes, Q, changes_of, make
from tests.model.support import BYTES, Asked, make_folder, write_json
from tests.support.quantised import describe_compressed, real_checkpoint
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import read_model_facts
from tgi_trio.model.quantised import recognise
from tgi_trio.model.quantised.auto_round_layout import read_auto_round_layout
from tgi_trio.model.quantised.recognise import MADE_AT_LOAD, find_made
from tgi_trio.settings.records import QUANTIZATIONS


def check(folder: Path, **serving: Any) -> list[str]:
    return check_model(read_config(folder), Asked(**serving))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_known_without_a_flag(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    assert check(tmp_path) == []
    assert check(tmp_path, num_shard=2) == []
    assert read_model_facts(tmp_path).quantize in QUANTIZATIONS


@pytest.mark.parametrize("name", FORMATS)
def test_a_flag_may_say_what_the_checkpoint_is_and_nothing_else(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    own = read_model_facts(tmp_path).quantize
    assert check(tmp_path, quantize=own) == []
    for word in set(QUANTIZATIONS) - {own}:
        with pytest.raises(ConfigurationError, match=f"--quantize {word} contradicts .*{own}"):
            check(tmp_path, quantize=word)


def test_a_flag_does_not_make_a_format_of_plain_numbers(tmp_path: Path) -> None:
    make_folder(tmp_path)
    for word in set(QUANTIZATIONS) - set(MADE_AT_LOAD):
        with pytest.raises(ConfigurationError, match=f"--quantize {word} .* holds plain numbers"):
            check(tmp_path, quantize=word)
    assert read_model_facts(tmp_path).quantize is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"use_rms_norm": True}, "use_rms_norm: a norm in every linear"),
        ({"linear_class": "other"}, "linear_class 'other'"),
        ({"quantization_mode": "both"}, "quantization_mode 'both'"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert 'lm_head', no list"),
    ],
)
def test_variants_of_bitnet_that_are_refused(
    tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    make(tmp_path, "bitnet", said=said)
    with pytest.raises(ModelLoadError, match=message):
        check(tmp_path)


def test_the_flag_has_the_words_of_the_formats() -> None:
    """A layout's own; bitsandbytes' differ by kind, and all of them are made at load as well."""
    layouts = {get_type_hints(read)["return"] for read in recognise._READ.values()}
    names = {getattr(layout, "name", None) for layout in layouts}
    words = {name for name in names if isinstance(name, str)} | {"gguf"}
    assert words <= set(QUANTIZATIONS)
    assert set(QUANTIZATIONS) - words == set(MADE_AT_LOAD) - words


def test_words_of_what_is_made_at_load_take_plain_numbers(tmp_path: Path) -> None:
    make_folder(tmp_path)
    config = read_config(tmp_path)
    for word in MADE_AT_LOAD:
        assert check(tmp_path, quantize=word, num_shard=2) == []
        assert find_made(config, word) == word
    assert find_made(config, None) is None


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_made_of_a_checkpoint_that_is_quantised(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    for word in MADE_AT_LOAD:
        assert find_made(read_config(tmp_path), word) is None


@pytest.mark.parametrize("name", FORMATS)
def test_some_matrices_may_be_plain(tmp_path: Path, name: str) -> None:
    pieces: Changes = dict.fromkeys(FORMATS[name][0](Q, 64, 64))
    make(tmp_path, name, pieces | {f"{Q}.weight": ("F16", (64, 64))})
    assert check(tmp_path) == []


@pytest.mark.parametrize("name", FORMATS)
def test_every_piece_is_needed_and_has_its_shape_and_type(tmp_path: Path, name: str) -> None:
    for piece, (dtype, shape) in FORMATS[name][0](Q, 64, 64).items():
        if not piece.endswith(OPTIONAL):
            make(tmp_path, name, {piece: None})
            with pytest.raises(ModelLoadError, match=f"{Q}.*missing|{Q}.* is a part of|{Q}.*type"):
                check(tmp_path)
        if shape and dtype:
            make(tmp_path, name, {piece: (dtype, (*shape[:-1], shape[-1] + 1))})
            with pytest.raises(ModelLoadError, match=f"'{piece}' in .* has shape .* asks for"):
                check(tmp_path)
        make(tmp_path, name, {piece: ("BOOL", shape)})
        with pytest.raises(ModelLoadError, match=f"'{piece}' in .* is of type BOOL"):
            check(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_plain_weights_under_a_quantised_config_come_with_advice(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path, CONFIG | {"quantization_config": FORMATS[name][1]})
    with pytest.raises(ModelLoadError, match=r"holds no matrix in the format .* take out quant"):
        check(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model_type", ["codegen", "t5"])
def test_models_that_are_loaded_otherwise_are_refused(
    tmp_path: Path, name: str, model_type: str
) -> None:
    make(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    t5 = {"d_model": 8, "num_layers": 1, "num_heads": 1, "d_kv": 8, "d_ff": 8}
    write_json(tmp_path, config | t5 | {"model_type": model_type})
    with pytest.raises(ModelLoadError, match="which nothing here reads"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "said"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
        ("modelopt", "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}),
        ("marlin", "quantize_config.json", {"bits": 4, "group_size": 32, "is_marlin_format": True}),
        ("marlin", "quantize_config.json", {"quant_method": "marlin", "group_size": 32}),
    ],
)
def test_older_files_beside_the_config(
    tmp_path: Path, name: str, file: str, said: dict[str, Any]
) -> None:
    make_folder(tmp_path, CONFIG, changes_of(tmp_path, name))
    write_json(tmp_path, said, file)
    assert check(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [("gptq", {"dynamic": {"+:.*q_proj": {"bits": 8}}}), ("auto-round", {"extra_config": {Q: {}}})],
)
def test_modules_may_differ_in_bits_and_groups_where_a_file_says_so(
    tmp_path: Path, name: str, said: dict[str, Any]
) -> None:
    """They are what their tensors show: `dynamic` and `extra_config` have patterns of names."""
    other: Changes = {
        f"{Q}.qweight": ("I32", (16, 64)),
        f"{Q}.qzeros": ("I32", (1, 16)),
        f"{Q}.scales": ("F16", (1, 64)),
    }
    make(tmp_path, name, other, said)
    assert check(tmp_path) == []
    make(tmp_path, name, other)
    with pytest.raises(ModelLoadError, match=r"q_proj.qweight' in .* has shape \[16, 64\], but"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("form", "name", "less_one"),
    [
        ("auto_round:auto_gptq", "gptq", True),
        ("auto_round:gptq:exllamav2", "gptq", True),
        ("auto_round", "gptq", False),
        ("auto_round:gptqmodel", "gptq", False),
        ("autoround:exllamav2", "gptq", False),
        ("auto_round:auto_awq", "awq", None),
    ],
)
def test_forms_of_auto_round(form: str, name: str, less_one: bool | None) -> None:
    layout = read_auto_round_layout("config.json", {"packing_format": form, "group_size": 32})
    assert layout.name == name
    assert getattr(layout, "zeros_less_one", None) is less_one


def weights(form: str = "pack-quantized", **said: Any) -> dict[str, Any]:
    """Return a description with other weights."""
    settings: dict[str, Any] = {"strategy": "group", "num_bits": 4, "group_size": 32} | said
    strategy, bits = settings.pop("strategy"), settings.pop("num_bits")
    return describe_compressed(form, strategy, bits, **settings)


BITS4 = {"load_in_8bit": False, "load_in_4bit": True}
WIDE = {"type": "float", "group_size": 32}
GROUP = {
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "group"}}}
}


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("gptq", {"bits": 5}, "GPTQ with 5 bits"),
        ("gptq", {"bits": "4"}, "says bits '4'"),
        ("gptq", {"bits": None}, "says bits None"),
        ("gptq", {"bits": True}, "says bits True"),
        ("gptq", {"group_size": 0}, "in groups of 0"),
        ("gptq", {"group_size": 2**63}, "says group_size 9223372036854775808"),
        ("gptq", {"group_size": -7}, "says group_size -7"),
        ("gptq", {"checkpoint_format": "bitblas"}, "in the form 'bitblas'"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ("gptq", {"checkpoint_format": "marlin_24"}, "in the form 'marlin_24'; read are gptq, gp"),
        ("auto-round", {"packing_format": "auto_round:fp8_static"}, "form 'auto_round:fp8_static'"),
        ("auto-round", {"data_type": "mx_fp"}, "AutoRound's weights are of type 'mx_fp'"),
        ("auto-round", {"bits": 5}, "GPTQ with 5 bits"),
        ("marlin", {"bits": 8}, "Marlin's order with 8 bits"),
        ("marlin", {"group_size": 48}, "cannot be stored in Marlin's order in groups of 48"),
        ("fp8", {"format": "nvfp4-pack-quantized"} | GROUP, "says nvfp4-pack-quantized with"),
        (
            "nvfp4",
            weights("nvfp4-pack-quantized", strategy="tensor_group", **WIDE),
            "groups of 32;",
        ),
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "says NVFP4_AWQ of ModelOpt's; read are FP8"),
        ("fp8", {"quantization_status": "frozen"}, "weights are 'frozen'"),
        ("fp8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "has a sparsity_config"),
        ("fp8", {"transform_config": {"config_groups": {"u": {}}}}, "has a transform_config"),
        ("fp8", {"config_groups": {}}, "has no config_groups"),
        ("fp8", {"config_groups": {"g": {"weights": None}}}, "says nothing of weights"),
        ("packed", weights(num_bits=3), "pack-quantized with int of 3 bits by group"),
        ("packed", weights(group_size=None), "says group_size None"),
        ("packed", weights(group_size=0), "share scales by group, not of which"),
        ("packed", weights(strategy="tensor"), "scales that several outputs share"),
        ("packed", weights(strategy="block", block_structure=[2]), "no pair of sizes"),
        ("packed", weights(strategy="block", block_structure=[2, 0]), "no pair of sizes"),
        ("int8", weights("pack-quantized", num_bits=4), "is stored in the form int-quantized, of"),
        ("fp8 blocks", {"weight_block_size": [2**63, 1]}, "in range"),
        ("fp8 blocks", {"weight_block_size": 128}, "no pair of sizes"),
        ("fp8 blocks", {"fmt": "e5m2"}, "in the form 'e5m2'"),
        ("bitsandbytes", {"load_in_8bit": False}, "bitsandbytes with 'fp4'; read are load_in_8bit"),
        ("bitsandbytes", BITS4 | {"bnb_4bit_quant_type": "int4"}, "bitsandbytes with 'int4'"),
        ("awq", {"version": "gemv"}, "in the order 'gemv'"),
        ("awq", {"bits": 8}, "AWQ with 8 bits"),
        ("awq", {"group_size": 48}, "cannot be stored as AWQ in groups of 48"),
    ],
)
def test_variants_that_are_not_read_are_refused_by_name(
    tmp_path: Path, name: str, said: dict[str, Any], message: str
) -> None:
    make(tmp_path, name, said=said)
    with pytest.raises(ModelLoadError, match=message):
        check(tmp_path)


@pytest.mark.parametrize(
    ("piece", "change", "message"),
    [
        ("absmax", lambda t: None, "weight.absmax' is missing"),
        ("absmax", lambda t: t[:-1], r"absmax' in .* has shape \[1023\], but .* asks for \[1024\]"),
        ("absmax", lambda t: t.to(torch.uint8), "absmax' in .* is of type U8"),
        ("quant_map", lambda t: t[:8], r"quant_map' in .* has shape \[8\]"),
        ("", lambda t: t[:-8], r"weight' in .* has shape \[32760, 1\]"),
        ("", lambda t: t.view(-1).view(torch.bfloat16)[:, None], "weight' in .* is of type BF16"),
        ("quant_state.bitsandbytes__nf4", lambda t: t[:-1], "bitsandbytes__nf4' in .* as JSON"),
        ("quant_state.bitsandbytes__nf4", lambda t: None, "is of type U8"),
        ("nested_absmax", lambda t: torch.ones(1), "is a part of quantised weights"),
    ],
)
def test_pieces_of_blocks(
    tmp_path: Path, piece: str, change: Callable[[Any], Any], message: str
) -> None:
    """Of a checkpoint whose blocks are described by one of its tensors."""
    folder = real_checkpoint("bnb-nf4", tmp_path)
    assert check(folder) == []
    tensors = load_file(folder / "layers.safetensors")
    name = f"{Q}.weight.{piece}".removesuffix(".")
    changed = change(tensors.pop(name, None))
    if changed is not None:
        tensors[name] = changed.contiguous()
    (folder / "layers.safetensors").unlink()
    save_file(tensors, folder / "layers.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        check(folder)


def write_bias(folder: Path, value: int) -> None:
    """Set all bytes of q_proj's bias."""
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    first, end = json.loads(content[8 : 8 + length])[f"{Q}.bias"]["data_offsets"]
    content[8 + length + first : 8 + length + end] = bytes([value]) * (end - first)
    file.write_bytes(content)


def test_biases_of_zeros_are_let_be(tmp_path: Path) -> None:
    """AutoGPTQ writes them for models that have none; others are a part that nobody reads."""
    make(tmp_path, "gptq", {f"{Q}.bias": ("F16", (64,))})
    assert check(tmp_path) == []
    write_bias(tmp_path, 1)
    with pytest.raises(ModelLoadError, match=rf"'{Q}\.bias' .* no part of a model"):
        check(tmp_path)


ODD_VALUES = [None, 0, -1, 3, 2**63, -(2**63), 1e300, "", "x", [], {}, True, [1], {"a": 1}]


def odd_json(draw: random.Random, value: Any) -> Any:
    """Return a description with one odd value somewhere inside."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        return value | {key: odd_json(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.5:
        place = draw.randrange(len(value))
        return [*value[:place], odd_json(draw, value[place]), *value[place + 1 :]]
    return draw.choice(ODD_VALUES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_is_said_is_served_or_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    draw = random.Random(name)
    make(tmp_path, name)
    for _ in range(200):
        said = odd_json(draw, FORMATS[name][1])
        write_json(tmp_path, CONFIG | {"quantization_config": said})
        try:
            check(tmp_path)
        except ModelLoadError as error:
            assert len(str(error)) > 40


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_headers_say_is_served_or_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    draw = random.Random(name)
    every = changes_of(tmp_path, name)
    pieces = [piece for piece, stored in every.items() if stored is not None]
    for _ in range(60):
        changes: Changes = {}
        for piece in draw.sample(pieces, 2):
            dtype, shape = every[piece] or ("F16", ())
            odd = tuple(draw.choice([n, 0, 1, n + 1, 2 * n]) for n in shape)
            odd = draw.choice([odd, odd[:1], (*odd, 1), ()])
            changes[piece] = draw.choice([None, (draw.choice([dtype, *BYTES]), odd)])
        make(tmp_path, name, changes)
        try:
            check(tmp_path)
        except ModelLoadError as error:
            assert len(str(error)) > 40
