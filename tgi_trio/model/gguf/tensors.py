"""The tensors of GGUF files under the names of the model's family.

llama.cpp names a tensor by its role, which is the same in every family, and so do our tables of
names (`families/names.py`); the two are matched here. llama.cpp stores a mixture's experts in one
tensor; here each is a separate one. Other differences are described by `Change`, for whoever reads
the numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import Change, StoredTensor
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.gguf.architectures import ARCHITECTURES, Architecture
from tgi_trio.model.gguf.files import read_model
from tgi_trio.model.gguf.header import TensorInfo
from tgi_trio.model.mtp_layers import LAYOUTS, MtpLayout
from tgi_trio.model.specs.decoder import DecoderSpec, Names
from tgi_trio.model.stacked_experts import split_first_axis
from tgi_trio.model.tensors import Shape, decoder_claims, list_shapes

# Tensors of rotary scaling, which `config.py` reads.
FREQUENCIES: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

OUTER_ROLES: Final = {
    "token_embd": "embedding",
    "token_embd_norm": "embedding_norm",
    "position_embd": "positions",
    "output_norm": "final_norm",
    "output": "head",
    "per_layer_token_embd": "own_table",
    "per_layer_model_proj": "own_projection",
    "per_layer_proj_norm": "own_norm",
}
# Matrices of all streams but the first, in one tensor.
_STREAMS: Final = {"altup_proj": "streams_in", "altup_unembd_proj": "streams_out"}
# The first field that a family has is used.
FAMILY_ROLES: Final = {
    "attn_norm": ("attention_norm",),
    "attn_q": ("query",),
    "attn_k": ("key",),
    "attn_v": ("value",),
    "attn_qkv": ("qkv",),
    "attn_q_norm": ("query_norm",),
    "attn_k_norm": ("key_norm",),
    "attn_output": ("output",),
    "attn_gate": ("output_gate", "head_gate"),
    "post_attention_norm": ("attention_post_norm",),
    "ffn_norm": ("mlp_norm",),
    "ffn_gate": ("gate",),
    "ffn_up": ("gate_up", "up"),
    "ffn_down": ("down",),
    "post_ffw_norm": ("mlp_post_norm",),
    "ffn_gate_inp": ("router",),
    "ffn_gate_inp_shexp": ("shared_router",),
    "ffn_latent_down": ("expert_entry",),
    "ffn_latent_up": ("expert_exit",),
    "pre_ffw_norm_2": ("beside_norm",),
    "post_ffw_norm_1": ("dense_post_norm",),
    "post_ffw_norm_2": ("beside_post_norm",),
    "inp_gate": ("own_gate",),
    "proj": ("own_up",),
    "post_norm": ("own_post_norm",),
}
_EXPERTS: Final = {
    "ffn_gate_exps": "expert_gate",
    "ffn_up_exps": "expert_up",
    "ffn_down_exps": "expert_down",
}
_GATES_UPS: Final = "ffn_gate_up_exps"  # both in one tensor, gate rows first
# Vectors: our names are complete, without an ending.
_VECTORS: Final = {
    "exp_probs_b": "choice_bias",
    "attn_sinks": "sinks",
    "layer_output_scale": "layer_scale",
    "ffn_gate_inp.scale": "router_gain",
    "ffn_down_exps.scale": "expert_scale",
}
# The expansion of latents to keys and values: one matrix in checkpoints, two tensors here.
HALVES: Final = {"attn_k_b": "keys", "attn_v_b": "values"}
_SHARED: Final = {
    "ffn_gate_shexp": "gate_proj",
    "ffn_up_shexp": "up_proj",
    "ffn_down_shexp": "down_proj",
}
_BY_GROUP: Final = "ssm_norm"  # a vector in checkpoints, a row per group of heads here


def read_gguf_tensors(files: list[Path], config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors of a model's GGUF files by the names of its family.

    A tensor that the family does not have keeps its name. Raises ModelLoadError as `read_model`
    does.
    """
    model, spec = read_model(files), decoder_spec(config)
    if spec is None:
        raise ModelLoadError(
            f"{files[0]} is a model of the architecture {model.architecture!r} in a variant that "
            "runs through transformers alone, which does not read GGUF here."
        )
    tensors: dict[str, StoredTensor] = {}
    needed, own_layers = dict(decoder_claims(spec).needed), len(spec.layers)
    architecture = ARCHITECTURES[model.architecture]
    layout = _find_layout(config, architecture)
    joined = spec.names.qkv or not spec.names.query or "attn_qkv" in architecture.mixer
    stated = model.tensors.items() if joined else _split_attention(model.tensors, spec)
    for name, (file, info) in stated:
        names, layer = spec.names, _parse(name)[0] or 0
        if own_layers <= layer < model.get("block_count", 0):  # drafts further tokens
            if layout is None:
                continue
            index = layer - own_layers
            name = name.replace(f"blk.{layer}.", f"blk.{layout.first(spec) + index}.", 1)
            names = replace(names, layer=layout.layer)
            needed |= list_shapes(layout.spec(spec, index).parts())
        if name in FREQUENCIES or _parse(name)[1] in architecture.absorbed:
            continue
        change = _change(name, info, architecture, spec)
        shape = info.shape[::-1] if change is not None and change.transposed else info.shape
        stored = StoredTensor(file, info.kind.name, shape, info.first, info.end, change)
        found = _named(name, stored, architecture, names)
        if layout is not None and ".nextn." in name:
            found = _named_beside(name, stored, layout)
        for own, part in found:
            tensors[own] = _with_axes(part, needed.get(own))
    for key, own in architecture.listed.items():  # `config.py` has checked their lengths
        for index in range(len(spec.layers)):
            first = model.lists[key][index]
            name = f"{spec.names.layer.format(index)}{own}"
            tensors[name] = StoredTensor(files[0], "F32", (1,), first, first + 4)
    return tensors


