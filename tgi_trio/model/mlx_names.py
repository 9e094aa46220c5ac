"""Names and layouts of tensors in checkpoints of mlx-lm, undone.

mlx-lm renames and reshapes tensors when it reads a model, and writes them so, quantised or not:
all experts of a layer are one tensor, the expansion of latents is divided, taps of convolutions
are in the middle, some norms have 1 added. Sources: `sanitize` in its model files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import Change, StoredTensor
from tgi_trio.model.specs.decoder import DecoderSpec

# Its modules of all experts of a layer, and the fields of `Names` for their parts.
_EXPERTS: Final = re.compile(
    r"(?:.*\.)?(?:switch_mlp|switch_glu|experts)\.(gate_proj|up_proj|down_proj|fc1|fc2)\.(\w+)"
)
_FIELDS: Final = {
    "gate_proj": "expert_gate",
    "up_proj": "expert_up",
    "down_proj": "expert_down",
    "fc1": "expert_up",
    "fc2": "expert_down",
}
# The halves of the expansion of latents, behind the name of its module: [heads * latent, key], of
# each head transposed, and [heads * value, latent].
KEYS, VALUES = "keys.weight", "values.weight"
_HALVES: Final = {"embed_q": KEYS, "unembed_out": VALUES}
_HALF: Final = re.compile(r"(.*\.)(embed_q|unembed_out)\.(\w+)")
_CONVOLUTION: Final = re.compile(r"conv(_?1d)?\.(conv\.)?weight$")

# By family: what is replaced in names.
_RENAMED: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "exaone_moe": ((r"\.mlp\.gate\.e_score_", ".mlp.e_score_"),),
    "gpt_neox": (
        (r"^model\.embed_out\.", "embed_out."),
        (r"^model\.h\.", "gpt_neox.layers."),
        (r"^model\.", "gpt_neox."),
    ),
    "gptj": ((r"^model\.", "transformer."),),
    "granitemoehybrid": (
        (r"(?<!shared_)\bmlp\.gate_proj\.", "shared_mlp.gate."),
        (r"(?<!shared_)\bmlp\.up_proj\.", "shared_mlp.up."),
        (r"(?<!shared_)\bmlp\.down_proj\.", "shared_mlp.output_linear."),
    ),
    "kimi_linear": (
        (r"\.mlp\.(shared_experts|gate)\.", r".block_sparse_moe.\1."),
        (r"\.mlp\.e_score_", ".block_sparse_moe.gate.e_score_"),
        (r"\.([qkv])_conv\.conv\.", r".\1_conv1d."),
    ),
    "laguna": (
        (r"\.mlp\.gate\.proj\.", ".mlp.gate."),
        (r"\.mlp\.gate\.e_score_", ".mlp.experts.e_score_"),
    ),
    "lfm2_moe": (
        (r"\.feed_forward\.gate_proj\.", ".feed_forward.w1."),
        (r"\.feed_forward\.up_proj\.", ".feed_forward.w3."),
        (r"\.feed_forward\.down_proj\.", ".feed_forward.w2."),
    ),
    "step3p5": (
        (r"\.mlp\.gate\.gate\.", ".moe.gate."),
        (r"\.mlp\.gate\.router_bias$", ".moe.router_bias"),
        (r"\.mlp\.share_expert\.", ".share_expert."),
    ),
}
# Families whose norms have 1 added, in checkpoints with such convolutions or experts.
_RAISED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        r"(\.(input|post_attention)_layernorm|^model\.norm|\.[qk]_norm)\.weight$",
    ),
    "step3p5": r"norm\.weight$",
}
# Families of which mlx-lm writes something that cannot be undone: a name that shows it, and why.
LOST: Final[Mapping[str, tuple[str, str]]] = {
    "ernie4_5_moe": (".switch_mlp.", "the biases by which experts are chosen are left out"),
    "gpt2": ("model.h.0.attn.c_attn.weight", "matrices are turned around"),
    "olmo": ("model.transformer.wte.weight", "layers have matrices that are joined"),
}


def undo_mlx(
    tensors: Mapping[str, StoredTensor], spec: DecoderSpec, family: str
) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors by the family's names, and as it has them.

    `family`: the text's type. Experts stay together: `split_experts` divides them. Checkpoints of
    others are unchanged. Raises ModelLoadError for one in which mlx-lm has changed what cannot be
    undone.
    """
    _refuse_lost(tensors, family)
    is_moved = any(_is_moved(name, stored) for name, stored in tensors.items())
    is_stacked = any(".switch_" in name for name in tensors)
    raised = _RAISED.get(family) if is_moved or is_stacked else None
    changes = [(re.compile(old), new) for old, new in _RENAMED.get(family, ())]
    undone: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        name = _expert_name(name, spec)
        for old, new in changes:
            name = old.sub(new, name)
        if raised and re.search(raised, name):
            stored = replace(stored, change=Change(plus_one=True))
        elif _is_moved(name, stored):
            channels, taps, _ = stored.shape
            stored = replace(stored, shape=(channels, 1, taps))
        undone.update(_as_stored(name, stored, spec))
    return undone


def has_experts_apart(names: Iterable[str]) -> bool:
    """Return whether a checkpoint has gates and ups of experts in two tensors, as mlx-lm has them
    for families that have one.
    """
    return any(_EXPERTS.fullmatch(name) or ".ffn.experts.0." in name for name in names)


def _is_moved(name: str, stored: StoredTensor) -> bool:
    """Return whether a tensor is a convolution [channels, taps, 1], not [channels, 1, taps]."""
    moved = len(stored.shape) == 3 and stored.shape[2] == 1 != stored.shape[1]
    return moved and _CONVOLUTION.search(name) is not None


def _expert_name(name: str, spec: DecoderSpec) -> str:
    """Return the name of a tensor of all experts, as the family would have it."""
    found, names = _EXPERTS.fullmatch(name), spec.names
    layer = re.match(re.escape(names.layer).replace(r"\{\}", r"(\d+)"), name)
    if not found or not layer or "{}." not in names.experts or names.expert_gate_up:
        return name
    place = names.layer.format(layer[1]) + names.experts.replace("{}.", "")
    return f"{place}{getattr(names, _FIELDS[found[1]])}.{found[2]}"


def _as_stored(
    name: str, stored: StoredTensor, spec: DecoderSpec
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a tensor; the halves of an expansion by its name, gates and ups in one as two."""
    names = spec.names
    if names.latent_up and (half := _HALF.fullmatch(name)) and len(stored.shape) == 3:
        module = names.latent_up.rpartition(".")[2]
        heads, rows, columns = stored.shape
        part = _HALVES[half[2]].removesuffix("weight")
        yield f"{half[1]}{module}.{part}{half[3]}", replace(stored, shape=(heads * rows, columns))
    elif names.gate == "shared_mlp.gate" and ".shared_mlp.input_linear." in name:
        size, rows = (stored.end - stored.first) // 2, stored.shape[0] // 2
        for index, part in enumerate(("gate", "up")):
            first = stored.first + index * size
            own = replace(stored, shape=(rows, *stored.shape[1:]), first=first, end=first + size)
            yield name.replace(".input_linear.", f".{part}."), own
    else:
        yield name, stored


def _refuse_lost(tensors: Mapping[str, StoredTensor], family: str) -> None:
    part, why = LOST.get(family, ("", ""))
    if part and (name := next((name for name in tensors if part in name), None)):
        raise ModelLoadError(
            f"Tensor {name!r} in {tensors[name].file} is of mlx-lm's form of model type "
            f"{family!r}, which is not read: {why}. Take the model's original checkpoint."
        )
