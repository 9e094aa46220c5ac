"""What is refused, or warned of, before a shard is spawned."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.model.support import LLAMA, Asked, make_folder, write_json, write_safetensors
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.check import check_kv_cache, check_model, model_spec
from tgi_trio.model.config import ModelConfig, RopeScaling, read_config
from tgi_trio.model.fit import decoder as decoder_fit
from tgi_trio.model.transformers_types import list_text_types

F32 = ("F32", (2, 2))
GPT2 = {"model_type": "gpt2", "vocab_size": 8, "n_embd": 4, "n_layer": 1, "n_head": 2}
T5 = {
    "model_type": "t5",
    "vocab_size": 8,
    "d_model": 4,
    "d_ff": 8,
    "d_kv": 3,
    "num_heads": 2,
    "num_layers": 1,
}
MAMBA = {"model_type": "mamba", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1}
LARGE = LLAMA | {"hidden_size": 64, "intermediate_size": 64}  # the kernels fit it


def check(folder: Path, **serving: Any) -> list[str]:
    return check_model(read_config(folder), Asked(**serving))


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 3, "2 attention heads cannot be split over 3 shards"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2},
            2,
            "3 key-value heads",
        ),
        ({"intermediate_size": 9}, 2, "9 MLP columns"),
        ({"vocab_size": 5, "hidden_size": 8, "num_attention_heads": 4}, 4, "5 rows"),
        (
            {
                "model_type": "olmo2",
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 2,
            },
            2,
            "norm",
        ),
    ],
)
def test_a_model_that_cannot_be_divided(
    tmp_path: Path, changes: dict[str, Any], ranks: int, message: str
) -> None:
    make_folder(tmp_path, LLAMA | changes)
    assert check(tmp_path) == []
    with pytest.raises(ModelLoadError, match=f"{message}.*--num-shard"):
        check(tmp_path, num_shard=ranks)


def test_a_model_that_can_be_divided(tmp_path: Path) -> None:
    make_folder(tmp_path)
    assert check(tmp_path, num_shard=2) == []


def test_kernels_that_do_not_fit(tmp_path: Path) -> None:
    make_folder(tmp_path)
    with pytest.raises(ConfigurationError, match=r"heads have 2 numbers.*Leave --cpu-b"):
        check(tmp_path, cpu_backend="kernels")
    assert check(tmp_path) == check(tmp_path, quantize="eetq") == []
    make_folder(tmp_path, LARGE)
    assert check(tmp_path, cpu_backend="kernels", quantize="eetq") == []
    with pytest.raises(ConfigurationError, match="dtype float16 is not one of"):
        check(tmp_path, dtype="float16", cpu_backend="kernels")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"hidden_act": "swoosh"}, "Activation 'swoosh' is not known"),
        (
            MAMBA | {"hidden_act": "gelu"},
            "nobody has built here: activation 'gelu' behind a convolution is not built",
        ),
        (
            MAMBA | {"model_type": "mamba2", "hidden_act": "tanh"},
            "of model type 'mamba2' what .* activation 'tanh' behind",
        ),
    ],
)
def test_a_part_that_nobody_built_is_refused_by_its_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    make_folder(tmp_path, config)
    with pytest.raises(ModelLoadError, match=message):
        check(tmp_path)
    make_folder(tmp_path, config | {"hidden_act": "silu"})
    assert check(tmp_path) == []


KIND = "a value cannot be computed with, probably the last one that was read: "
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4}
GRANITE = LLAMA | {"model_type": "granite", "attention_multiplier": 0.5}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXTRAL | {"num_experts_per_tok": 5}, "a token goes to 5 experts, and there are 4"),
        (MIXTRAL | {"num_experts_per_tok": 0}, "a token goes to 0 experts, and there are 4"),
        (DEEPSEEK | {"n_group": 3}, "8 experts cannot be 3 groups"),
        (DEEPSEEK | {"n_group": 8}, "8 experts cannot be 8 groups"),
        (DEEPSEEK | {"n_group": 4, "topk_group": 5}, "a token uses 5 groups of experts of 4"),
        (LLAMA | {"head_dim": 17}, "17 dimensions of a head cannot turn in pairs"),
        (
            DEEPSEEK | {"n_group": 2, "topk_group": 1, "v_head_dim": 0},
            "value_dim would be 0, and has to be a whole number above 0",
        ),
        (
            GRANITE | {"hidden_size": 0},
            "hidden_size would be 0, and has to be a whole number above 0",
        ),
        (LLAMA | {"model_type": "mpt", "attn_config": "alibi"}, f"{KIND}attn_config is 'alibi'"),
        (
            LLAMA | {"model_type": "mpt", "attn_config": {"alibi_bias_max": [1]}},
            rf"{KIND}attn_config\.alibi_bias_max is \[1\]",
        ),
        (LLAMA | {"head_dim": "x" * 99}, rf"{KIND}head_dim is 'x{{79}}\.\.\.\.$"),
        (LLAMA | {"head_dim": {"a": 1}}, rf"{KIND}head_dim is {{'a': 1}}"),
        (LLAMA | {"rms_norm_eps": "many"}, f"{KIND}rms_norm_eps is 'many'"),
        (T5 | {"num_heads": [8]}, rf"{KIND}num_heads is \[8\]"),
        (
            {"model_type": "llava", "text_config": LLAMA | {"rms_norm_eps": "many"}},
            f"{KIND}rms_norm_eps is 'many'",
        ),
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling is 'linear', which is no object"),
    ],
)
def test_numbers_that_cannot_be(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_json(tmp_path, config)
    write_safetensors(tmp_path / "model.safetensors", {"some.weight": F32})
    with pytest.raises(ModelLoadError, match=f"config.json cannot be right for .*: {message}"):
        check(tmp_path)


def test_a_field_that_torch_has_not_learned_is_refused_before_a_shard_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = {k: v for k, v in decoder_fit.CLAIMS.items() if k != "DecoderSpec.norm_eps"}
    monkeypatch.setattr(decoder_fit, "CLAIMS", claims)
    make_folder(tmp_path, LLAMA | {"rms_norm_eps": 0.5})
    with pytest.raises(ModelLoadError, match=r"DecoderSpec\.norm_eps is 0\.5, which is not comp"):
        check(tmp_path)


def test_activations_of_8_bits_are_for_the_generic_decoder(tmp_path: Path) -> None:
    make_folder(tmp_path)
    assert check(tmp_path, activations=8) == []
    make_folder(tmp_path, T5)
    with pytest.raises(ConfigurationError, match=r"--activations 8 is for .* 't5' is none"):
        check(tmp_path, activations=8)


def write_plain(folder: Path, model_type: str, **config: Any) -> None:
    """Write a folder whose tensors say nothing of its type."""
    write_json(folder, {"model_type": model_type, **config})
    write_safetensors(folder / "model.safetensors", {"some.weight": F32})


def test_a_type_that_nobody_knows(tmp_path: Path) -> None:
    write_plain(tmp_path, "no_such_model")
    with pytest.raises(ModelLoadError, match=r"'no_such_model' is not one of ours.*not know it"):
        check(tmp_path)
    write_plain(tmp_path, "no_such_model", auto_map={"AutoModelForCausalLM": "m.M"})
    with pytest.raises(ModelLoadError, match=r"code for it \(m.py\).*give --trust-remote-code"):
        check(tmp_path)
    with pytest.raises(ModelLoadError, match=r"lacks m\.py"):
        check(tmp_path, trust_remote_code=True)
    (tmp_path / "m.py").touch()
    (warning,) = check(tmp_path, trust_remote_code=True)
    assert "code that comes with" in warning


def test_a_model_in_parts_whose_text_is_not_computed_here(tmp_path: Path) -> None:
    """It brings code of its own, which is no help."""
    more = {"auto_map": {"AutoModel": "m.M"}, "text_config": {"model_type": "codegen"}}
    write_plain(tmp_path, "ultravox", **more)
    with pytest.raises(ModelLoadError, match="its text is of the type 'codegen', which is not"):
        check(tmp_path)


def test_a_type_that_generates_text_by_its_own_code_alone(tmp_path: Path) -> None:
    write_plain(tmp_path, "vit", auto_map={"AutoModelForCausalLM": "m.M"})
    with pytest.raises(ModelLoadError, match="its own code, which is run with --trust-remote-code"):
        check(tmp_path)
    with pytest.raises(ModelLoadError, match="its own code is not all in the folder"):
        check(tmp_path, trust_remote_code=True)
    (tmp_path / "m.py").touch()
    (warning,) = check(tmp_path, trust_remote_code=True)
    assert "code that comes with" in warning


def test_a_type_of_transformers(tmp_path: Path) -> None:
    write_plain(tmp_path, "codegen")
    assert check(tmp_path) == []
    stages = {"num_shard": 2, "pipeline_stages": 2}
    for asked in (stages, {"quantize": "eetq"}, {"rope": RopeScaling("linear", 2.0)}):
        with pytest.raises((ModelLoadError, ConfigurationError), match="through transformers"):
            check(tmp_path, **asked)
    with pytest.raises(ConfigurationError, match=r"--kv-cache-dtype fp8_e5m2 .* 'codegen'"):
        check(tmp_path, kv_cache_dtype="fp8_e5m2")


def test_what_compressed_keys_are_made_of_is_not_rounded() -> None:
    config = ModelConfig(Path(), "deepseek_v4", None, 8, 64, (), {"num_hidden_layers": 3})
    with pytest.raises(ConfigurationError, match=r"fp8_e5m2 rounds .* 'deepseek_v4' keeps beside"):
        check_kv_cache(config, model_spec(config), "fp8_e5m2")


def test_the_types_of_transformers_are_those_it_imports() -> None:
    from transformers.models.auto import modeling_auto

    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    assert list_text_types() == {name for table in tables for name in table}


@pytest.mark.parametrize("config", [GPT2, LLAMA | {"model_type": "opt", "ffn_dim": 8}])
def test_scaling_of_positions_that_do_not_rotate(tmp_path: Path, config: dict[str, Any]) -> None:
    make_folder(tmp_path, config)
    with pytest.raises(ConfigurationError, match=r"--rope-scaling.*no rotary positions"):
        check(tmp_path, rope=RopeScaling("linear", 2.0))
    make_folder(tmp_path, LLAMA)
    assert check(tmp_path, rope=RopeScaling("linear", 2.0)) == []


def test_frequencies_by_length_do_not_fit_the_kernels_beside_places_in_images(
    tmp_path: Path,
) -> None:
    asked = Asked(cpu_backend="kernels", rope=RopeScaling("dynamic", 2.0))
    make_folder(tmp_path, LARGE)
    check_model(read_config(tmp_path, asked.rope), asked)
    sections = {"mrope_section": [8, 4, 4], "rope_type": "dynamic", "factor": 2.0}
    make_folder(tmp_path, LARGE | {"model_type": "qwen2_vl_text", "rope_scaling": sections})
    with pytest.raises(ConfigurationError, match="depend on the length, and on places"):
        check_model(read_config(tmp_path), replace(asked, rope=None))


def test_a_folder_of_medusa_heads_alone(tmp_path: Path) -> None:
    write_json(tmp_path, LLAMA | {"medusa_num_heads": 3, "base_model_name_or_path": "lm/vicuna"})
    heads = {"0.0.linear.weight": F32, "1.0.linear.weight": F32}
    write_safetensors(tmp_path / "medusa_lm_head.safetensors", heads)
    with pytest.raises(ModelLoadError, match=r"Medusa heads alone.*lm/vicuna.*--speculate"):
        check(tmp_path)


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_with_medusa_heads_is_served_without_them_and_says_so(
    tmp_path: Path, inside: bool
) -> None:
    changes = {"medusa_head.0.0.linear.weight": F32} if inside else {}
    make_folder(tmp_path, LLAMA | {"medusa_num_heads": 3}, changes)
    (warning,) = check(tmp_path)
    assert "3 Medusa heads, which are not read" in warning and "--speculate" in warning


def test_a_speculator_is_no_model(tmp_path: Path) -> None:
    write_plain(tmp_path, "mlp_speculator", n_predict=3)
    with pytest.raises(ModelLoadError, match=r"MLP speculator.*--speculate"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "config", "why"),
    [
        ("bert", {}, "its tokens see those .* say is_decoder: true"),
        ("xlm-roberta", {"is_decoder": False}, "its tokens see those .* say is_decoder: true"),
        ("xlnet", {"is_decoder": True}, r"its tokens see those .* after the other\.$"),
        ("xlm", {}, r"its tokens see those .* after the other\.$"),
        ("xlm", {"causal": True}, "generate does not feed it the tokens so far"),
    ],
)
def test_what_does_not_write_by_plain_passes_is_refused(
    tmp_path: Path, model_type: str, config: dict[str, Any], why: str
) -> None:
    write_plain(tmp_path, model_type, **config)
    with pytest.raises(ModelLoadError, match=rf"'{model_type}' cannot be served .*: .*{why}"):
        check(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_forced_aligner", "qwen3_asr_thinker", None])
def test_aligners_are_refused(tmp_path: Path, kind: str | None) -> None:
    """Of Qwen3-ASR's type but for a head of moments: it would write one of them for each token."""
    thinker = {"model_type": kind, "classify_num": 5000, "text_config": LLAMA}
    write_plain(tmp_path, "qwen3_asr", thinker_config=thinker)
    with pytest.raises(ModelLoadError, match=r"tells by one of 5000 classes when a word .* spoken"):
        check(tmp_path)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra"])
