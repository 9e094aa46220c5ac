"""Tensors that contain all experts of a layer, presented as one tensor for each expert.

Their first axis is the experts', so each expert is a contiguous byte range of the file, whatever
the tensor is: unquantised weights, biases, parts of a quantised matrix.
`mlp.experts.down_proj_bias` [experts, hidden] becomes `mlp.experts.0.down_proj_bias` [hidden] and
so on, and other code need not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.specs.decoder import DecoderSpec, Names

# Newer checkpoints' names for tensors of all experts, in families with a matrix per expert.
_GATES_UPS, _DOWNS = "gate_up_proj", "down_proj"
# torchao's names for the tensors of which such a one consists.
_TORCHAO = re.compile(rf"_({_GATES_UPS}|{_DOWNS})_(qdata|scale|zero_point)")


def split_experts(
    tensors: Mapping[str, StoredTensor], spec: DecoderSpec
) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors, with those of all experts split if the family has such.

    Raises ModelLoadError for a tensor with another number of experts than its layer.
    """
    names, mixtures = spec.names, [layer.experts for layer in spec.layers if layer.experts]
    if not mixtures or "{}." not in names.experts:
        return dict(tensors)
    count, place = mixtures[0].count, names.experts.replace("{}.", "")
    if names.expert_gate_up:
        own = "|".join(map(re.escape, (names.expert_gate_up, names.expert_down)))
        whole = re.compile(rf"(.*\.{re.escape(place)})(_?(?:{own})\w*)")
    else:
        own = "|".join((names.expert_gate, names.expert_up, names.expert_down))
        own = rf"{_GATES_UPS}|{_DOWNS}|{_TORCHAO.pattern}|(?:{own})\.\w+"
        whole = re.compile(rf"(.*\.{re.escape(place)})({own})")
    split: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        found = whole.fullmatch(name)
        whole_bias = len(stored.shape) == 2 and name.endswith(".bias")
        if (
            found
            and not _has_groups_first(name, stored, tensors)
            and (names.expert_gate_up or whole_bias or len(stored.shape) == 3)
        ):
            if stored.shape[:1] != (count,):
                raise ModelLoadError(
                    f"Tensor {name!r} in {stored.file} has shape {list(stored.shape)}, but "
                    f"config.json says that there are {count} experts."
                )
            for i, piece in enumerate(split_first_axis(stored)):
                parts = _name_parts(found[2], piece, names)
                split.update((f"{found[1]}{i}.{part}", each) for part, each in parts.items())
        else:
            split[name] = stored
    return split


def _has_groups_first(name: str, stored: StoredTensor, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether torchao's scales of gates and ups are [experts, groups, outputs].

    A gate's are not one after the other then: such tensors are refused for what they are.
    """
    codes = tensors.get(re.sub(rf"(_{_GATES_UPS})_(scale|zero_point)$", r"\1_qdata", name))
    return codes is not None and codes.shape[:2] != stored.shape[:2]


def flatten_vectors(
    tensors: Mapping[str, StoredTensor], spec: DecoderSpec
) -> dict[str, StoredTensor]:
    """Return the tensors with these as vectors: the experts' biases, for which ERNIE has [1,
    experts], and the scalar parameters of an activation.
    """
    names, flat = spec.names, dict(tensors)
    for name, stored in tensors.items():
        if names.choice_bias and name.endswith(f".{names.choice_bias}"):
            if stored.shape[:-1] == (1,):
                flat[name] = replace(stored, shape=stored.shape[1:])
        elif names.activation and f".{names.activation}." in name and not stored.shape:
            flat[name] = replace(stored, shape=(1,))
    return flat


def _name_parts(whole: str, piece: StoredTensor, names: Names) -> dict[str, StoredTensor]:
    """Return the matrices in one expert's part of the tensor `whole`, by its family's names.

    Gate rows come before up rows.
    """
    if names.expert_gate_up or "." in whole:  # by the family's names, as in Step 3.5
        return {whole: piece}
    part = _TORCHAO.fullmatch(whole)
    whole, end = (part[1], f"_weight_{part[2]}") if part else (whole, "weight")
    if whole == _DOWNS:
        return {f"{names.expert_down}.{end}": piece}
    rows, columns = piece.shape
    gate_up = (names.expert_gate, names.expert_up)
    halves = split_first_axis(replace(piece, shape=(2, rows // 2, columns)))
    return {f"{name}.{end}": half for name, half in zip(gate_up, halves, strict=True)}


def split_first_axis(stored: StoredTensor) -> Iterator[StoredTensor]:
    """Yield the pieces of a tensor along its first axis."""
    count = stored.shape[0]
    size = (stored.end - stored.first) // count
    for first in range(stored.first, stored.first + count * size, size):
        yield replace(stored, shape=stored.shape[1:], first=first, end=first + size)
