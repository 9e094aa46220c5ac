"""Models whose parts lie in repositories of their own, which their config.json names.

Ultravox has a projector, and sometimes a tower, in its own repository; the text is that of another
model, and so may be the tower. Source: fixie-ai's configuration class,
and vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.wrappers import TEXT_TYPES, text_type

ULTRAVOX: Final = "ultravox"


class Part(NamedTuple):
    """A part of a model."""

    field: str  # of config.json, which names its repository
    section: str  # of config.json, with what the repository's own config.json says
    names: tuple[str, ...]  # beginnings of names of its tensors that are read; ("",): all are


TEXT: Final = Part("text_model_id", "text_config", ("",))
# Of Whisper what hears, and not what writes.
TOWER: Final = Part("audio_model_id", "audio_config", ("model.encoder.", "encoder."))
PARTS: Final[Mapping[str, tuple[Part, ...]]] = {ULTRAVOX: (TEXT, TOWER)}  # by `model_type`
# What a text's own config.json says beside its nested one, if it is a composite's.
_BESIDE: Final = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")


def name_parts(config: Mapping[str, Any]) -> dict[Part, str]:
    """Return the parts of a model that lie elsewhere, and what config.json calls their places.

    Raises ModelLoadError for what is no name.
    """
    found: dict[Part, str] = {}
    for part in PARTS.get(str(config.get("model_type")), ()):
        name = config.get(part.field)
        if name is not None and not (isinstance(name, str) and name):
            raise ModelLoadError(
                f"config.json says {part.field} {name!r}, which names neither a folder nor a "
                "repository (owner/name)"
            )
        if name is not None:
            found[part] = name
    return found


def join_configs(
    whole: Mapping[str, Any], parts: Mapping[Part, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return one config.json for a model and its parts; `parts`: their own ones."""
    found = {name: value for name, value in whole.items() if name not in {p.field for p in parts}}
    for part, said in parts.items():
        found[part.section] = _take_text(said) if part is TEXT else dict(said)
    if TEXT in parts:  # whether its head is tied is the text's to say
        found.pop("tie_word_embeddings", None)
    return found


def _take_text(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a text: of one that is part of a composite, what that nests."""
    nested = said.get("text_config")
    kind = str(said.get("model_type"))
    if kind not in TEXT_TYPES or not isinstance(nested, Mapping):
        return dict(said)
    beside = {name: said[name] for name in _BESIDE if name in said}
    return {**beside, **nested, "model_type": text_type(kind, nested)}
