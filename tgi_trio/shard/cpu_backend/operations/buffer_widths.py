"""The widths, in features, of the buffers between operations, by a model's spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tgi_trio.model.matrices.decoder import layer_refs
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.mixers import DeltaRule
from tgi_trio.model.stages import Run
from tgi_trio.shard.cpu_backend.operations.channels import decays_width
from tgi_trio.shard.cpu_backend.operations.latents import LatentShape
from tgi_trio.shard.cpu_backend.operations.mixtures import pad_to_panel
from tgi_trio.shard.cpu_backend.operations.shared_blocks import opening_width
from tgi_trio.shard.cpu_backend.operations.states import mixed_width, projected_width


class BufferWidths(NamedTuple):
    """Features of the widest row of each buffer; 0: the model does not use it."""

    normed: int  # what a product reads behind a norm
    mlp: int  # inner width of a dense MLP
    inner: int  # the same, or of all experts of a token together
    gates: int  # gates of a delta rule's heads, computed in QKV
    projected: int
    decays: int
    mixed: int
    found: int  # heads of n-grams


def find_widths(model: DecoderSpec, run: Run, *, queries: int, apart: bool) -> BufferWidths:
    """Return the widths for the layers `run` of a model.

    `queries`: features of all heads' queries; `apart`: attention's output is in MIXED.
    """
    layers = [model.layers[index] for index in run.layers]
    mixing = [
        (refs, layer.mixer)
        for index, layer in zip(run.layers, layers, strict=True)
        if (refs := layer_refs(model, index).mixer)
    ]
    mixtures = [layer.experts for layer in layers if layer.experts]
    mixed = [mixed_width(refs) for refs, _ in mixing] + ([queries] if apart else [])
    projected = [projected_width(refs) for refs, _ in mixing]
    projected += [2 * (layer.mlp_width or model.mlp_width) for layer in layers if layer.sparsity]
    projected += [each.latent_width for each in mixtures]
    decays = [decays_width(refs, mixer) for refs, mixer in mixing]
    own = [layer.mixer for layer in layers if isinstance(layer.mixer, DeltaRule)]
    by_channel = [mixer for mixer in own if mixer.by_channel]
    decays += [mixer.value_heads * mixer.key_dim for mixer in by_channel]
    blocks = [layer.shared for layer in layers if layer.shared]
    for shared in blocks:
        mixed += [model.mlp_width, shared.rank, shared.attention_rank]
        projected += [opening_width(model, shared), 3 * shared.attention_rank]
    for latent, index in {(model.latent_of(layer), model.index_of(layer)) for layer in layers}:
        if latent is None:
            continue
        latents = LatentShape.of(model, latent, index)
        mixed += [model.hidden_size] if index is not None and index.reads_input else []
        mixed.append(latents.mixed_width)
        projected.append(latents.projected_width)
        decays.append(latents.late_gates)
    if model.norm_gate_rank:
        mixed.append(pad_to_panel(model.norm_gate_rank))
    if model.per_layer_inputs is not None:
        mixed.append(model.per_layer_inputs.width)
        projected.append(model.per_layer_inputs.width)
    if model.streams is not None:
        projected.append(model.streams.detour_rank)
    ngrams = [layer.ngrams for layer in layers if layer.ngrams]
    normed = [(2 if blocks else 1) * model.hidden_size]
    if model.gated_streams is not None:
        wide = model.gated_streams.count * model.hidden_size
        normed += [wide, *(each.width for each in ngrams)]
        mixed.append(model.gated_streams.rank)
        projected.append(wide + model.hidden_size)  # n-grams have keys and a value
    mlp = _widest((model.mlp_width, *(layer.mlp_width for layer in layers)))
    mixed += [queries] if model.names.attention_inner_norm else []
    mixed += [mlp] if model.names.mlp_inner_norm else []
    experts = [max(each.per_token * each.width, each.shared_width) for each in mixtures]
    return BufferWidths(
        normed=_widest(normed),
        mlp=mlp,
        inner=_widest((mlp, *experts)),
        gates=_widest(mixer.value_heads * mixer.value_dim for mixer in by_channel),
        projected=_widest(projected),
        decays=_widest(decays),
        mixed=_widest(mixed),
        found=_widest(each.heads for each in ngrams),
    )


def _widest(widths: Iterable[int]) -> int:
    return max(widths, default=0)
