"""Checkpoints with layers that draft further tokens, and what those draft by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_layers import MtpModel

from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.mtp_layers import LAYOUTS
from tgi_trio.model.tensors import list_shapes
from tgi_trio.testing.checkpoints import make_checkpoint
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

# Names of checkpoints that transformers does not read -> those that it does.
_AS_NEXTN = (
    (".final_layernorm.", ".shared_head.norm."),
    (".transformer.shared_head.", ".shared_head."),
    ("model.mtp_block.{}.", "model.layers.{}."),
    ("model.mtp_emb_norm.{}.", "model.layers.{}.enorm."),
    ("model.mtp_hidden_norm.{}.", "model.layers.{}.hnorm."),
    ("model.mtp_linear_proj.{}.", "model.layers.{}.eh_proj."),
    ("model.mtp.layers.{}.", "model.layers.{}."),
    (".pre_mlp_layernorm.", ".post_attention_layernorm."),
)
# Our names of parts of such layers -> those in published files, where they differ.
_PUBLISHED = {
    "deepseek_v4": (
        *((".self_attn.", ".attn."), (".mlp.", ".ffn."), (".sinks", ".attn_sink")),
        *((".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_")),
        *((".input_layernorm.", ".attn_norm."), (".post_attention_layernorm.", ".ffn_norm.")),
        *((".q_a_norm.", ".q_norm."), (".q_a_proj.", ".wq_a."), (".q_b_proj.", ".wq_b.")),
        *((".kv_proj.", ".wkv."), (".o_a_proj.", ".wo_a."), (".o_b_proj.", ".wo_b.")),
        *((".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3.")),
        (".e_score_correction_bias", ".bias"),
    ),
    "glm5_next_text": (("model.layers.", "model.language_model.layers."),),
    "hy_v4": (
        *(
            (".sinks", ".learnable_sink_param"),
            (".self_attn.gate_proj.", ".self_attn.linear_gate."),
        ),
    ),
}


def mtp_checkpoint(folder: Path, family: str, *, layers: int = 1, **options: Any) -> Path:
    """Write a tiny checkpoint of a family with such layers, under its own names."""
    if family == "glm5_next_text":
        return add_layers(make_wrapped(folder, "glm5_next", **options), layers)
    if family == "step3p5":  # whose config says what each layer is like
        kinds = ["full_attention", *["sliding_attention"] * (2 + layers)]
        mlps = ["dense", "sparse", "sparse", *["dense"] * layers]
        options |= {"layer_types": kinds, "mlp_layer_types": mlps}
        make_wrapped(folder, "step3p7", num_nextn_predict_layers=layers, **options)
        return add_layers(folder, layers)
    return add_layers(make_checkpoint(folder, family, **options), layers)


def add_layers(folder: Path, layers: int = 1) -> Path:
    """Add such layers with random weights to a checkpoint."""
    stated = json.loads((folder / "config.json").read_text())
    stated["num_nextn_predict_layers"] = layers
    (folder / "config.json").write_text(json.dumps(stated))
    config = read_config(folder)
    spec = decoder_spec(config)
    assert spec is not None
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    for index in range(layers):
        own = list_shapes(LAYOUTS[config.text_type].spec(spec, index).parts())
        for name, shape in own.items():
            if name in tensors:  # the model's own norm
                continue
            drawn = torch.randn(shape, generator=generator)
            plain = len(shape) == 1 and spec.norm == "rms" and "bias" not in name
            drawn = 1 + 0.3 * drawn if plain else (0.3 if len(shape) == 1 else 0.15) * drawn
            for ours, published in _PUBLISHED.get(config.text_type, ()):
                name = name.replace(ours, published)
            tensors[name] = drawn
    if config.text_type == "hy_v4":
        _stack_experts(tensors, "model.mtp_layers.0.mlp.experts.")
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "new")
    (folder / "new").replace(folder / "model.safetensors")
    return folder


def _stack_experts(tensors: dict[str, torch.Tensor], place: str) -> None:
    """Store all experts of a layer in one tensor, as Hunyuan 4's files do."""
    count = sum(name.startswith(place) for name in tensors) // 3
    gates, ups, downs = (
        torch.stack([tensors.pop(f"{place}{i}.{part}_proj.weight") for i in range(count)])
        for part in ("gate", "up", "down")
    )
    tensors |= {f"{place}gate_up_proj": torch.cat((gates, ups), 1), f"{place}down_proj": downs}


_FUSE = ("eh_proj.weight", "mtp.fc.weight", "mtp_linear_proj.0.weight")
_KINDS = {"mimo_v2_flash": "sliding_attention", "step3p5": "sliding_attention"}
_DENSE = ("mimo_v2_flash", "ernie4_5_moe", "step3p5")


