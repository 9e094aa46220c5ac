"""The model types that the generic decoder computes: config.json -> DecoderSpec.

Defaults are those of transformers' configuration classes, since save_pretrained may leave out
values that equal them. A function returns None for a variant of its family that the decoder cannot
express; that variant, like any type not in the table, runs through `fallback_runner.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from tgi_trio.model.config import NONSENSE, ModelConfig
from tgi_trio.model.families import (
    balanced,
    bitnet,
    block_sparse,
    compressed,
    convolutions,
    cross_attention,
    deepseek,
    deepseek_ocr,
    gemma,
    glm,
    glm5_next,
    gpt_like,
    granite,
    griffin,
    laguna,
    linear_attention,
    ling,
    llama4,
    llama_kin,
    llama_like,
    longcat,
    mistral_large4,
    mixtures,
    muse,
    own_names,
    qwen4,
    sparse,
    state_spaces,
    step,
    windowed,
    zamba,
)
from tgi_trio.model.families.checkpoint_traits import fit_checkpoint, fit_exllama
from tgi_trio.model.families.mlx_traits import fit_mlx
from tgi_trio.model.families.other_names import read_other_names
from tgi_trio.model.families.own_head import WARNING, fit_head
from tgi_trio.model.nonsense import describe_nonsense
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.plausible import check_numbers

SpecFunction = Callable[[ModelConfig], DecoderSpec | None]

FAMILIES: dict[str, SpecFunction] = {
    "llama": llama_like.llama,
    "llama4_text": llama4.llama4,
    "mllama_text_model": cross_attention.mllama,
    "baichuan": llama_like.baichuan,
    "mistral": llama_like.mistral,
    "ministral": llama_kin.ministral,
    "mixtral": mixtures.mixtral,
    "qwen2": llama_like.qwen2,
    "mimo": llama_like.qwen2,
    "qwen2_vl_text": llama_like.qwen2_vl,
    "qwen2_5_omni_text": llama_like.qwen2_5_omni,
    "qwen2_5_vl_text": llama_like.qwen2_vl,
    "qwen2_moe": mixtures.qwen2_moe,
    "qwen3": llama_like.qwen3,
    "qwen3_vl_text": llama_like.qwen3_vl,
    "qwen3_moe": mixtures.qwen3_moe,
    "mellum": mixtures.mellum,
    "flint": windowed.flint,
    "kolibri1": windowed.kolibri1,
    "qwen3_omni_moe_text": mixtures.qwen3_omni_moe,
    "qwen3_vl_moe_text": mixtures.qwen3_vl_moe,
    "gemma": llama_like.gemma,
    "gemma2": llama_like.gemma2,
    "vaultgemma": llama_like.vaultgemma,
    "gemma3_text": llama_like.gemma3,
    "gemma3n_text": gemma.gemma3n,
    "gemma4_text": gemma.gemma4,
    "gemma4_unified_text": gemma.gemma4_unified,
    "phi3": llama_like.phi3,
    "olmo": llama_like.olmo,
    "olmo2": llama_like.olmo2,
    "olmo3": llama_like.olmo3,
    "olmoe": mixtures.olmoe,
    "flex_olmo": mixtures.flex_olmo,
    "phimoe": mixtures.phimoe,
    "dbrx": mixtures.dbrx,
    "gpt_oss": mixtures.gpt_oss,
    "deepseek": mixtures.deepseek,
    "deepseek_ocr2_text": deepseek_ocr.deepseek_ocr2,
    "unlimited_ocr_text": deepseek_ocr.unlimited_ocr,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "kimi_k2": deepseek.deepseek_v3,
    "sarvam_mla": deepseek.sarvam_mla,
    "axk1": deepseek.axk1,
    "axk2": sparse.axk2,
    "step3p5": step.step3p5,
    "longcat_flash": longcat.longcat_flash,
    "deepseek_v32": sparse.deepseek_v32,
    "glm_moe_dsa": sparse.glm_moe_dsa,
    "glm5_next_text": glm5_next.glm5_next,
    "deepseek_v4": compressed.deepseek_v4,
    "minicpm3": deepseek.minicpm3,
    "youtu": deepseek.youtu,
    "glm": glm.glm,
    "hy_v4": sparse.hy_v4,
    "glm4": glm.glm4,
    "glm4_moe": glm.glm4_moe,
    "sarvam_moe": glm.sarvam_moe,
    "glm4_moe_lite": glm.glm4_moe_lite,
    "glm4v_text": glm.glm4v,
    "glm4v_moe_text": glm.glm4v_moe,
    "glm_ocr_text": glm.glm_ocr,
    "hy_v3": balanced.hy_v3,
    "minimax_m2": balanced.minimax_m2,
    "minimax_m3_vl_text": block_sparse.minimax_m3,
    "muse_glimmer_text": muse.muse_glimmer,
    "dots1": balanced.dots1,
    "solar_open": balanced.solar_open,
    "exaone_moe": balanced.exaone_moe,
    "mimo_v2_flash": balanced.mimo_v2_flash,
    "lfm2": convolutions.lfm2,
    "lfm2_moe": convolutions.lfm2_moe,
    "lfm3": convolutions.lfm3,
    "granite": llama_like.granite,
    "granite4_vision_text": llama_like.granite,
    "granite_docling_text": granite.granite_docling,
    "granite_swa": granite.granite_swa,
    "granitemoe": granite.granitemoe,
    "granitemoeshared": granite.granitemoeshared,
    "granitemoe_swa": granite.granitemoe_swa,
    "granitemoehybrid": state_spaces.granite_hybrid,
    "nemotron_h": state_spaces.nemotron_h,
    "bamba": state_spaces.bamba,
    "falcon_h1": state_spaces.falcon_h1,
    "jamba": state_spaces.jamba,
    "mamba": state_spaces.mamba,
    "mamba2": state_spaces.mamba2,
    "falcon_mamba": state_spaces.falcon_mamba,
    "qwen3_next": linear_attention.qwen3_next,
    "qwen3_5_text": linear_attention.qwen3_5,
    "qwen3_5_moe_text": linear_attention.qwen3_5_moe,
    "qwen4_exp_text": qwen4.qwen4_exp,
    "kimi_linear": linear_attention.kimi_linear,
    "bailing_hybrid": ling.bailing_hybrid,
    "bailing_moe": ling.bailing_moe,
    "bailing_moe_v2": ling.bailing_moe,
    "recurrent_gemma": griffin.recurrent_gemma,
    "zamba2": zamba.zamba2,
    "olmo_hybrid": linear_attention.olmo_hybrid,
    "smollm3": llama_kin.smollm3,
    "cwm": llama_kin.cwm,
    "helium": llama_kin.helium,
    "hyperclovax": granite.hyperclovax,
    "iquestcoder": llama_kin.iquestcoder,
    "jais2": llama_kin.jais2,
    "nanochat": llama_kin.nanochat,
    "seed_oss": llama_kin.seed_oss,
    "ernie4_5": llama_kin.ernie4_5,
    "paddleocr_vl_text": llama_kin.paddleocr_vl,
    "exaone": llama_kin.exaone,
    "exaone4": llama_kin.exaone4,
    "ernie4_5_moe": balanced.ernie4_5_moe,
    "ministral3": llama_kin.ministral3,
    "mistral4": deepseek.mistral4,
    "mistral_large4_text": mistral_large4.mistral_large4,
    "hunyuan_v1_dense": llama_kin.hunyuan,
    "hunyuan_v1_moe": mixtures.hunyuan_moe,
    "hunyuan_vl_text": llama_kin.hunyuan_vl,
    "nemotron": llama_kin.nemotron,
    "apertus": llama_kin.apertus,
    "arcee": llama_kin.arcee,
    "bitnet": bitnet.bitnet,
    "afmoe": windowed.afmoe,
    "laguna": laguna.laguna,
    "idefics": cross_attention.idefics,
    "internlm": own_names.internlm,
    "PanguEmbedded": own_names.internlm,
    "internlm2": own_names.internlm2,
    "internlm3": llama_kin.internlm3,
    "xverse": own_names.xverse,
    "orion": own_names.orion,
    "aquila": llama_like.llama,
    "minicpm": own_names.minicpm,
    "chatglm": own_names.chatglm,
    "cohere": llama_like.cohere,
    "cohere2": llama_like.cohere2,
    "cohere_compass_text": llama_like.cohere_compass,
    "cohere2_moe": windowed.cohere2_moe,
    "stablelm": llama_like.stablelm,
    "starcoder2": llama_like.starcoder2,
    "gpt2": gpt_like.gpt2,
    "gpt-sw3": gpt_like.gpt2,
    "openai-gpt": gpt_like.openai_gpt,
    "gpt_bigcode": gpt_like.gpt_bigcode,
    "gpt_neo": gpt_like.gpt_neo,
    "gptj": gpt_like.gptj,
    "gpt_neox": gpt_like.gpt_neox,
    "persimmon": gpt_like.persimmon,
    "phi": gpt_like.phi,
    "opt": gpt_like.opt,
    "biogpt": gpt_like.biogpt,
    "xglm": gpt_like.xglm,
    "bloom": gpt_like.bloom,
    "falcon": gpt_like.falcon,
    "RefinedWeb": gpt_like.refined_web,
    "RefinedWebModel": gpt_like.refined_web,
    "mpt": gpt_like.mpt,
}

# Types that are known to run through transformers, and how each does (see `fallback_runner.py`).
# All other types of transformers are tried in the same ways. `codegen`: "cached" before 5.24.
THROUGH_TRANSFORMERS: dict[str, str] = {
    "bart": "encoder-decoder",
    "codegen": "paged",
    "jetmoe": "paged",
}


def decoder_spec(config: ModelConfig) -> DecoderSpec | None:
    """Return the generic decoder's spec of a model, or of the text of a composite model.

    None if it cannot run the model. Raises ModelLoadError for a config.json whose values make no
    sense.
    """
    spec = _described_spec(config)
    return None if spec is None else fit_head(config, spec)


def find_contradictions(config: ModelConfig) -> list[str]:
    """Return warnings of what config.json says and the weights show not to be so."""
    said, found = _described_spec(config), decoder_spec(config)
    if said is not None and found is not None and said.tied_head and not found.tied_head:
        return [WARNING]
    return []


def _described_spec(config: ModelConfig) -> DecoderSpec | None:
    """Return `decoder_spec`, with a head that is tied if config.json says so."""
    text = read_other_names(config.of_text())
    try:
        spec = _family_spec(text)
    except NONSENSE as error:
        raise describe_nonsense(text, error, _family_spec) from error
    if spec is not None and config.wraps_text:
        spec = fit_checkpoint(config, spec)
    return None if spec is None else fit_exllama(config, spec)


def _family_spec(text: ModelConfig) -> DecoderSpec | None:
    """Return what a family's function makes of the text's config. Raises one of NONSENSE."""
    function = FAMILIES.get(text.text_type)
    spec = None if function is None else function(fit_mlx(text))
    if spec is not None:
        check_numbers(spec)
        _check_types(text, spec)
    return spec


def _check_types(config: ModelConfig, spec: DecoderSpec) -> None:
    """Raise ValueError if layers were counted by a list of their kinds, and there are others."""
    kinds, count = config.get("layer_types"), config.get("num_hidden_layers")
    if isinstance(kinds, list) and count is not None and count != len(kinds) == len(spec.layers):
        raise ValueError(f"layer_types names {len(kinds)} layers, and num_hidden_layers is {count}")
