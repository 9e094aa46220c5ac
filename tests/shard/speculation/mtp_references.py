"""What layers draft that transformers does not read: it computes them as those of a small model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.shard.speculation.mtp_support import MtpReference


class NemotronReference:
    """The same for Nemotron, whose such layers transformers reads as those of a small model."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._w = load_file(folder / "model.safetensors")
        stated = json.loads((folder / "config.json").read_text())
        stated["layers_block_type"] = ["attention", "moe"]
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "config.json").write_text(json.dumps(stated))
        kept = {n: t for n, t in self._w.items() if ".layers." not in n and "mtp" not in n}
        kept |= {
            name.replace("mtp.layers.", "backbone.layers."): tensor.clone()
            for name, tensor in self._w.items()
            if name.startswith("mtp.layers.")
        }
        kept["backbone.norm_f.weight"] = self._w["mtp.layers.1.final_layernorm.weight"]
        save_file(kept, scratch / "model.safetensors", metadata={"format": "pt"})
        self._layers: Any = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32)

    @torch.inference_mode()
    def drafts(self, ids: Sequence[int], count: int) -> list[list[int]]:
        states = self._model(torch.tensor([list(ids[:-1])]), output_hidden_states=True)
        states, tokens, found = states.hidden_states[-1], list(ids[1:]), []
        for _ in range(count):
            embedded = self._model.get_input_embeddings()(torch.tensor([tokens]))
            both = self._norm("enorm", embedded), self._norm("hnorm", states)
            x = torch.cat(both, dim=-1) @ self._w["mtp.layers.0.eh_proj.weight"].T
            out = self._layers.model(inputs_embeds=x).last_hidden_state
            best = self._model.lm_head(out[0, -1]).topk(2)
            close = best.values[0] - best.values[1] < 1e-3
            found.append((best.indices if close else best.indices[:1]).tolist())
            tokens.append(found[-1][0])
            states = torch.cat((states, out[:, -1:]), dim=1)
        return found

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._model.config.layer_norm_epsilon)
        return x * scale * self._w[f"mtp.layers.0.{name}.weight"]


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How such a layer becomes the only one of a small model."""

    config: Mapping[str, Any]  # of the small model, where it differs
    # Beginnings of names in the checkpoint -> of the small model's tensors.
    names: Mapping[str, str]
    inputs: tuple[str, str, str]  # norms of embedding and state, and what fuses them
    fuse_embedding: str = ""
    streams: bool = False  # reads and leaves several hidden states
    one_norm: bool = False  # of them all
    added: float = 0.0  # to the weights of norms
    states_first: bool = False  # what is fused begins with the state
    # The layer's parts: two norms, attention, MLP. Of one hidden state, unlike the model's layers.
    parts: Callable[[Any], tuple[Any, Any, Any, Any]] | None = None


def _parts(layer: Any) -> tuple[Any, Any, Any, Any]:
    return layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp


def _first_parts(layer: Any) -> tuple[Any, Any, Any, Any]:
    norms = layer.input_layernorm[0], layer.post_attention_layernorm[0]
    return norms[0], layer.self_attn[0], norms[1], layer.mlps[0]


_SPARSE = {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"], "indexer_types": ["full"]}
_GLM, _HUNYUAN = "model.language_model.layers.4.", "model.mtp_layers.0."
_MIMO = "model.mtp_layers.0."
_LONGCAT, _LONGCAT_LAYER = "model.mtp.layers.0.", "model.layers.0."
FAMILIES = {
    # `MTPBlock` of DeepSeek's own code
    "deepseek_v4": _Family(
        config={
            **{"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "mlp_layer_types": ["moe"],
        },
        names={
            **{"mtp.0.norm.": "model.norm.", "mtp.0.hc_head_": "model.hc_head.hc_"},
            "mtp.0.": "model.layers.0.",
        },
        inputs=("mtp.0.enorm", "mtp.0.hnorm", "mtp.0.h_proj"),
        fuse_embedding="mtp.0.e_proj",
        streams=True,
    ),
    # `Glm5NextMultiTokenPredictorLayer` of vLLM
    "glm5_next_text": _Family(
        config=_SPARSE | {"layer_types": ["indexed_attention"]},
        names={
            f"{_GLM}shared_head.norm.": "model.language_model.norm.",
            _GLM: "model.language_model.layers.0.",
        },
        inputs=(f"{_GLM}enorm", f"{_GLM}hnorm", f"{_GLM}eh_proj"),
        parts=_parts,
    ),
    # `HYV4MultiTokenPredictorLayer` of vLLM
    "hy_v4": _Family(
        config=_SPARSE | {"layer_types": ["indexed_attention"]},
        names={
            f"{_HUNYUAN}final_layernorm.": "model.norm.",
            _HUNYUAN: "model.layers.0.",
        },
        inputs=(f"{_HUNYUAN}enorm", f"{_HUNYUAN}hnorm", f"{_HUNYUAN}eh_proj"),
        parts=_parts,
    ),
    # `LongCatMultiTokenPredictorLayer` of vLLM
    "longcat_flash": _Family(
        config={"num_layers": 1},
        names={
            "model.mtp.norm.": "model.norm.",
            f"{_LONGCAT}self_attn.": f"{_LONGCAT_LAYER}self_attn.0.",
            f"{_LONGCAT}input_layernorm.": f"{_LONGCAT_LAYER}input_layernorm.0.",
            f"{_LONGCAT}post_attention_layernorm.": f"{_LONGCAT_LAYER}post_attention_layernorm.0.",
            f"{_LONGCAT}transformer_layer.mlp.": f"{_LONGCAT_LAYER}mlps.0.",
        },
        inputs=(f"{_LONGCAT}enorm.m", f"{_LONGCAT}hnorm.m", f"{_LONGCAT}eh_proj"),
        parts=_first_parts,
    ),
    # `MiMoMTPLayers` of MiMo's own code, on Qwen 2
    "mimo": _Family(
        config={"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        names={f"{_MIMO}final_layernorm.": "model.norm.", _MIMO: "model.layers.0."},
        inputs=(f"{_MIMO}token_layernorm", f"{_MIMO}hidden_layernorm", f"{_MIMO}input_proj"),
        states_first=True,
    ),
    # `Qwen4ExpForCausalLMMTP` of SGLang
    "qwen4_exp_text": _Family(
        config={
            **{"num_hidden_layers": 1, "layer_types": ["indexed_attention"]},
            "ple_layer_ids": [],
        },
        names={
            "mtp.hyper_connection_mixer.": "model.hyper_connection_mixer.",
            "mtp.layers.0.": "model.layers.0.",
        },
        inputs=("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc_hidden"),
        fuse_embedding="mtp.fc_embedding",
        streams=True,
        one_norm=True,
        added=1.0,
    ),
}


class SmallReference:
    """The drafts of such a layer, one sequence at a time, nothing kept."""

    def __init__(self, own: _Family, folder: Path, scratch: Path) -> None:
        self._own, self._w = own, load_file(folder / "model.safetensors")
        stated = json.loads((folder / "config.json").read_text())
        kind = AutoModelForImageTextToText if "vision_config" in stated else AutoModelForCausalLM
        stated.get("text_config", stated).update(own.config)
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "config.json").write_text(json.dumps(stated))
        kept = {name: t for name, t in self._w.items() if ".layers." not in name}
        for name in self._w:
            if begin := next(filter(name.startswith, own.names), ""):
                kept[own.names[begin] + name[len(begin) :]] = self._w[name].clone()
        save_file(kept, scratch / "model.safetensors", metadata={"format": "pt"})
        self._model: Any = kind.from_pretrained(folder, dtype=torch.float32)
        self._layer: Any = kind.from_pretrained(scratch, dtype=torch.float32)
        self._given, self._left = torch.empty(0), [torch.empty(0)] * 2
        for i, model in enumerate((self._model, self._layer)):
            decoder = model.get_decoder()
            watched = decoder.layers[-1] if own.streams else decoder.norm
            watched.register_forward_hook(
                lambda _, __, left, i=i: self._left.__setitem__(i, _first(left))
            )
        decoder = self._layer.get_decoder()
        decoder.layers[0].register_forward_pre_hook(lambda _, given: (self._given, *given[1:]))
        if own.parts is not None:
            decoder.layers[0].forward = self._run_plainly
            decoder.hc_head = _First()

    def _run_plainly(self, x: torch.Tensor, **given: Any) -> Any:
        """Compute a layer of one hidden state."""
        assert self._own.parts is not None
        norm, attend, second, mlp = self._own.parts(self._layer.get_decoder().layers[0])
        x = x + _first(attend(hidden_states=norm(x), **given))
        x = x + mlp(second(x))
        return x if self._own.parts is _first_parts else (x.unsqueeze(2), None)

    @torch.inference_mode()
    def drafts(self, ids: Sequence[int], count: int) -> list[list[int]]:
        """Return what is drafted behind `ids`, best first, two where rounding may decide."""
        self._model(torch.tensor([list(ids[:-1])]))
        states, tokens, found = self._left[0], list(ids[1:]), []
        for _ in range(count):
            embedded = self._model.get_input_embeddings()(torch.tensor([tokens]))
            self._given = self._fuse(embedded, states)
            best = self._layer(torch.tensor([tokens])).logits[0, -1].topk(2)
            close = best.values[0] - best.values[1] < 1e-3
            found.append((best.indices if close else best.indices[:1]).tolist())
            tokens.append(found[-1][0])
            states = torch.cat((states, self._left[1][:, -1:]), dim=1)
        return found

    def _fuse(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        own = self._own
        read, hidden = self._norm(own.inputs[0], embedded), embedded.shape[-1]
        normed = self._norm(own.inputs[1], states)
        fuse = self._w[f"{own.inputs[2]}.weight"]
        if not own.fuse_embedding:
            both = (normed, read) if own.states_first else (read, normed)
            return torch.cat(both, dim=-1) @ fuse.T
        each = normed.reshape(*embedded.shape[:2], -1, hidden) @ fuse.T
        fused = each + (read @ self._w[f"{own.fuse_embedding}.weight"].T).unsqueeze(2)
        return fused.reshape(states.shape)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = self._model.config.get_text_config().rms_norm_eps
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return x * scale * (self._w[f"{name}.weight"] + self._own.added)


class _First(torch.nn.Module):
    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        return streams[:, :, 0] if streams.dim() == 4 else streams


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def reference(
    family: str, folder: Path, scratch: Path
) -> MtpReference | NemotronReference | SmallReference:
    """Return what says what such layers draft."""
    if family in FAMILIES:
        return SmallReference(FAMILIES[family], folder, scratch)
    return (NemotronReference if family == "nemotron_h" else MtpReference)(folder, scratch)
