"""Finds settings that were asked for and do nothing, since others leave them no work."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final

from tgi_trio.settings.records import Settings

# Limits of what messages hold beside text, by what they hold. Those of images hold for all.
_LIMITS: Final[Mapping[str, tuple[str, ...]]] = {
    "images": (
        "image_urls",
        "max_image_fetch_size",
        "max_image_pixels",
        "max_images_per_prompt",
        "max_image_bytes",
        "image_memory",
        "feature_memory",
    ),
    "videos": ("max_video_frames", "max_video_pixels"),
    "audio parts": ("max_audio_seconds",),
}


def find_idle(settings: Settings, *, merged: bool = False) -> list[str]:
    """Return a sentence for each setting that was asked for and has no effect.

    `merged`: whether an adapter has been merged into the model.
    """
    return [line for names, why in _idle(settings, merged) for line in _say(settings, names, why)]


def find_idle_limits(settings: Settings, served: Container[str]) -> list[str]:
    """Return the same of limits of what messages hold; `served`: those of `_LIMITS` that are."""
    return [
        line
        for what, names in _LIMITS.items()
        if what not in served
        for line in _say(settings, names, f"no {what} are served with this model")
    ]


def _say(settings: Settings, names: Sequence[str], why: str) -> list[str]:
    return [
        f"--{name.replace('_', '-')} has no effect: {why}"
        for name in names
        if name in settings.explicit
    ]


def _idle(settings: Settings, merged: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield settings without work, and the reason."""
    if not settings.serves_adapters:
        why = "there are no adapters (--lora-adapters)"
        yield ("max_lora_rank", "max_loaded_adapters"), why
        if not merged:
            yield ("adapter_tokenizers",), why
    if settings.prefix_cache_path is None:
        why = "no prefixes are kept (--prefix-cache-path)"
        yield ("prefix_cache_bytes", "prefix_cache_save_seconds"), why
    if not settings.remote_ranks:
        yield ("rank_address",), "no rank connects from another machine (--remote-ranks)"
    if settings.disable_grammar_support:
        why = "--disable-grammar-support refuses all grammars"
        yield ("max_grammar_bytes", "max_grammar_seconds"), why
    if settings.otlp_endpoint is None:
        yield ("otlp_service_name",), "no traces are sent (--otlp-endpoint)"
    if settings.bind:
        why = "--bind says where the API is"
        yield ("port", "aip_http_port"), why
        if settings.prometheus_port is None:
            yield ("hostname",), why
    elif settings.aip_http_port is not None:
        yield ("port",), "--aip-http-port says where the API is"
