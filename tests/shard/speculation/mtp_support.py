"""Checkpoints with layers that guess further tokens, and what those guess by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.guessing_layers import LAYOUTS
from tgi_trio.model.tensors import shapes_in
from tgi_trio.testing.checkpoints import make_checkpoint

# Names of checkpoints that transformers does not read -> those that it does.
_AS_NEXTN = (
    (".final_layernorm.", ".shared_head.norm."),
    ("model.mtp_block.{}.", "model.layers.{}."),
    ("model.mtp_emb_norm.{}.", "model.layers.{}.enorm."),
    ("model.mtp_hidden_norm.{}.", "model.layers.{}.hnorm."),
    ("model.mtp_linear_proj.{}.", "model.layers.{}.eh_proj."),
    ("model.mtp.layers.{}.", "model.layers.{}."),
    (".pre_mlp_layernorm.", ".post_attention_layernorm."),
)


def mtp_checkpoint(folder: Path, family: str, *, layers: int = 1, **options: Any) -> Path:
    """Write a tiny checkpoint of a family with such layers, under its own names."""
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
        own = shapes_in(LAYOUTS[config.text_type].spec(spec, index).parts())
        for name, shape in own.items():
            if name in tensors:  # the model's own norm
                continue
            drawn = torch.randn(shape, generator=generator)
            plain = len(shape) == 1 and spec.norm == "rms" and "bias" not in name
            tensors[name] = 1 + 0.3 * drawn if plain else (0.3 if len(shape) == 1 else 0.15) * drawn
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "new")
    (folder / "new").replace(folder / "model.safetensors")
    return folder


_FUSE = ("eh_proj.weight", "mtp.fc.weight", "mtp_linear_proj.0.weight")
_KINDS = {"mimo_v2_flash": "sliding_attention"}
_DENSE = ("mimo_v2_flash", "ernie4_5_moe")


class MtpReference:
    """A checkpoint's model and such layers in transformers, one sequence at a time, nothing kept.

    transformers itself runs layer k for guess k; an only layer goes on from its own guesses.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        """`scratch`: for a copy of a checkpoint whose names transformers does not know."""
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config, family = self._model.config, self._model.config.model_type
        count = json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"]
        config.num_mtp_layers = count
        config.mtp_layer_types = [_KINDS.get(family, "full_attention")] * count
        config.mtp_mlp_layer_types = ["dense" if family in _DENSE else "sparse"] * count
        config.indexer_types = ["full"] * count  # of those layers, from here on
        first = config.num_hidden_layers
        self._model._keys_to_ignore_on_load_unexpected = [
            *(rf"model\.layers\.{first + k}\." for k in range(count)),
            r"^mtp\.",
        ]
        config.name_or_path = str(_rename(folder, scratch, first, count))
        self._mtp: Any = MtpModel.from_pretrained(self._model)
        if getattr(config, "index_topk", None):  # transformers makes no mask for such layers
            setattr(self._mtp, "create_masks_for_mtp_layer", _causal)  # noqa: B010 (typed)
        layers: Any = self._mtp.layers
        for layer in layers:
            layer.mtp_block.register_forward_hook(_first)
        self._count = count

    @torch.inference_mode()
    def guesses(self, ids: Sequence[int], count: int) -> list[list[int]]:
        """Return what is guessed behind `ids`, best first, two where rounding may decide."""
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
    def guesses(self, ids: Sequence[int], count: int) -> list[list[int]]:
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


def reference(family: str, folder: Path, scratch: Path) -> MtpReference | NemotronReference:
    """Return what says what such layers guess."""
    return (NemotronReference if family == "nemotron_h" else MtpReference)(folder, scratch)


def counting(folder: Path) -> Path:
    """Make a checkpoint with one such layer prefer t + 1 after t, and its layer guess so."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            tensor.zero_()
        elif name in ("model.norm.weight", "mtp.norm.weight"):
            tensor.fill_(tensor.abs().mean().round().item())
    table = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    vocab, hidden = tensors[table].shape
    embedding = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(1))
    tensors[table] = embedding
    states = embedding / embedding.pow(2).mean(dim=1, keepdim=True).sqrt()
    fuse = next(n for n in tensors if n.endswith(_FUSE))
    scale = 0.05 if "mtp.fc.weight" in tensors else 0.1  # Qwen's norms add 1 to their weights
    tensors["lm_head.weight"] = scale * states.roll(1, 0)  # what is sampled is often another
    tensors[fuse] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "new")
    (folder / "new").replace(file)
    return folder
