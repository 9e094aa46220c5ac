"""The types of projectors that are read, by their names in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.gguf.files import GgufModel, read_model
from tgi_trio.model.gguf.projectors.gemma4 import GEMMA4
from tgi_trio.model.gguf.projectors.glm import GLM4V
from tgi_trio.model.gguf.projectors.internvl import INTERNVL
from tgi_trio.model.gguf.projectors.lfm2 import LFM2
from tgi_trio.model.gguf.projectors.llama4 import LLAMA4
from tgi_trio.model.gguf.projectors.pixtral import PIXTRAL
from tgi_trio.model.gguf.projectors.projector import Projector
from tgi_trio.model.gguf.projectors.qwen import QWEN2, QWEN3, QWEN25
from tgi_trio.model.gguf.projectors.siglip import GEMMA3, IDEFICS3

ARCHITECTURE: Final = "clip"  # of all projectors

PROJECTORS: Final[Mapping[str, Projector]] = {
    "gemma3": GEMMA3,
    "gemma4v": GEMMA4,
    "glm4v": GLM4V,
    "idefics3": IDEFICS3,
    "internvl": INTERNVL,
    "lfm2": LFM2,
    "llama4": LLAMA4,
    "pixtral": PIXTRAL,
    "qwen2vl_merger": QWEN2,
    "qwen2.5vl_merger": QWEN25,
    "qwen3vl_merger": QWEN3,
}


def is_projector(model: GgufModel) -> bool:
    """Return whether a file is a projector, of whatever type."""
    return model.architecture == ARCHITECTURE


def read_projector(file: Path) -> tuple[GgufModel, Projector]:
    """Return a projector's header, and what is known of its type.

    Raises ModelLoadError for a file that is none, that does not see, and for a type that is not
    read.
    """
    model = read_model([file])
    if not is_projector(model):
        raise ModelLoadError(
            f"{file} is no projector but a model of the architecture {model.architecture!r}: "
            "--mmproj takes a file with the tower of a model that sees, which is called "
            "mmproj-....gguf as a rule"
        )
    name = str(model.get("vision.projector_type") or model.get("projector_type") or "")
    served = f"served are {', '.join(sorted(PROJECTORS))}"
    if not model.get("has_vision_encoder", not hears(model)):
        raise ModelLoadError(
            f"{file} is a projector of sounds alone, {name!r}, which are not served of GGUF files; "
            f"{served}"
        )
    if name not in PROJECTORS:
        raise ModelLoadError(
            f"{file} is a projector of the type {name!r}, which is not read here; {served}. "
            "--no-mmproj serves the text alone"
        )
    return model, PROJECTORS[name]


def hears(model: GgufModel) -> bool:
    """Return whether a projector has a part for sounds."""
    return bool(model.get("has_audio_encoder"))
