"""Finds settings that were asked for and do nothing, since others leave them no work."""

from __future__ import annotations

from collections.abc import Iterator

from tgi_trio.settings.records import Settings


def find_idle(settings: Settings) -> list[str]:
    """Return a sentence for each setting that was asked for and has no effect."""
    return [
        f"--{name.replace('_', '-')} has no effect: {why}"
        for names, why in _idle(settings)
        for name in names
        if name in settings.asked
    ]


def _idle(settings: Settings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield settings without work, and the reason."""
    if not settings.serves_adapters:
        yield ("max_lora_rank", "max_loaded_adapters"), "there are no adapters (--lora-adapters)"
    if not settings.remote_ranks:
        yield ("rank_address",), "no rank connects from another machine (--remote-ranks)"
    if settings.disable_grammar_support:
        why = "--disable-grammar-support refuses all grammars"
        yield ("max_grammar_bytes", "max_grammar_seconds"), why
    if settings.otlp_endpoint is None:
        yield ("otlp_service_name",), "no traces are sent (--otlp-endpoint)"
    if settings.bind:
        yield ("port", "aip_http_port"), "--bind says where the API is"
    elif settings.aip_http_port is not None:
        yield ("port",), "--aip-http-port says where the API is"