def _split_attention(
    tensors: Mapping[str, tuple[Path, TensorInfo]], spec: DecoderSpec
) -> Iterator[tuple[str, tuple[Path, TensorInfo]]]:
    """Yield tensors; queries, keys and values in one as three, as the family has them.

    The converter joins their rows if it is asked to, in files of any architecture.
    """
    for name, (file, info) in tensors.items():
        layer, role, ending = _parse(name)
        if role != "attn_qkv" or layer is None or layer >= len(spec.layers):
            yield name, (file, info)
            continue
        own = spec.sizes(spec.layers[layer])
        keys, values = own.kv_heads * own.dim, own.kv_heads * own.value_dim
        counts = {"attn_q": info.shape[0] - keys - values, "attn_k": keys, "attn_v": values}
        row, first = (info.end - info.first) // max(info.shape[0], 1), info.first
        for part, rows in counts.items():
            shape, end = (rows, *info.shape[1:]), first + rows * row
            part_info = replace(info, shape=shape, first=first, end=end)
            yield f"blk.{layer}.{part}{ending}", (file, part_info)
            first = end


def _find_layout(config: ModelConfig, architecture: Architecture) -> MtpLayout | None:
    """Return how layers that draft are named, None if they are not read from such files."""
    layout = LAYOUTS.get(config.text_type)
    known = layout is not None and (layout.continues or architecture.has_mtp)
    return layout if known else None