class MtpReference:
    """A checkpoint's model and such layers in transformers, one sequence at a time, nothing kept.

    transformers itself runs layer k for draft k; an only layer goes on from its own drafts.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        """`scratch`: for a copy of a checkpoint whose names transformers does not know."""
        stated = json.loads((folder / "config.json").read_text())
        kind = AutoModelForImageTextToText if "vision_config" in stated else AutoModelForCausalLM
        self._model: Any = kind.from_pretrained(folder, dtype=torch.float32)
        config = self._model.config.get_text_config()
        family, count = config.model_type, stated["num_nextn_predict_layers"]
        config.num_mtp_layers = count
        config.mtp_layer_types = [_KINDS.get(family, "full_attention")] * count
        config.mtp_mlp_layer_types = ["dense" if family in _DENSE else "sparse"] * count
        config.indexer_types = ["full"] * count  # of those layers, from here on
        if family == "step3p5":  # as in vLLM, of which transformers says nothing
            heads = {"num_attention_heads": config.num_sliding_attention_heads}
            config.mtp_per_layer_config = dict.fromkeys(range(count), heads)
            config.swiglu_limits_shared = [0.0] * count
        first = config.num_hidden_layers
        self._model._keys_to_ignore_on_load_unexpected = [
            *(rf"model\.layers\.{first + k}\." for k in range(count)),
            r"^mtp\.",
        ]
        self._model.config.name_or_path = str(_rename(folder, scratch, first, count))
        self._mtp: Any = MtpModel.from_pretrained(self._model)
        if getattr(config, "index_topk", None):  # transformers makes no mask for such layers
            setattr(self._mtp, "create_masks_for_mtp_layer", _causal)  # noqa: B010 (typed)
        layers: Any = self._mtp.layers
        for layer in layers:
            layer.mtp_block.register_forward_hook(_first)
        self._count = count

    @torch.inference_mode()
    def drafts(self, ids: Sequence[int], count: int) -> list[list[int]]:
        """Return what is drafted behind `ids`, best first, two where rounding may decide."""
        found: list[list[int]] = []
        states = self._model(torch.tensor([list(ids[:-1])]), output_hidden_states=True)
        states, tokens, first = states.hidden_states[-1], list(ids[1:]), 1
        for k in range(count):
            index = k % self._count
            positions = torch.arange(first, first + len(tokens))[None]
            ids_here = torch.tensor([tokens])
            out = self._mtp.forward_layer(index, states, positions, None, input_ids=ids_here)
            best = self._mtp._project_to_logits(out[0, -1]).topk(2)
            close = best.values[0] - best.values[1] < 1e-3
            found.append((best.indices if close else best.indices[:1]).tolist())
            tokens.append(found[-1][0])
            if self._count == 1:
                states = torch.cat((states, out[:, -1:]), dim=1)
            else:
                states, tokens, first = out, tokens[1:], first + 1
        return found


def _first(_: Any, __: Any, output: Any) -> Any:
    """Return the states alone: layers of GLM 5 also return what their index has chosen."""
    return output[0] if isinstance(output, tuple) else output


def _causal(_: int, embedded: torch.Tensor, *__: Any) -> dict[str, torch.Tensor]:
    count = embedded.shape[1]
    return {"attention_mask": torch.full((1, 1, count, count), float("-inf")).triu(1)}


def _rename(folder: Path, scratch: Path, first: int, count: int) -> Path:
    """Return a folder with the layers' tensors under names that transformers reads."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        known = name
        for k in range(count):
            own = (f"model.layers.{first + k}.", f"model.mtp.layers.{k}.", "model.mtp_")
            if name.startswith(own):
                for theirs, ours in _AS_NEXTN:
                    known = known.replace(theirs.format(k), ours.format(first + k))
        renamed[known] = tensor
    for k in range(count):
        norm = f"model.layers.{first + k}.shared_head.norm.weight"
        if f"model.layers.{first + k}.enorm.weight" in renamed and norm not in renamed:
            renamed[norm] = tensors["model.norm.weight"].clone()  # ERNIE shares it
    scratch.mkdir(parents=True, exist_ok=True)
    save_file(renamed, scratch / "model.safetensors")
    return scratch


_SAYING = ("o_proj", "out_proj", "down_proj", ".wo_b.", ".w2.", "ple.value_proj")
# Qwen 4's gates are then 1/2, and its norms, which add 1 to their weights, have none of their own.
_PASSING = ("mix_weight_up", "mixer.hc_norm", "pre_fc_norm_embedding")


def counting(folder: Path) -> Path:
    """Make a checkpoint with one such layer prefer t + 1 after t, and its layer draft so."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if any(part in name for part in (*_SAYING, *_PASSING)):
            tensor.zero_()
        elif name in ("model.norm.weight", "mtp.norm.weight"):
            tensor.fill_(tensor.abs().mean().round().item())
    table = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    vocab, hidden = tensors[table].shape
    embedding = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(1))
    tensors[table] = embedding
    states = embedding / embedding.pow(2).mean(dim=1, keepdim=True).sqrt()
    scale = 0.05 if "mtp.fc.weight" in tensors else 0.1  # Qwen's norms add 1 to their weights
    scale = 0.2 if "mtp.fc_hidden.weight" in tensors else scale
    tensors["lm_head.weight"] = scale * states.roll(1, 0)  # what is sampled is often another
    eye, none = torch.eye(hidden), torch.zeros(hidden, hidden)
    for name in [name for name in tensors if name.endswith(_FUSE)][:1]:  # the others draft wrong
        tensors[name] = torch.cat((eye, none), dim=1)
    if "mtp.fc_hidden.weight" in tensors:
        tensors |= {"mtp.fc_embedding.weight": eye, "mtp.fc_hidden.weight": none}
    if "mtp.0.e_proj.weight" in tensors:
        tensors |= {"mtp.0.e_proj.weight": eye, "mtp.0.h_proj.weight": none}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "new")
    (folder / "new").replace(file)
    return folder
