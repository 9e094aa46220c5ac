"""Gemma 4's assistants (Google 2026): a few layers that read the model's own keys and values.

Source: transformers' classes of the model types `gemma4_assistant` and `gemma4_unified_assistant`,
and its `SinglePositionMultiTokenCandidateGenerator`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.matrices.decoder import outer_refs
from tgi_trio.model.matrices.references import LinearRef, MatrixRef, whole_linear
from tgi_trio.model.specs.decoder import DecoderSpec, HeadSizes, LayerSpec
from tgi_trio.model.speculators.eagle import DRAFTED
from tgi_trio.model.speculators.spec import HeadsSpec, check_base
from tgi_trio.model.tensors import decoder_claims

# Model types, each with its text's.
_TYPES: Final = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
# Settings of Gemma 4's text that an assistant does not have.
_ABSENT: Final = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")
_ORDER: Final = "masked_embedding.token_ordering"


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantSpec(HeadsSpec):
    """Layers without keys and values: their queries attend to those of a Gemma 4 model.

    They read the last token's embedding and the model's hidden state behind the final norm, both of
    the model, and continue from their own drafts and states. Their queries are at the position of
    the last known token, whose keys and values do not exist yet; it does not move with the drafts.

    Roles: linears "entry" (from embedding and state to the layers' features), "exit" (from the
    layers' features to a state of the model), "clusters" (scores of groups of tokens) or, without
    groups, "head"; all others are called as their tensors, as are vectors. Table "head", of whose
    rows only some are multiplied, with groups.
    """

    decoder: DecoderSpec  # its layers' `reads_layer`: see `reading`
    clusters: int  # equal groups of tokens, whose ids `token_map` lists group by group; 0: none
    clusters_used: int  # groups with the best scores, whose tokens alone may be drafted

    def reading(self, base: DecoderSpec) -> DecoderSpec:
        """Return `decoder`, with layers that read the K and V of layers of a model.

        Each reads the last layer of its kind, with a window or without one, that has its own K and
        V. A query sees as many tokens before its own as the window has, as in transformers; all of
        them are known, so its window is said to be one longer, from the last of these tokens.
        Raises ModelLoadError if the model's K and V are others.
        """
        layers = []
        for index, layer in enumerate(self.decoder.layers):
            source, sizes = self._source(index, layer, base)
            window = layer.window + 1 if layer.window else 0
            layers.append(replace(layer, reads_layer=source, sizes=sizes, window=window))
        return replace(self.decoder, layers=tuple(layers))

    def _source(self, index: int, layer: LayerSpec, base: DecoderSpec) -> tuple[int, HeadSizes]:
        """Return the layer of the model whose K and V a layer reads, and the sizes of its heads."""
        dim, heads = self.decoder.sizes(layer).dim, self.decoder.heads
        keepers = [
            i
            for i, each in enumerate(base.layers)
            if each.attends and each.reads_layer is None and bool(each.window) == bool(layer.window)
        ]
        found = "none"
        if keepers and base.latent is None:
            sizes = base.sizes(base.layers[keepers[-1]])
            if (sizes.dim, sizes.value_dim) == (dim, dim) and heads % sizes.kv_heads == 0:
                return keepers[-1], replace(sizes, heads=0)  # as many queries as its own
            found = f"{sizes.kv_heads} of {sizes.dim}"
        raise ModelLoadError(
            f"the assistant in {self.folder} was made for another model: its layer {index} has "
            f"{heads} heads of {dim} for keys and values of the model's last layer "
            f"{'with' if layer.window else 'without'} a window, and there the model has {found}"
        )


def is_assistant(values: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a folder holds an assistant of Gemma 4."""
    return values.get("model_type") in _TYPES


def read_assistant(
    folder: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    *,
    hidden: int,
    vocabulary: int,
) -> AssistantSpec:
    """Return a folder's assistant, for a model with these numbers of hidden features and tokens.

    Raises ModelLoadError, naming what is wrong.
    """
    decoder = _decoder(folder, values)
    check_base(
        folder, "backbone_hidden_size", _count(folder, values, "backbone_hidden_size"), hidden
    )
    check_base(folder, "vocab_size", decoder.vocab_size, vocabulary)
    size, clusters, used = decoder.hidden_size, *_clusters(folder, values, vocabulary)
    linears = {
        "entry": _matrix("pre_projection", size, 2 * hidden),
        "exit": _matrix("post_projection", hidden, size),
    }
    if clusters:
        linears["clusters"] = _matrix("masked_embedding.centroids", clusters, size)
    claims = decoder_claims(decoder)
    shapes = claims.needed.items()
    own = {role: ref.pieces[0].matrix.name for role, ref in linears.items()}
    read = [*own.values(), *claims.needed, *([_ORDER] if clusters else [])]
    outer, layers = outer_refs(decoder), dict(_matrices(decoder))
    head = outer.head.pieces[0].matrix
    if not clusters:
        linears["head"] = whole_linear(head)
    for name in {head.name, outer.embedding.pieces[0].matrix.name}:
        layers.pop(name)
    if others := sorted(tensors.keys() - {*read, *claims.known}):
        raise ModelLoadError(
            f"Tensor {others[0]!r} in {tensors[others[0]].file} is no part of an assistant of "
            "Gemma 4, as transformers writes it"
        )
    return AssistantSpec(
        folder=folder,
        heads=DRAFTED,
        linears=linears | layers,
        vectors={name: (name, shape[0]) for name, shape in shapes if len(shape) == 1},
        tables={"head": head} if clusters else {},
        tensors=tuple(read),
        token_map=_ORDER if clusters else "",
        decoder=decoder,
        clusters=clusters,
        clusters_used=used,
    )


def _decoder(folder: Path, values: Mapping[str, Any]) -> DecoderSpec:
    """Return the spec of the layers; raises ModelLoadError for what assistants do not have."""
    for name in _ABSENT:
        if values.get(name, name == _ABSENT[0]):  # the first has another default
            raise ModelLoadError(
                f"{folder / 'config.json'} says {name} {values.get(name)!r}; an assistant of "
                "Gemma 4 has none"
            )
    model_type = _TYPES[str(values["model_type"])]
    own = {**values, "model_type": model_type, "num_kv_shared_layers": 0}
    own.pop("text_config", None)  # whose values these are
    config = ModelConfig(
        folder=folder,
        model_type=model_type,
        dtype=None,
        vocab_size=_count(folder, values, "vocab_size"),
        max_positions=_count(folder, values, "max_position_embeddings"),
        eos_ids=(),
        values=own,
    )
    spec = decoder_spec(config)
    if spec is None:
        raise ModelLoadError(
            f"{folder / 'config.json'} says use_bidirectional_attention "
            f"{values.get('use_bidirectional_attention')!r}, which is not served"
        )
    layers = (replace(layer, reads_layer=0, keys_as_values=False) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def _clusters(folder: Path, values: Mapping[str, Any], vocabulary: int) -> tuple[int, int]:
    """Return the number of clusters of tokens, and how many are used for a draft; 0, 0: none."""
    if not values.get("use_ordered_embeddings"):
        return 0, 0
    count = _count(folder, values, "num_centroids")
    used = _count(folder, values, "centroid_intermediate_top_k")
    if vocabulary % count or used > count:
        raise ModelLoadError(
            f"{folder / 'config.json'} says that a draft is one of the tokens of {used} of {count} "
            f"equal groups (centroid_intermediate_top_k, num_centroids), and there are {vocabulary}"
        )
    return count, used


def _matrices(decoder: DecoderSpec) -> Iterator[tuple[str, LinearRef]]:
    """Yield all matrices, by name."""
    for name, shape in decoder_claims(decoder).needed.items():
        if len(shape) == 2:
            yield name, whole_linear(MatrixRef(name, *shape))


def _matrix(name: str, rows: int, columns: int) -> LinearRef:
    return whole_linear(MatrixRef(f"{name}.weight", rows, columns))


def _count(folder: Path, values: Mapping[str, Any], name: str) -> int:
    found = values.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ModelLoadError(
            f"{folder / 'config.json'} says {name} {found!r}; an assistant of Gemma 4 needs a "
            "number above 0"
        )
    return found
