"""Which models the CPU kernels compute: every field of a model's description that they read, and
which values of it. No numba in this file: the router asks as well.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.claims import ANY, Claim, Claims, find_unclaimed, multiples, only
from tgi_trio.model.decoder_matrices import NAMES
from tgi_trio.model.spec import DecoderSpec

LANES = 16  # float32 numbers in a vector: one AVX512 register, two of AVX2, four of NEON
PANEL = 2 * LANES  # output features that are computed together

# Names in config.json; `tables.py` of the kernels says which function each is.
ACTIVATIONS = (
    *("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_bloom"),
    *("quick_gelu", "relu"),
)
ROUTINGS = ("softmax", "sparse-mixer", "grouped-softmax", "grouped-sigmoid")
MOST_EXPERTS: Final = 4096  # whose numbers a thread has room for
_DTYPES = ("float32", "bfloat16")

CLAIMS: Final[Claims] = {
    **NAMES,
    "Names.final_norm": Claim(bool, "there is no norm before the head"),
    "DecoderSpec.family": ANY,
    "DecoderSpec.vocab_size": ANY,
    "DecoderSpec.heads": ANY,
    "DecoderSpec.kv_heads": ANY,
    "DecoderSpec.layers": ANY,
    "DecoderSpec.names": ANY,
    "DecoderSpec.index": only(None, refusal="an index chooses what tokens attend to"),
    "LayerSpec.chooses": ANY,  # of what is refused, as the next ones
    "IndexSpec.heads": ANY,
    "IndexSpec.dim": ANY,
    "IndexSpec.most": ANY,
    "IndexSpec.rotary": ANY,
    "DecoderSpec.latent": only(None, refusal="keys and values are compressed"),
    "DecoderSpec.head_dim": multiples(PANEL, f"head size {{}} is no multiple of {PANEL}"),
    "DecoderSpec.hidden_size": multiples(PANEL, f"hidden size {{}} is no multiple of {PANEL}"),
    "DecoderSpec.mlp_width": multiples(PANEL, f"MLP width {{}} is no multiple of {PANEL}"),
    "DecoderSpec.activation": only(*ACTIVATIONS, refusal="activation {!r} is not built"),
    "DecoderSpec.parallel": ANY,
    "LayerSpec.feeds": only(True, refusal="layers have no MLP"),
    "LayerSpec.mixer": only(None, refusal="layers keep a state per sequence"),
    "LayerSpec.attends": only(True, refusal="layers have no attention"),
    "LayerSpec.ahead": only(True, refusal="images see ahead in some layers only"),
    "LayerSpec.sizes": only(None, refusal="heads differ from layer to layer, or values from keys"),
    "LayerSpec.keys_as_values": only(False, refusal="values are made from keys"),
    "LayerSpec.reads_layer": only(None, refusal="layers read another layer's keys and values"),
    "LayerSpec.sinks": only(True, refusal="some layers have sinks and some have none"),
    "LayerSpec.mlp_width": only(0, refusal="MLPs differ in width from layer to layer"),
    "LayerSpec.sparsity": only(0.0, refusal="gates are cut at a bound"),
    "DecoderSpec.streams": only(None, refusal="a token has several hidden states"),
    "LayerSpec.beside": only(False, refusal="experts are beside an MLP"),
    "DecoderSpec.value_norm": only(False, refusal="values are normalised"),
    "DecoderSpec.value_scale": only(1.0, refusal="values are scaled"),
    "DecoderSpec.own_inputs": only(None, refusal="layers have embeddings of their own"),
    "Names.layer_scale": only("", refusal="what leaves a layer is scaled"),
    "LayerSpec.experts": ANY,
    "LayerSpec.names": ANY,
    "ExpertsSpec.count": Claim(
        lambda n: n <= MOST_EXPERTS, f"there are more than {MOST_EXPERTS} experts"
    ),
    "ExpertsSpec.per_token": ANY,
    "ExpertsSpec.width": multiples(PANEL, f"expert width {{}} is no multiple of {PANEL}"),
    "ExpertsSpec.shared_width": multiples(
        PANEL, f"width {{}} of the shared expert is no multiple of {PANEL}"
    ),
    "ExpertsSpec.routing": only(*ROUTINGS, refusal="routing {!r} is not built"),
    "ExpertsSpec.normalise": ANY,
    "ExpertsSpec.jitter": ANY,
    "ExpertsSpec.groups": ANY,
    "ExpertsSpec.groups_used": ANY,
    "ExpertsSpec.scale": ANY,
    "ExpertsSpec.stacked": ANY,  # a matter of where the weights lie
    "ExpertsSpec.gate_up": only(  # so is this
        "turns", "halves", "rows", refusal="layout {!r} of experts is not known"
    ),
    "ExpertsSpec.biased": ANY,
    "ExpertsSpec.weighs_inputs": only(False, refusal="weights multiply what goes into experts"),
    "ExpertsSpec.limit": ANY,
    "Names.sinks": ANY,
    "DecoderSpec.position_rows": ANY,
    "DecoderSpec.position_offset": ANY,  # of learned positions
    "DecoderSpec.alibi": ANY,
    "DecoderSpec.alibi_scale": ANY,  # of linear biases
    "DecoderSpec.normalised_head": only(False, refusal="the head is normalised"),
    "Names.embedding_norm": ANY,
    "DecoderSpec.query_key_norm": only("none", "head", "whole", refusal="norm of {!r}"),
    "DecoderSpec.gated_heads": only(False, refusal="attention has a gate for each head"),
    "DecoderSpec.gated_attention": only(False, refusal="attention has a gate on what it says"),
    "DecoderSpec.norm_after_rotary": only(
        False, refusal="queries and keys are normed after they are turned"
    ),
    "DecoderSpec.query_key_norm_bias": only(False, refusal="query and key norms have biases"),
    "DecoderSpec.qkv_clip": ANY,
    "DecoderSpec.transposed": ANY,
    "DecoderSpec.qkv_layout": only("separate", "stacked", "grouped", refusal="layout {!r}"),
    "DecoderSpec.norm": only("rms", "rms_plus_one", "layer", refusal="norm {!r} is not built"),
    "DecoderSpec.norm_eps": ANY,
    "DecoderSpec.norm_bias": ANY,
    "DecoderSpec.norm_weight": ANY,
    "DecoderSpec.qkv_bias": ANY,
    "DecoderSpec.output_bias": ANY,
    "DecoderSpec.mlp_bias": ANY,
    "DecoderSpec.head_bias": ANY,
    "DecoderSpec.gated": ANY,
    "DecoderSpec.tied_head": ANY,
    "DecoderSpec.attention_soft_cap": ANY,
    "DecoderSpec.final_soft_cap": ANY,
    "DecoderSpec.embedding_scale": ANY,
    "DecoderSpec.residual_scale": ANY,
    "DecoderSpec.attention_scale": only(1.0, refusal="what attention says is scaled"),
    "DecoderSpec.gate_scale": only(1.0, refusal="gates are scaled"),
    "DecoderSpec.mlp_scale": only(1.0, refusal="what an MLP says is scaled"),
    "DecoderSpec.logit_scale": ANY,
    "LayerSpec.scale": ANY,
    "LayerSpec.window": ANY,
    "LayerSpec.chunk": only(0, refusal="layers see chunks of {} positions"),
    "LayerSpec.rotary": ANY,
    "RotarySpec.interleaved": ANY,
    "RotarySpec.kind": only(  # the same frequencies at every length
        *("default", "linear", "llama3", "yarn", "proportional"),
        refusal="rotary frequencies depend on the length",
    ),
    "RotarySpec.dim": ANY,
    "RotarySpec.theta": ANY,
    "RotarySpec.max_positions": ANY,
    "RotarySpec.sections": ANY,
    "RotarySpec.sections_alternate": ANY,
    "RotarySpec.query_scale": only(None, refusal="queries are scaled by their position"),
    "QueryScale.beta": ANY,  # of what is refused
    "QueryScale.step": ANY,
    "QueryScale.offset": ANY,
    "RotarySpec.parameters": ANY,  # `rotary_frequencies.py` reads them, by kind
}


def unserved(reason: object) -> ConfigurationError:
    """Return what to raise where only the kernels will do and `reason` says why they do not."""
    return ConfigurationError(
        f"The CPU kernels cannot serve this model: {reason}. Leave --cpu-backend out to serve it "
        "with torch."
    )


def find_unsupported(spec: DecoderSpec | None, dtype: str) -> str | None:
    """Return why the kernels cannot run a model, or None when they can."""
    if spec is None:
        return "the model runs through transformers"
    if dtype not in _DTYPES:
        return f"dtype {dtype} is not one of {', '.join(_DTYPES)}"
    if spec.query_key_norm == "head" and spec.norm == "layer":
        return "query and key norms have a mean"
    return find_unclaimed(spec, CLAIMS)
