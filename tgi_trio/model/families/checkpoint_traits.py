"""Properties of a model that its weights show, and its config.json does not state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor, read_headers, stored_names
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.published_names import rename_family
from tgi_trio.model.specs.decoder import DecoderSpec, Names
from tgi_trio.model.wrappers import rename_text

# By `quant_method`, what a matrix's codes are called.
_CODES_OF_EXLLAMA: Final = {"exl2": "q_weight", "exl3": "trellis"}


def fit_checkpoint(config: ModelConfig, spec: DecoderSpec) -> DecoderSpec:
    """Return `spec` adapted to the checkpoint: whether the head is tied, and the layout of experts.

    In many folders, the configs of a composite and of its text contradict each other on whether the
    head is tied. Without weights `spec` is returned unchanged: code that needs them will report it.
    """
    try:
        names = rename_text(dict.fromkeys(stored_names(config.folder)))
        names = rename_family(names, spec.family)
        spec = replace(spec, tied_head=not any(name.startswith(spec.names.head) for name in names))
        if any(layer.experts and layer.experts.gate_up == "halves" for layer in spec.layers):
            spec = _turn_experts(rename_text(read_headers(config.folder)), spec)
    except ModelLoadError:
        return spec
    return spec


def fit_exllama(config: ModelConfig, spec: DecoderSpec) -> DecoderSpec:
    """Return `spec` adapted to a checkpoint of exllamav2's or 3's, or unchanged: it is another's.

    They divide fused matrices, and quantise a head of its own where config.json says that the head
    is tied.
    """
    said = config.get("quantization_config")
    method = said.get("quant_method") if isinstance(said, dict) else None
    codes = _CODES_OF_EXLLAMA.get(str(method))
    if codes is None:
        return spec
    try:
        stored = stored_names(config.folder)
    except ModelLoadError:
        return spec
    names, layer = spec.names, spec.names.layer.format(0)
    if f"{layer}{names.query}.{codes}" in stored:
        spec = replace(spec, qkv_layout="separate", names=replace(spec.names, qkv=""))
    if f"{layer}{names.gate}.{codes}" in stored:
        spec = replace(spec, names=replace(spec.names, gate_up=""))
    return replace(spec, tied_head=spec.tied_head and f"{names.head}.{codes}" not in stored)


def name_layers(config: ModelConfig, layer: int, choices: Sequence[Names]) -> Names:
    """Return the first of `choices` whose norm after attention the checkpoint has in a layer.

    The first of all if it has none, or if there are no weights: code that needs them reports it.
    """
    try:
        stored = stored_names(config.folder)
    except ModelLoadError:
        return choices[0]

    def there(names: Names) -> bool:
        norm = f"{names.layer.format(layer)}{names.attention_post_norm}.weight"
        return norm in stored or norm.removeprefix(names.base) in stored

    return next(filter(there, choices), choices[0])


def choose_names(config: ModelConfig, choices: Mapping[str, Names]) -> Names:
    """Return the names whose key is a part of a name that the checkpoint has; else the first.

    Without weights they are the first: code that needs them will report it.
    """
    try:
        stored = stored_names(config.folder)
    except ModelLoadError:
        stored = frozenset()
    parts = {part for name in stored for part in name.split(".")}
    return next((own for key, own in choices.items() if key in parts), next(iter(choices.values())))


def is_stored(config: ModelConfig, names: Names, layer: int, name: str) -> bool:
    """Return whether the checkpoint has a layer's tensor, or no weights at all."""
    try:
        stored = rename_text(dict.fromkeys(stored_names(config.folder)))
    except ModelLoadError:
        return True
    whole = names.layer.format(layer) + name
    return whole in stored or whole.removeprefix(names.base) in stored


def _turn_experts(tensors: Mapping[str, StoredTensor], spec: DecoderSpec) -> DecoderSpec:
    """Return `spec` with experts as [outputs, inputs], if the checkpoint has them so.

    transformers writes them so since version 5; before that, and on the hub, they are [inputs,
    outputs].
    """
    layers = []
    for index, layer in enumerate(spec.layers):
        place = spec.names.layer.format(index) + spec.names.experts.replace("{}.", "")
        down, experts = tensors.get(place + spec.names.expert_down), layer.experts
        if down and experts and down.shape[1:] == (spec.hidden_size, experts.width):
            layer = replace(layer, experts=replace(experts, gate_up="rows"))
        layers.append(layer)
    return replace(spec, layers=tuple(layers))
