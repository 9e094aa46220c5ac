"""Models as they are published under a type for which transformers has a class of another name.

Their config.json is read in that class's words (`read_values`), and says how images are made, where
otherwise an image processor's file does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tgi_trio.model import deepseek_ocr, internvl_chat
from tgi_trio.model.published_type import Pictures

_MODELS = (deepseek_ocr, internvl_chat)


def is_published(values: Mapping[str, Any]) -> bool:
    """Return whether values, in transformers' words, are of a folder as it is published."""
    return any(model.is_published(values) for model in _MODELS)


def find_pictures(values: Mapping[str, Any]) -> Pictures | None:
    """Return how images are made, by values in transformers' words; None: other files say it.

    Raises ModelLoadError for what would be made otherwise.
    """
    found = (model.find_pictures(values) for model in _MODELS if model.is_published(values))
    return next(found, None)


def describe_class(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what transformers' class is configured with to have the towers and their projector.

    None: a folder's config.json can be read by that class. Raises ModelLoadError for towers that it
    does not describe.
    """
    found = (model.describe_class(values) for model in _MODELS if model.is_published(values))
    return next(found, None)