def _named_beside(
    name: str, stored: StoredTensor, layout: MtpLayout
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a tensor beside the decoder layer of a layer that drafts; not copies of the model's.

    The layer's number is that of `layout`.
    """
    layer, role, ending = _parse(name)
    whole = {
        "nextn.eh_proj": layout.fuse,
        "nextn.enorm": layout.embedding_norm,
        "nextn.hnorm": layout.state_norm,
        "nextn.shared_head_norm": layout.final_norm,
    }.get(role)
    if whole:
        yield whole.format(layer) + ending, stored


def _with_axes(stored: StoredTensor, shape: Shape | None) -> StoredTensor:
    """Return a tensor with its family's axes: the converter drops or adds axes of length 1."""
    if shape is None or [n for n in stored.shape if n > 1] != [n for n in shape if n > 1]:
        return stored
    return replace(stored, shape=shape)


def _change(
    name: str, info: TensorInfo, architecture: Architecture, spec: DecoderSpec
) -> Change | None:
    """Return how llama.cpp's converter changes a tensor, apart from its name."""
    layer, role, ending = _parse(name)
    if layer is not None and spec.transposed and len(info.shape) == 2:
        return Change(transposed=True)
    # A norm of heads is the same for all of them.
    heads = {"attn_q": spec.heads, "attn_k": spec.kv_heads, "attn_q_norm": 1, "attn_k_norm": 1}
    if role in heads and architecture.side_by_side:
        return Change(rotary_heads=heads[role])
    if role == "attn_qkv" and spec.qkv_layout == "grouped":
        return Change(key_heads=spec.kv_heads, queries_each=spec.heads // spec.kv_heads)
    if role == "ssm_a":
        return Change(exponential=True)
    plain_norm = role.endswith("norm") and role not in architecture.mixer
    outer = layer is None and spec.outer_norm == "rms"
    if plain_norm and ending == ".weight" and architecture.norms_plus_one and not outer:
        return Change(plus_one=True)
    return None


def _named(
    name: str, stored: StoredTensor, architecture: Architecture, names: Names
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a tensor under its family's name, or each of the experts that it contains."""
    layer, role, ending = _parse(name)
    if layer is None:
        if own := getattr(names, _STREAMS.get(role, ""), ""):
            for stream, part in enumerate(split_first_axis(stored)):
                yield own.format(stream) + ending, part
            return
        outer = next(iter(architecture.roles.get(role, ())), OUTER_ROLES.get(role))
        own = getattr(names, outer) if outer else ""
        own = own + ending if own else _part_name(role, ending, architecture.parts)
        yield (own or name, stored)
        return
    prefix = names.layer.format(layer)
    dimensions = 2 if ending == ".bias" else 3
    if role in _EXPERTS and names.experts and len(stored.shape) == dimensions:
        for expert, part in enumerate(split_first_axis(stored)):
            own = prefix + names.experts.format(expert) + getattr(names, _EXPERTS[role])
            yield own + ending, part
        return
    if role == _GATES_UPS and names.expert_gate and len(stored.shape) == 3:
        yield from _halves(prefix + names.experts, stored, names)
        return
    if role in _SHARED and names.shared_expert:
        yield prefix + names.shared_expert + _SHARED[role] + ending, stored
        return
    if role in HALVES and names.latent_up:
        yield f"{prefix}{names.latent_up}.{HALVES[role]}", stored
        return
    if role in _VECTORS and (whole := getattr(names, _VECTORS[role])):
        yield prefix + whole, stored
        return
    if names.mixer and (mixed := _part_name(role, ending, architecture.mixer)):
        if role == _BY_GROUP:
            stored = replace(stored, shape=(math.prod(stored.shape),))
        yield f"{prefix}{names.mixer}.{mixed}", stored
        return
    fields = architecture.roles.get(role) or FAMILY_ROLES.get(role, ())
    own = next(filter(None, (getattr(names, field) for field in fields)), "")
    # Falcon H1's norms before MLPs have no ending.
    own = own + (ending or ".weight") if own else _part_name(role, ending, architecture.parts)
    yield (prefix + own, stored) if own else (name, stored)


def _halves(place: str, stored: StoredTensor, names: Names) -> Iterator[tuple[str, StoredTensor]]:
    """Yield gate and up of every expert at `place`; nothing if they cannot be halved."""
    experts, rows, columns = stored.shape
    if rows % 2:
        return
    halves = replace(stored, shape=(2 * experts, rows // 2, columns))
    for index, part in enumerate(split_first_axis(halves)):
        field = names.expert_up if index % 2 else names.expert_gate
        yield f"{place.format(index // 2)}{field}.weight", part


def _part_name(role: str, ending: str, parts: Mapping[str, str]) -> str:
    """Return a tensor's name among `parts`, by role and ending or by role; "" if there is none."""
    if whole := parts.get(role + ending):
        return whole
    part = parts.get(role)
    return part + ending if part else ""


def _parse(name: str) -> tuple[int | None, str, str]:
    """Return layer (or None), role and ending of a tensor's name such as `blk.0.attn_q.weight`."""
    found = re.fullmatch(r"(?:blk\.(\d{1,6})\.)?([\w.]+?)(\.weight|\.bias)?", name)
    if found is None:
        return None, "", ""
    return (None if found[1] is None else int(found[1])), found[2], found[3] or ""
