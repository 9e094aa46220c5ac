"""Checkpoints in the form in which mlx-lm writes them: what its `sanitize` does to a family's.

Written from its sources, since its packages are not where most tests run; `shard/made_by_tools`
holds what is read to mlx-lm itself where it is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Form = Callable[[Tensors], Tensors]

_CONVOLUTION = re.compile(r"conv1d\.weight|conv\.conv\.weight|conv_1d\.weight")


def stack(tensors: Tensors, old: str, new: str, names: dict[str, str] | None = None) -> Tensors:
    """Stack what `old` + number + "." + part + "." + ending names, as `new` + part + "." + ending.

    `names`: of parts, where they differ.
    """
    pattern = re.compile(rf"(.*\.){re.escape(old)}(\d+)\.(\w+)\.(\w+)")
    groups: dict[str, dict[int, torch.Tensor]] = {}
    kept: Tensors = {}
    for name, tensor in tensors.items():
        found = pattern.fullmatch(name)
        if found is None:
            kept[name] = tensor
            continue
        part = (names or {}).get(found[3], found[3])
        groups.setdefault(f"{found[1]}{new}{part}.{found[4]}", {})[int(found[2])] = tensor
    for name, parts in groups.items():
        kept[name] = torch.stack([parts[index] for index in range(len(parts))])
    return kept


def divide(tensors: Tensors, whole: str, new: str, *, turned: bool = False) -> Tensors:
    """Divide gates and ups of all experts, rows or (`turned`) columns of one tensor."""
    kept: Tensors = {}
    for name, tensor in tensors.items():
        place, found, _ = name.partition(whole)
        if not found:
            kept[name] = tensor
            continue
        halves = (tensor.mT if turned else tensor).chunk(2, dim=1)
        for part, half in zip(("gate_proj", "up_proj"), halves, strict=True):
            kept[f"{place}{new}{part}.weight"] = half.contiguous()
    return kept


def rename(tensors: Tensors, *changes: tuple[str, str]) -> Tensors:
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in changes:
            name = re.sub(old, new, name)
        renamed[name] = tensor
    return renamed


def move_taps(tensors: Tensors) -> Tensors:
    return {
        name: tensor.moveaxis(2, 1).contiguous() if _CONVOLUTION.search(name) else tensor
        for name, tensor in tensors.items()
    }


def raise_norms(tensors: Tensors) -> Tensors:
    norm = re.compile(r"(\.(input|post_attention)_layernorm|^model\.norm|\.[qk]_norm)\.weight$")
    return {name: t + 1 if norm.search(name) else t for name, t in tensors.items()}


def halve_latents(tensors: Tensors, heads: int, key: int) -> Tensors:
    kept: Tensors = {}
    for name, tensor in tensors.items():
        place, found, _ = name.partition("kv_b_proj.weight")
        if not found:
            kept[name] = tensor
            continue
        by_head = tensor.reshape(heads, -1, tensor.shape[1])
        kept[f"{place}embed_q.weight"] = by_head[:, :key].mT.contiguous()
        kept[f"{place}unembed_out.weight"] = by_head[:, key:].contiguous()
    return kept


def write_as_mlx(source: Path, folder: Path, form: Form) -> Path:
    """Write a copy of a checkpoint in such a form."""
    folder.mkdir()
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = {name: t.clone() for name, t in form(load_file(source / "model.safetensors")).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


_W = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _experts(tensors: Tensors) -> Tensors:
    return stack(tensors, "mlp.experts.", "mlp.switch_mlp.")


def _mixtral(tensors: Tensors) -> Tensors:
    return stack(tensors, "block_sparse_moe.experts.", "block_sparse_moe.switch_mlp.", _W)


def _latents(tensors: Tensors) -> Tensors:
    return halve_latents(_experts(tensors), heads=4, key=8)


def _granite(tensors: Tensors) -> Tensors:
    place = "block_sparse_moe."
    divided = divide(tensors, f"{place}input_linear.weight", f"{place}switch_mlp.")
    moved = rename(divided, (r"output_linear\.weight", "switch_mlp.down_proj.weight"))
    return move_taps(
        rename(moved, (r"shared_mlp\.switch_mlp\.down_proj", "shared_mlp.output_linear"))
    )


def _gpt_oss(tensors: Tensors) -> Tensors:
    kept: Tensors = {}
    for name, t in tensors.items():
        place, found, ending = name.partition("gate_up_proj")
        if found:
            turned = t if ending else t.mT
            for i, part in enumerate(("gate_proj", "up_proj")):
                own = turned[:, i::2].contiguous()
                kept[f"{place}{part}.{'bias' if ending else 'weight'}"] = own
        elif name.endswith("experts.down_proj"):
            kept[f"{name}.weight"] = t.mT.contiguous()
        else:
            kept[name.replace("down_proj_bias", "down_proj.bias")] = t
    return kept


def _llama4(tensors: Tensors) -> Tensors:
    place = "feed_forward.experts."
    divided = divide(tensors, f"{place}gate_up_proj", place, turned=True)
    return {
        f"{name}.weight" if name.endswith("experts.down_proj") else name: (
            t.mT.contiguous() if name.endswith("experts.down_proj") else t
        )
        for name, t in divided.items()
    }


def _lfm2(tensors: Tensors) -> Tensors:
    stacked = stack(tensors, "feed_forward.experts.", "feed_forward.switch_mlp.", _W)
    pairs = ((rf"\.feed_forward\.{old}\.", f".feed_forward.{new}.") for old, new in _W.items())
    return move_taps(rename(stacked, *pairs))


def _nemotron(tensors: Tensors) -> Tensors:
    names = {"up_proj": "fc1", "down_proj": "fc2"}
    return move_taps(stack(tensors, "mixer.experts.", "mixer.switch_mlp.", names))


def _kimi(tensors: Tensors) -> Tensors:
    stacked = stack(tensors, "block_sparse_moe.experts.", "mlp.switch_mlp.", _W)
    renamed = rename(
        stacked,
        (r"block_sparse_moe\.gate\.e_score", "mlp.e_score"),
        (r"block_sparse_moe\.", "mlp."),
    )
    moved = rename(move_taps(renamed), (r"\.([qkv])_conv1d\.weight", r".\1_conv.conv.weight"))
    return halve_latents(moved, heads=4, key=8)


def _laguna(tensors: Tensors) -> Tensors:
    return rename(
        _experts(tensors),
        (r"mlp\.gate\.weight", "mlp.gate.proj.weight"),
        (r"mlp\.experts\.e_score", "mlp.gate.e_score"),
    )


def _dbrx(tensors: Tensors) -> Tensors:
    kept: Tensors = {}
    for name, t in tensors.items():
        place, found, part = name.partition("experts.mlp.")
        if not found:
            kept[name] = t
            continue
        for expert, own in enumerate(t.chunk(4)):
            own = own.mT if part == "w2" else own
            kept[f"{place}experts.{expert}.{part}.weight"] = own.contiguous()
    return kept


# Families whose checkpoints mlx-lm changes, each in its own way.
FORMS: dict[str, Form] = {
    "afmoe": lambda t: stack(t, "mlp.experts.", "mlp.experts."),
    "dbrx": _dbrx,
    "deepseek_v3": _latents,
    "exaone_moe": lambda t: rename(_experts(t), (r"\.mlp\.e_score", ".mlp.gate.e_score")),
    "gpt_neox": lambda t: rename(
        {f"model.{name}": tensor for name, tensor in t.items()},
        (r"\.gpt_neox\.layers\.", ".h."),
        (r"\.gpt_neox\.", "."),
    ),
    "gpt_oss": _gpt_oss,
    "gptj": lambda t: rename(t, (r"^transformer\.", "model.")),
    "granitemoe": _granite,
    "granitemoehybrid": _granite,
    "kimi_linear": _kimi,
    "laguna": _laguna,
    "lfm2": move_taps,
    "lfm2_moe": _lfm2,
    "llama4_text": _llama4,
    "mamba": move_taps,
    "minimax_m2": _mixtral,
    "mixtral": _mixtral,
    "nemotron_h": _nemotron,
    "qwen3_moe": _experts,
    "qwen3_next": lambda t: raise_norms(move_taps(_experts(t))),
    "recurrent_gemma": move_taps,
}
