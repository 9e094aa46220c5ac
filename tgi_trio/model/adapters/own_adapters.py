"""Adapters that a model brings along, for prompts that hold what it sees or hears.

Such a model is its base for every other prompt. Sources: `generate` of transformers' Granite
Speech, the model card of Phi-4-multimodal.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import CONFIG
from tgi_trio.model.adapters.files import read_adapter
from tgi_trio.model.adapters.sites import map_adapter
from tgi_trio.model.specs.decoder import DecoderSpec


class OwnAdapter(NamedTuple):
    """Where one is, and which prompts are computed with it."""

    kind: str  # what a prompt has to hold: as `router.media.kinds.Kind`
    folder: str = ""  # below the model's own
    # What config.json says of it: False where there is none; "": it always is.
    flag: str = ""


_GRANITE: Final = (OwnAdapter("audio", flag="has_lora_adapter"),)
# By `model_type` in config.json. Of several that a prompt asks for, the first one counts.
OWN_ADAPTERS: Final[Mapping[str, tuple[OwnAdapter, ...]]] = {
    "granite_speech": _GRANITE,
    "granite_speech_plus": _GRANITE,
    "phi4_multimodal": (OwnAdapter("image", "vision-lora"), OwnAdapter("audio", "speech-lora")),
}


def find_own_adapters(config: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Return the folder of each adapter that the model in `folder` brings along, by its kind.

    `config`: its config.json.
    """
    rows = OWN_ADAPTERS.get(str(config.get("model_type")), ())
    return {
        row.kind: folder / row.folder for row in rows if not row.flag or config.get(row.flag, True)
    }


def check_own_adapter(folder: Path, spec: DecoderSpec) -> None:
    """Raise ModelLoadError unless a model's own adapter is there and fits it.

    `spec`: of the model.
    """
    if not (folder / CONFIG).is_file():
        raise ModelLoadError(
            f"the model's own adapter for them is missing: {folder} holds no {CONFIG}. Download "
            "the model whole, with what is in folders of its own"
        )
    map_adapter(read_adapter(folder), spec)
