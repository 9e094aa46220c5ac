"""The files of a composite model's folder that a text and a projector make together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.header import refusing
from tgi_trio.model.gguf.projectors.projector import (
    Kind,
    Projector,
    find_deep_blocks,
    read_normal,
    read_shape,
)
from tgi_trio.model.gguf.projectors.stored_parameters import list_parameters
from tgi_trio.model.gguf.stated import Values

# What config.json says of the whole model.
_OF_WHOLE: Final = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
_SECTIONS: Final = "rope.dimension_sections"


def make_composite(
    text: GgufModel, config: Values, tower: GgufModel, projector: Projector, file: Path
) -> dict[str, Mapping[str, Any]]:
    """Return config.json and the settings of images, by the names of their files.

    `config`: that of the text alone; `file`: the projector's. Raises ModelLoadError where the
    projector is not one of this text, or is damaged.
    """
    kind = projector.kinds.get(text.architecture)
    if kind is None:
        raise ModelLoadError(
            f"{file} is a projector for texts of the architecture "
            f"{' or '.join(sorted(projector.kinds))}, and the model's is {text.architecture!r}: "
            "--mmproj takes the projector of the same model, --no-mmproj serves the text alone"
        )
    with refusing(file):
        _check_length(tower, projector, config, file)
        list_parameters(tower, projector)
        own = _text(text, config, kind)
        _check_deep(text, tower)
        whole: Values = {"model_type": kind.model_type} | projector.describe(tower, own)
        whole |= {key: config[key] for key in _OF_WHOLE if key in config}
        normal = read_normal(tower)
        found: dict[str, Mapping[str, Any]] = {
            "config.json": whole | {"text_config": own | whole.get("text_config", {})},
            "preprocessor_config.json": projector.process(tower) | normal,
        }
        if projector.process_whole is not None:
            found["processor_config.json"] = projector.process_whole(tower)
        if projector.process_video is not None:
            found["video_preprocessor_config.json"] = projector.process_video(tower) | normal
    return found


def _check_length(tower: GgufModel, projector: Projector, config: Values, file: Path) -> None:
    name, axis = projector.output
    length = read_shape(tower, name, 2)[axis]
    if length != config["hidden_size"]:
        raise ModelLoadError(
            f"{file} makes features of {length} numbers, and embeddings of the model have "
            f"{config['hidden_size']}: --mmproj takes the projector of the same model, of the same "
            "size"
        )


def _text(text: GgufModel, config: Values, kind: Kind) -> Values:
    """Return what config.json says of the text, under the type that it has in this composite."""
    own = {
        key: value
        for key, value in config.items()
        if key not in _OF_WHOLE[:2] and value is not None  # which transformers reads as stated
    }
    if kind.text_type:
        own["model_type"] = kind.text_type
    sections = text.get(_SECTIONS)
    if isinstance(sections, list) and any(sections):
        scaling = own.get("rope_scaling") or {"rope_type": "default"}
        own["rope_scaling"] = {**scaling, "mrope_section": sections[:3]}
    return own


def _check_deep(text: GgufModel, tower: GgufModel) -> None:
    """Raise ValueError where the two differ in how many features are added behind layers."""
    added, deep = text.get("n_deepstack_layers"), len(find_deep_blocks(tower))
    if isinstance(added, int) and added != deep:
        raise ValueError(
            f"features of {deep} of its blocks are added behind layers, and those of {added} are "
            "by the model"
        )