def test_an_encoder_that_is_a_decoder_is_tried(tmp_path: Path, model_type: str) -> None:
    write_plain(tmp_path, model_type, is_decoder=True)
    assert check(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, {}),
        (LLAMA, {"num_shard": 3}),
        (LLAMA, {"quantize": "gptq"}),
        (LLAMA, {"cpu_backend": "kernels"}),
        (LLAMA | {"hidden_act": "swoosh"}, {}),
        (MAMBA | {"hidden_act": "gelu"}, {}),
        (T5, {"activations": 8}),
        ({"model_type": "bert"}, {}),
        (LLAMA | {"model_type": "no_such_model"}, {}),
        (LLAMA | {"model_type": "no_such_model", "auto_map": {"AutoConfig": "m.M"}}, {}),
    ],
)
def test_no_heavy_library_is_needed_to_refuse(
    tmp_path: Path, config: dict[str, Any], asked: dict[str, Any]
) -> None:
    make_folder(tmp_path)
    write_json(tmp_path, config)
    code = f"""
import sys
from pathlib import Path
from types import SimpleNamespace
from tgi_trio.errors import TgiTrioError
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
try:
    check_model(read_config(Path({str(tmp_path)!r})), SimpleNamespace(**{vars(Asked(**asked))!r}))
except TgiTrioError:
    print(sys.modules.keys() & {{"torch", "transformers", "llvmlite", "numpy", "safetensors"}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("config", "name", "shape", "message"),
    [
        (LLAMA, "model.layers.0.mlp.up_proj.weight", (8, 5), "[8, 5], but config.json asks"),
        (LLAMA, "model.norm.weight", (4, 1), "[4, 1], but config.json asks for [4]"),
        (LLAMA, "model.embed_tokens.weight", (9, 4), "[9, 4], but config.json asks for [8, 4]"),
        # Stored the other way round.
        (
            GPT2,
            "transformer.h.0.mlp.c_fc.weight",
            (16, 4),
            "[16, 4], but config.json asks for [4, 16]",
        ),
        (T5, "lm_head.weight", (8, 6), "[8, 6], but config.json asks for [8, 4]"),
        (T5, "decoder.block.0.layer.1.EncDecAttention.o.weight", (4, 4), "asks for [4, 6]"),
    ],
)
def test_a_tensor_of_another_shape_is_named(
    tmp_path: Path, config: dict[str, Any], name: str, shape: tuple[int, ...], message: str
) -> None:
    make_folder(tmp_path, config)
    assert check(tmp_path) == []
    make_folder(tmp_path, config, {name: ("F32", shape)})
    with pytest.raises(ModelLoadError, match=re.escape(message)) as caught:
        check(tmp_path)
    assert str(caught.value).startswith(f"Tensor {name!r} in {tmp_path / 'model.safetensors'} has")


def test_a_head_beside_a_tied_embedding_has_its_shape(tmp_path: Path) -> None:
    make_folder(tmp_path, LLAMA | {"tie_word_embeddings": True}, {"lm_head.weight": F32})
    with pytest.raises(ModelLoadError, match=r"'lm_head\.weight' .* shape \[2, 2\], .* \[8, 4\]"):
        check(tmp_path)
