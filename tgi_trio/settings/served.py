"""Settings as they act on the model that has been loaded."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.settings.records import Settings


def with_model(
    settings: Settings, *, backend: str, prefix_reuse: bool, speculates: bool
) -> tuple[Settings, list[str]]:
    """Return settings without what the loaded model cannot do, and what is to be said of it.

    `backend` is what serves it; `prefix_reuse` whether blocks computed for one sequence may serve
    another, `speculates` whether a step may hold guesses.
    """
    overruled: list[str] = []
    said: list[str] = []
    if settings.speculate and not speculates:
        overruled.append("speculate")
        said.append(
            f"--speculate has no effect: this model is served by {backend}, which decodes one "
            "token of a sequence a step"
        )
    if settings.draft_model is not None and not settings.speculate:
        said.append("--draft-model has no effect: --speculate 0 lets nothing guess; leave it out")
    if settings.prefix_caching and not prefix_reuse:
        overruled.append("prefix_caching")
        said.append(
            f"prefix caching has no effect: this model is served by {backend}, where what one "
            "sequence has computed cannot serve another"
        )
    acting = replace(
        settings,
        speculate=settings.speculate if speculates else 0,
        drafter=settings.drafter if speculates else None,
        prefix_caching=settings.prefix_caching and prefix_reuse,
        overruled=frozenset(overruled),
    )
    return acting, said
