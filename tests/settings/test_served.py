"""Settings that the loaded model does not allow are taken back, with a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tgi_trio.model.facts import ModelFacts
from tgi_trio.model.serving import Serving
from tgi_trio.settings.records import Options, Settings
from tgi_trio.settings.resolve import resolve, with_kv
from tgi_trio.settings.served import with_model
from tgi_trio.settings.shown import as_json, as_rows, public_json


def resolved(**options: object) -> Settings:
    facts = ModelFacts(path=Path("/m"), model_type="llama", max_positions=2048)
    return resolve(Options(**options), facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("caching", [False, True])
def test_what_cannot_act_is_off_and_said(
    caching: bool, drafts: int, speculates: bool, reuses: bool
) -> None:
    asked = resolved(speculate=drafts, prefix_caching=caching)
    serving = Serving(
        path="transformers, cached",
        backend="transformers, cached",
        no_prefix_cache="" if reuses else "each has its own",
        no_drafts="" if speculates else "one at a time",
    )
    settings, said = with_model(asked, serving)
    assert settings.serving == serving.rows()
    assert settings.speculate == (drafts if speculates else 0)
    assert settings.drafter == ("ngram" if drafts and speculates else None)
    assert settings.prefix_caching == (caching and reuses)
    lost = {"speculate"} if drafts and not speculates else set()
    lost |= {"prefix_caching"} if caching and not reuses else set()
    assert settings.overruled == lost
    assert len(said) == len(lost)
    assert all("has no effect" in text and "transformers, cached; " in text for text in said)
    assert all(text.endswith((serving.no_drafts, serving.no_prefix_cache)) for text in said)
    origins = {name: origin for name, _, origin in as_rows(settings)}
    assert {name for name, origin in origins.items() if origin == "the model"} == lost
    shown = public_json(settings)
    assert (shown["speculate"], shown["prefix_caching"]) == (
        settings.speculate, settings.prefix_caching,
    )  # fmt: skip
    assert "overruled" not in as_json(settings)


def test_a_drafter_that_may_not_draft_is_told() -> None:
    asked = resolved(draft_model=Path("/smaller"), speculate=0)
    settings, said = with_model(asked, Serving(path="decoder", backend="torch"))
    assert settings.drafter is None and asked.drafter is None
    assert said == ["--draft-model has no effect: --speculate 0 lets nothing draft; leave it out"]
    assert resolved(draft_model=Path("/smaller")).drafter == "model"


def test_a_drafter_that_came_with_the_model_is_no_flag_to_leave_out() -> None:
    facts = ModelFacts(path=Path("/m"), model_type="llama", max_positions=2048)
    given = Options(speculate=0)
    settings = resolve(replace(given, draft_model=Path("/heads")), facts, given)
    assert with_model(settings, Serving(path="decoder", backend="torch"))[1] == []


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("kernels (AVX512)", "all blocks are in the host's memory; raise --max-batch-total-tokens"),
        ("transformers, paged", "it copies no blocks"),
    ],
)
def test_copies_that_nothing_makes_are_said(backend: str, why: str) -> None:
    asked = with_kv(resolved(prefix_cache_host_bytes=1 << 20), blocks=200, block_size=16)
    serving = Serving(path="decoder", backend=backend)
    (said,) = with_model(asked, serving)[1]
    assert said.startswith("--prefix-cache-host-bytes has no effect: this model is served by ")
    assert why in said
    copied = with_kv(asked, 200, 16, host=(9, 3))
    assert with_model(copied, serving)[1] == []
    assert (copied.host_blocks, copied.host_slots) == (9, 3)
    assert public_json(copied)["host_blocks"] == 9
    (said,) = with_model(copied, replace(serving, device="cpu"))[1]
    assert "gains nothing on a CPU" in said
    alone = Serving(path="decoder", backend="torch", no_prefix_cache="each has its own")
    assert with_model(asked, alone)[1][-1].endswith("each has its own")
