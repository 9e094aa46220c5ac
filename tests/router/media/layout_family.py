"""What is said of a family that sees images, as its files have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """A family's settings, as they stand in its files, and the classes of its processor."""

    module: str
    image_processor: str
    processor: str
    config: dict[str, Any] = field(default_factory=dict)
    pixels: dict[str, Any] = field(default_factory=dict)  # preprocessor_config.json
    options: dict[str, Any] = field(default_factory=dict)  # processor_config.json
    tokens: dict[str, str] = field(default_factory=lambda: {"image_token": "<image>"})


QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
INTERNVL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
