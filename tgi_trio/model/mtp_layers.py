"""Layers of a model's own checkpoint that draft further tokens: multi-token prediction (MTP).

DeepSeek-V3 (2024), section 2.2; others call it "nextn". Such a layer reads the hidden state behind
the model's final norm that chose a token, and that token's embedding: each is normalised, both are
joined and projected to what a decoder layer of the family reads. A norm and the model's head
follow. A family is a row of `LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tgi_trio.model.matrices.decoder import layer_refs, outer_refs
from tgi_trio.model.matrices.references import LinearRef, MatrixRef, NormRef, whole_linear
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec, Names

_Layers = Callable[[DecoderSpec], tuple[LayerSpec, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpSpec:
    """One such layer; its own weights are named as in the checkpoint."""

    decoder: DecoderSpec  # the decoder layer or layers; its final norm is the one behind them
    embedding_norm: NormRef
    state_norm: NormRef
    fuse: LinearRef  # of both, joined: [hidden, 2 * hidden]; or of the state alone
    states_first: bool  # the state comes before the embedding
    # Of the embedding, if they are not joined: [hidden, hidden]; its result is added to that of
    # `fuse`, of each hidden state if a token has several.
    fuse_embedding: LinearRef | None = None

    def parts(self) -> Iterator[Any]:
        """Yield everything with tensors of its own, at any depth."""
        yield from (self.embedding_norm, self.state_norm, self.fuse, self.fuse_embedding)
        outer = outer_refs(self.decoder)
        yield from (outer.final_norm, outer.hyper, outer.gates)
        yield from (layer_refs(self.decoder, i) for i in range(len(self.decoder.layers)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayout:
    """How a family's checkpoints store such layers. "{}": the layer's number, from 0."""

    layer: str  # prefix of the names of the decoder layer's parts
    embedding_norm: str
    state_norm: str
    fuse: str
    fuse_embedding: str = ""  # "": `fuse` is of both
    final_norm: str = ""  # "": the model's own
    # Prefix of the weights that join its hidden states; "": a token has one.
    last_streams: str = ""
    one_state_norm: bool = False  # of all hidden states of a token at once, not of each
    continues: bool = False  # numbers go on from those of the model's layers
    states_first: bool = False
    names: Mapping[str, str] | None = None  # of a layer's parts, where they are not the model's
    described: bool = False  # the config says what each is like (`DecoderSpec.mtp`)
    layers: _Layers = lambda spec: (_last_attending(spec),)  # what each is like otherwise

    def first(self, spec: DecoderSpec) -> int:
        """Return the number of the first such layer."""
        return len(spec.layers) if self.continues else 0

    def count(self, spec: DecoderSpec, stored: Collection[str]) -> int:
        """Return how many such layers a checkpoint with these tensors has."""
        number = first = self.first(spec)
        while f"{self.embedding_norm.format(number)}.weight" in stored:
            number += 1
            if "{}" not in self.embedding_norm:
                break
        return min(number - first, len(spec.mtp)) if self.described else number - first

    def spec(self, base: DecoderSpec, index: int) -> MtpSpec:
        """Return such a layer, by its index from 0."""
        number, hidden = self.first(base) + index, base.hidden_size
        inputs = hidden if self.fuse_embedding else 2 * hidden
        states = _count_states(base) * hidden if self.one_state_norm else hidden
        return MtpSpec(
            decoder=self._decoder(base, index, number),
            embedding_norm=_norm(base, self.embedding_norm.format(number), hidden),
            state_norm=_norm(base, self.state_norm.format(number), states),
            fuse=_linear(self.fuse.format(number), hidden, inputs),
            states_first=self.states_first,
            fuse_embedding=_linear(self.fuse_embedding.format(number), hidden, hidden)
            if self.fuse_embedding
            else None,
        )

    def _decoder(self, base: DecoderSpec, index: int, number: int) -> DecoderSpec:
        own = replace(
            base.names,
            **dict(self.names or {}),
            final_norm=self.final_norm.format(number) or base.names.final_norm,
            last_streams=self.last_streams.format(number),
        )
        steps = base.mtp[index : index + 1] if self.described else self.layers(base)
        layers = (
            replace(step, chooses=True, names=_named(own, self.layer, number * len(steps) + i))
            for i, step in enumerate(steps)
        )
        decoder = replace(base, layers=tuple(layers), names=own, mtp=())
        if self.last_streams:
            return decoder
        return replace(decoder, hyper=None, gated_streams=None)


def _named(names: Names, prefix: str, number: int) -> Names:
    return replace(names, layer=prefix.format(number))


def _linear(name: str, rows: int, columns: int) -> LinearRef:
    return whole_linear(MatrixRef(f"{name}.weight", rows, columns))


def _norm(spec: DecoderSpec, name: str, size: int) -> NormRef:
    return NormRef(f"{name}.weight", "", size, spec.norm_eps)


def _count_states(spec: DecoderSpec) -> int:
    """Return how many hidden states a token has."""
    several = spec.hyper or spec.gated_streams
    return several.count if several else 1


def _last_attending(spec: DecoderSpec) -> LayerSpec:
    """Return the last layer with attention alone."""
    return next(layer for layer in reversed(spec.layers) if layer.attends and layer.mixer is None)


def _last_windowed(spec: DecoderSpec) -> LayerSpec:
    return next((layer for layer in reversed(spec.layers) if layer.window), spec.layers[-1])


def _attention_then_experts(spec: DecoderSpec) -> tuple[LayerSpec, ...]:
    """Return a layer of attention alone and one of experts alone."""
    mixture = (layer for layer in spec.layers if layer.experts and not layer.attends)
    return _last_attending(spec), next(mixture)


_NEXTN: Final = MtpLayout(
    layer="model.layers.{}.",
    embedding_norm="model.layers.{}.enorm",
    state_norm="model.layers.{}.hnorm",
    fuse="model.layers.{}.eh_proj",
    final_norm="model.layers.{}.shared_head.norm",
    continues=True,
)
_QWEN: Final = MtpLayout(
    layer="mtp.layers.{}.",
    embedding_norm="mtp.pre_fc_norm_embedding",
    state_norm="mtp.pre_fc_norm_hidden",
    fuse="mtp.fc",
    final_norm="mtp.norm",
)
# A layer of LongCat's is half of one of its own, without a number, and another name of the MLP.
_LONGCAT_NAMES: Final = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query_down": "self_attn.q_a_proj",
    "query_norm": "self_attn.q_a_layernorm",
    "query_up": "self_attn.q_b_proj",
    "latent_down": "self_attn.kv_a_proj_with_mqa",
    "latent_norm": "self_attn.kv_a_layernorm",
    "latent_up": "self_attn.kv_b_proj",
    "output": "self_attn.o_proj",
    "gate": "transformer_layer.mlp.gate_proj",
    "up": "transformer_layer.mlp.up_proj",
    "down": "transformer_layer.mlp.down_proj",
}
# By the type of the text. Sources: transformers; where it has none, vLLM, SGLang (Qwen 4), and the
# own code of ERNIE, MiMo and DeepSeek V4.
LAYOUTS: Final[Mapping[str, MtpLayout]] = {
    **dict.fromkeys(
        ("bailing_hybrid", "bailing_moe", "bailing_moe_v2"),
        replace(_NEXTN, final_norm="model.layers.{}.final_layernorm"),
    ),
    "deepseek_v3": _NEXTN,
    "deepseek_v32": _NEXTN,
    "deepseek_v4": MtpLayout(
        layer="mtp.{}.",
        embedding_norm="mtp.{}.enorm",
        state_norm="mtp.{}.hnorm",
        fuse="mtp.{}.h_proj",
        fuse_embedding="mtp.{}.e_proj",
        final_norm="mtp.{}.norm",
        last_streams="mtp.{}.hc_head_",
        described=True,
    ),
    "glm_moe_dsa": _NEXTN,
    "glm4_moe": _NEXTN,
    "glm5_next_text": _NEXTN,
    "glm4_moe_lite": _NEXTN,
    "glm4v_moe_text": _NEXTN,
    "glm_ocr_text": _NEXTN,
    "hy_v3": replace(_NEXTN, final_norm="model.layers.{}.final_layernorm"),
    "hy_v4": MtpLayout(
        layer="model.mtp_layers.{}.",
        embedding_norm="model.mtp_layers.{}.enorm",
        state_norm="model.mtp_layers.{}.hnorm",
        fuse="model.mtp_layers.{}.eh_proj",
        final_norm="model.mtp_layers.{}.final_layernorm",
    ),
    "longcat_flash": MtpLayout(
        layer="model.mtp.layers.{}.",
        embedding_norm="model.mtp.layers.{}.enorm.m",
        state_norm="model.mtp.layers.{}.hnorm.m",
        fuse="model.mtp.layers.{}.eh_proj",
        final_norm="model.mtp.norm",
        names=_LONGCAT_NAMES,
        layers=lambda spec: (replace(_last_attending(spec), experts=None, later=False),),
    ),
    "step3p5": replace(
        _NEXTN, final_norm="model.layers.{}.transformer.shared_head.norm", described=True
    ),
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen4_exp_text": MtpLayout(
        layer="mtp.layers.{}.",
        embedding_norm="mtp.pre_fc_norm_embedding",
        state_norm="mtp.pre_fc_norm_hidden",
        fuse="mtp.fc_hidden",
        fuse_embedding="mtp.fc_embedding",
        last_streams="mtp.hyper_connection_mixer.",
        one_state_norm=True,
        described=True,
    ),
    "qwen3_5_moe_text": _QWEN,
    "ernie4_5_moe": MtpLayout(
        layer="model.mtp_block.{}.",
        embedding_norm="model.mtp_emb_norm.{}",
        state_norm="model.mtp_hidden_norm.{}",
        fuse="model.mtp_linear_proj.{}",
        layers=lambda spec: (replace(spec.layers[-1], experts=None),),
    ),
    "mimo": MtpLayout(
        layer="model.mtp_layers.{}.",
        embedding_norm="model.mtp_layers.{}.token_layernorm",
        state_norm="model.mtp_layers.{}.hidden_layernorm",
        fuse="model.mtp_layers.{}.input_proj",
        final_norm="model.mtp_layers.{}.final_layernorm",
        states_first=True,
    ),
    "mimo_v2_flash": MtpLayout(
        layer="model.mtp.layers.{}.",
        embedding_norm="model.mtp.layers.{}.enorm",
        state_norm="model.mtp.layers.{}.hnorm",
        fuse="model.mtp.layers.{}.eh_proj",
        final_norm="model.mtp.layers.{}.final_layernorm",
        names={"mlp_norm": "pre_mlp_layernorm"},
        layers=lambda spec: (replace(_last_windowed(spec), experts=None),),
    ),
    "nemotron_h": MtpLayout(
        layer="mtp.layers.{}.",
        embedding_norm="mtp.layers.0.enorm",
        state_norm="mtp.layers.0.hnorm",
        fuse="mtp.layers.0.eh_proj",
        final_norm="mtp.layers.1.final_layernorm",
        layers=_attention_then_experts,
    ),
}
