"""Adjusts settings to the model that has been loaded."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.model.serving import Serving
from tgi_trio.settings.records import Settings


def with_model(settings: Settings, serving: Serving) -> tuple[Settings, list[str]]:
    """Return settings without what the loaded model cannot do, and messages about that.

    `settings`: completed by the warm-up.
    """
    overruled = set(settings.overruled)
    messages: list[str] = []
    backend = serving.backend
    speculates, reuses = not serving.no_drafts, not serving.no_prefix_cache
    if settings.speculate and not speculates:
        overruled.add("speculate")
        messages.append(
            f"--speculate has no effect: this model is served by {backend}; {serving.no_drafts}"
        )
    if "draft_model" in settings.explicit and not settings.speculate:
        messages.append(
            "--draft-model has no effect: --speculate 0 lets nothing draft; leave it out"
        )
    if "drafter" in settings.explicit and not settings.speculate:
        messages.append(
            "--drafter has no effect: --speculate says how many tokens are drafted ahead; by "
            "default none are"
        )
    if settings.prefix_caching and not reuses:
        overruled.add("prefix_caching")
        messages.append(
            f"prefix caching has no effect: this model is served by {backend}; "
            f"{serving.no_prefix_cache}"
        )
    if settings.prefix_cache_path is not None and not reuses:
        messages.append(
            f"--prefix-cache-path has no effect: this model is served by {backend}; "
            f"{serving.no_prefix_cache}"
        )
    if settings.prefix_cache_host_bytes and not settings.host_blocks:
        kernels = "there, all blocks are in the host's memory; raise --max-batch-total-tokens"
        why = kernels if backend.startswith("kernels") else "it copies no blocks"
        messages.append(
            f"--prefix-cache-host-bytes has no effect: this model is served by {backend}; "
            f"{serving.no_prefix_cache or why}"
        )
    elif settings.prefix_cache_host_bytes and serving.device == "cpu":
        messages.append(
            "--prefix-cache-host-bytes gains nothing on a CPU, whose blocks are in the host's "
            "memory already: raise --max-batch-total-tokens instead"
        )
    acting = replace(
        settings,
        speculate=settings.speculate if speculates else 0,
        drafter=settings.drafter if speculates else None,
        prefix_caching=settings.prefix_caching and reuses,
        overruled=frozenset(overruled),
        serving=serving.rows(),
    )
    return acting, messages
