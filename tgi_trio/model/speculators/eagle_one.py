"""The files of EAGLE and EAGLE-2: those of its authors, and those that vLLM and SGLang read.

A decoder layer without a norm before its attention reads a projection of the last token's embedding
and the model's hidden state behind the final norm; the state that it predicts goes to the model's
head. EAGLE-2 has other trees of drafts, and the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor, read_headers
from tgi_trio.model.matrices.references import whole_linear
from tgi_trio.model.speculators.eagle import (
    DRAFTED,
    NamedTensors,
    find_names,
    layer_config,
    layer_linears,
    read_layer,
)
from tgi_trio.model.speculators.spec import EagleSpec, check_base

# Copies of the model's own, and what older versions of transformers stored.
_UNREAD: Final = ("embed_tokens.weight", "lm_head.weight")
_BUFFER: Final = "rotary_emb.inv_freq"


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleOneSpec(EagleSpec):
    """EAGLE (Li and others 2024, arXiv 2401.15077): a layer that predicts the model's last state.

    Roles: as in `EagleSpec`, but "fuse" reads an embedding and a state, "qkv" the result; the only
    vector is "mlp norm". Embedding and head are the model's.
    """

    def taps(self, layers: int) -> tuple[int, ...]:
        """Return the state that leaves the last layer."""
        return (layers,)


def is_eagle_one(values: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a folder holds an EAGLE drafter.

    The authors' config.json is that of a Llama of one layer, so the tensors have to tell.
    """
    if values.get("speculators_model_type") or values.get("draft_vocab_size"):
        return False
    named = bool(find_names(values, "eagle"))
    if not named and values.get("num_hidden_layers") != 1:
        return False
    try:
        names = {name.removeprefix("model.") for name in read_headers(folder)}
    except ModelLoadError:  # a pickle, for instance, which is yet to be converted
        return named
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names


def read_eagle_one(
    folder: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    *,
    hidden: int,
    vocabulary: int,
) -> EagleOneSpec:
    """Return a folder's drafter, for a model with these numbers of hidden features and tokens.

    Raises ModelLoadError, naming what is wrong.
    """
    nested = values.get("model")  # in files that were converted for vLLM
    config = layer_config(folder, {**values, **(nested if isinstance(nested, dict) else {})})
    layer = read_layer(config)
    check_base(folder, "hidden_size", layer.hidden_size, hidden)
    if config.vocab_size:
        check_base(folder, "vocab_size", config.vocab_size, vocabulary)
    named = NamedTensors({name: tensor for name, tensor in tensors.items() if _BUFFER not in name})
    linears = {
        "fuse": whole_linear(named.matrix("fc", hidden, 2 * hidden)),
        **layer_linears(named, layer, inputs=hidden),
    }
    vectors = {"mlp norm": (f"{named.layer}post_attention_layernorm.weight", hidden)}
    read = named.list_read(linears, vectors)
    named.refuse_others(read, _UNREAD, "an EAGLE drafter of one layer of Llama's shape")
    return EagleOneSpec(
        folder=folder,
        heads=DRAFTED,
        linears=linears,
        vectors=vectors,
        tensors=tuple(read),
        layer=layer,
        max_positions=config.max_positions,
        norms_residual=False,
        norms_output=False,
        stated_taps=(),
    )
