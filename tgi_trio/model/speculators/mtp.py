"""Finds the layers of a checkpoint that draft further tokens, and checks their tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import stored_names
from tgi_trio.model.checkpoint_tensors import gguf_files, read_tensors
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.formats import check_dtypes
from tgi_trio.model.mtp_layers import LAYOUTS, MtpSpec
from tgi_trio.model.published_names import rename_family
from tgi_trio.model.quantised.gguf_layout import GgufLayout
from tgi_trio.model.quantised.recognise import find_layout
from tgi_trio.model.quantised.stored import StoredMatrices, check_stored
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.tensors import list_matrices, list_shapes
from tgi_trio.model.wrappers import rename_text


def count_mtp(config: ModelConfig) -> int:
    """Return how many such layers a checkpoint has; raises what `decoder_spec` does."""
    spec = decoder_spec(config) if config.text_type in LAYOUTS else None
    return 0 if spec is None else len(find_mtp(config, spec))


def find_mtp(config: ModelConfig, spec: DecoderSpec) -> tuple[MtpSpec, ...]:
    """Return the layers of a checkpoint that draft further tokens, () if there are none."""
    layout = LAYOUTS.get(config.text_type)
    if layout is None:
        return ()
    try:
        stored = _stored_names(config)
    except ModelLoadError:  # there are no weights: code that needs them reports it
        return ()
    return tuple(layout.spec(spec, i) for i in range(layout.count(spec, stored)))


def _stored_names(config: ModelConfig) -> Collection[str]:
    if gguf_files(config.folder):
        return read_tensors(config)
    names = rename_text(dict.fromkeys(stored_names(config.folder)))
    return rename_family(names, config.text_type)


def need_mtp(config: ModelConfig, spec: DecoderSpec) -> tuple[MtpSpec, ...]:
    """Return `find_mtp`; raises ModelLoadError if there are none, or as `check_mtp` does."""
    found = find_mtp(config, spec)
    if not found:
        raise ModelLoadError(no_mtp(config.folder))
    check_mtp(config, found)
    return found


def no_mtp(folder: Path) -> str:
    """Return the refusal to draft by layers that a checkpoint does not have."""
    return (
        f"`drafter` mtp: {folder} has no layers that draft further tokens, by names that are "
        "known; leave it out, and `speculate` drafts from the text"
    )


def check_mtp(config: ModelConfig, layers: Sequence[MtpSpec]) -> None:
    """Raise ModelLoadError unless a checkpoint has every tensor of these layers, readable."""
    tensors = read_tensors(config)
    layout = GgufLayout() if gguf_files(config.folder) else find_layout(config)
    parts = [part for layer in layers for part in layer.parts()]
    stored = StoredMatrices()
    if layout is not None:
        stored = check_stored(config, layout, list_matrices(parts), "", tensors)
    shapes = {n: shape for n, shape in list_shapes(parts).items() if n not in stored.matrices}
    for name, shape in shapes.items():
        found = tensors.get(name)
        if found is None or found.shape != shape:
            has = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise ModelLoadError(
                f"Tensor {name!r} of the layers that draft further tokens {has} in the checkpoint "
                f"{config.folder}, which needs it as {list(shape)}; --drafter ngram drafts "
                "without them."
            )
    check_dtypes({name: tensors[name] for name in shapes})
