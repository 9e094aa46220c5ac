"""Whether a model's media are served, and if not, why."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.own_adapters import check_own_adapter, find_own_adapters
from tgi_trio.model.audio_families import is_audio_only
from tgi_trio.model.check import model_spec
from tgi_trio.model.config import ModelConfig, read_config, read_values
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.towers import lacks_audio_tower, lacks_vision_tower
from tgi_trio.router.media.kinds import NOTHING_UNSERVED, WORDS, Kind
from tgi_trio.router.media.media_model import MediaModel, find_media_model
from tgi_trio.settings.records import Settings

log = logging.getLogger(__name__)

# Pixels reach a shard through shared memory on the router's machine.
ELSEWHERE = "the shard is on another machine than the router (--shard, --remote-ranks)"
# Image features are computed on rank 0, but with stages not all prompts begin there.
STAGED = "the model is cut into stages (--pipeline-stages)"


def find_served_images(folder: Path) -> tuple[MediaModel | None, str | None]:
    """Return how a model takes images, or why its images are not served.

    Text is served in any case. (None, None): the model takes no images.
    """
    try:
        model = find_media_model(folder)
        config = None if model is None else read_config(folder)
        if config is not None and model_spec(config) is None:
            raise ModelLoadError(
                f"transformers computes the text of this {config.model_type} as a whole, where "
                "images have no place"
            )
        has_vision = model is not None and model.layout is not None
        if has_vision and lacks_vision_tower(folder):
            raise ModelLoadError(
                f"{folder} has the weights of the text alone, as mlx-lm converts them: there is no "
                "vision tower among them"
            )
        if has_vision and find_spec("PIL") is None:
            raise ModelLoadError("they need Pillow, pip install 'tgi-trio[images]'")
        if model is not None and (missing := [one for one in model.needs if not find_spec(one)]):
            raise ModelLoadError(
                f"this model's tower is one of timm's, which needs {' and '.join(missing)}, "
                "pip install 'tgi-trio[timm]'"
            )
    except ModelLoadError as error:
        return None, str(error)
    if model is not None and "audio" in model.others and lacks_audio_tower(folder):
        why = f"{folder} has no weights for it"
        if model.layout is None:
            return None, why
        model = model.without("audio", why)
    return (None, None) if model is None or config is None else _add_adapters(model, config)


def _add_adapters(model: MediaModel, config: ModelConfig) -> tuple[MediaModel | None, str | None]:
    """Return a model with the adapters that it brings along, or why its images are not served.

    Without the kinds, beside images, whose adapters cannot be used.
    """
    found = find_own_adapters(config.values, config.folder)
    spec = model_spec(config) if found else None
    if not isinstance(spec, DecoderSpec):
        return model, None
    adapters: dict[str, Path] = {}
    kinds: tuple[Kind, ...] = ("image", *model.others)
    for kind in (each for name in found for each in kinds if each == name):  # in their order
        try:
            check_own_adapter(found[kind], spec)
        except ModelLoadError as error:
            if kind == "image" or model.layout is None:
                return None, str(error)
            model = model.without(kind, str(error))
        else:
            adapters[kind] = found[kind]
    return replace(model, adapters=adapters), None


def decide_images(settings: Settings) -> tuple[MediaModel | None, Mapping[Kind, str]]:
    """Return how a model takes images and the like with these settings; the log says what it lacks.

    Also why it takes nothing at all, by the kinds that it could take.
    """
    model, why = find_served_images(settings.model_path)
    if model is not None and (elsewhere := explain_unserved_images(settings)) is not None:
        model, why = None, elsewhere
    if model is not None:
        for kind in model.lacking:
            log.warning("%s are not served: %s", WORDS[kind].several, model.unserved[kind])
    if why is None:
        return model, NOTHING_UNSERVED
    alone = is_audio_only(read_values(settings.model_path) or {})
    kinds: tuple[Kind, ...] = ("audio",) if alone else tuple(WORDS)
    log.warning("%s are not served: %s", WORDS[kinds[0]].several, why)
    return None, dict.fromkeys(kinds, why)


def explain_unserved_images(settings: Settings) -> str | None:
    """Return why no model's images can be served with these settings, or None."""
    if settings.ranks_elsewhere == settings.num_shard:
        return ELSEWHERE
    if settings.pipeline_stages > 1:
        return STAGED
    return None
