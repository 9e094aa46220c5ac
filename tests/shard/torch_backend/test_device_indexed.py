"""Families with an index of tokens over a stand-in device: recorded, they say what the CPU says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shard.speculation.mtp_support import counting, mtp_checkpoint
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import BLOCK, plan, prompts, sequences

need_triton()

from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402  (Triton's)
from tests.shard.torch_backend.stand_in_support import (  # noqa: E402
    Foretelling,
    agree,
    drive,
    start,
)
from tgi_trio.shard.torch_backend.attention.indexed import selecting  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.stand_in_driver import Counts  # noqa: E402
from tgi_trio.testing.wrapped_checkpoints import make_wrapped  # noqa: E402

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2")
WRAPPED = ("glm5_next", "mistral_large4")  # the text of models that see images as well
CHOSEN = 12  # by the index of all of them
TEXTS = [text for text in prompts(40, longest=40) if len(text) > CHOSEN][3:6]
# Launches of all layers, and of a mixture of hidden states at their beginning.
LAUNCHES = {
    **{"hy_v4": 63, "axk2": 45, "glm5_next": 62, "mistral_large4": 65, "deepseek_v32": 29},
    "qwen4_exp_text": 107,
}
# What the beginning and the end of a step launch, and the first layer for all of them.
ONCE = {
    *("embedding", "index_select", "clone", "arange", "searchsorted", "full", "floor_divide"),
    *("remainder", "mul", "mean", "div", "tanh", "count_tokens", "survey_scores", "choose_tokens"),
}
GREEDY: list[dict[str, Any]] = [{}] * len(TEXTS)
Folder = Callable[[str], Path]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter has but one; and rows are read by several where they are selected from."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)
    for name, number in (("READ", 16), ("PART", 4), ("SAMPLE", 8), ("READERS", 16)):
        monkeypatch.setattr(selecting, name, number)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a function family -> folder. transformers makes checkpoints without a device."""
    wrapped = {own: make_wrapped(tmp_path_factory.mktemp(own), own) for own in WRAPPED}
    return lambda family: wrapped.get(family) or checkpoint(family)


def test_the_texts_are_longer_than_what_is_chosen() -> None:
    assert len(TEXTS) == 3 and max(map(len, TEXTS)) > 2 * BLOCK


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", [*FAMILIES, *WRAPPED])
def test_steps_are_one_replay_each(folder: Folder, family: str) -> None:
    """Decodes, and prompts in chunks beside them."""
    expected = drive(start(folder(family), "cpu"), TEXTS, GREEDY, 4, budget=23)
    with StandInDevice() as device:
        runner: Any = start(folder(family), "cuda:0", (1, 4))
        ours = drive(runner, TEXTS, GREEDY, 4, device=device, budget=23)
    agree(ours, expected)
    assert len(ours.decodes) > 1 and len(ours.prefills) > 3
    for counts in (*ours.decodes, *ours.prefills):
        assert counts.replays == 1 and not counts.launches, counts
    several = runner.model.hyper is not None  # hidden states, so that no product reads a sum
    assert (len(list(runner.model.projections())) == 1) == several


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "most"), LAUNCHES.items())
def test_launches_of_all_layers_are_few(
    folder: Folder, family: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prefill too long to be divided, but for what happens once, whatever layers there are."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 1)
    path = folder(family)
    with StandInDevice() as device:
        runner, (row,) = start(path, "cuda:0"), sequences(TEXTS[:1], new=2)
        device.counts = Counts()
        with device.idle():
            runner.launch(plan([row], [row.length])).result()
    launched = device.counts.launches
    assert sum(launched[name] for name in launched if name not in ONCE) == most, launched


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "products"), [("glm_moe_dsa", 12), *zip(WRAPPED, (19, 17), strict=True)]
)
def test_launched_steps_wait_for_nothing(folder: Folder, family: str, products: int) -> None:
    """Nor does a cache of 8 bits, which is read in the kernels.

    An index adds no product, unless its queries are made of the layer's input, and nothing that
    turns them.
    """
    settings: dict[str, Any] = {} if family == "glm5_next" else {"kv_cache_dtype": "fp8_e4m3fn"}
    expected = drive(start(folder(family), "cpu", **settings), TEXTS, GREEDY, 3)
    with StandInDevice() as device:
        ours = drive(start(folder(family), "cuda:0", **settings), TEXTS, GREEDY, 3, device=device)
    agree(ours, expected)
    for counts in ours.decodes:
        assert "score_and_absorb" in counts.launches and counts.launches["linear"] == products


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["deepseek_v32", *WRAPPED])
def test_drafts_see_what_an_index_chooses_for_each(folder: Folder, family: str) -> None:
    """As decodes of their own or, behind states, one after another: runs end among them."""
    texts, asked = TEXTS[1:], GREEDY[1:]
    expected = drive(start(folder(family), "cpu"), texts, asked, 9, late=0)
    with StandInDevice() as device:
        runner = start(folder(family), "cuda:0", (2, 6), speculate=2)
        drafter = Foretelling(expected.tokens)
        ours = drive(runner, texts, asked, 9, device=device, drafter=drafter, late=0)
    agree(ours, expected)
    assert ours.drafts > 4 and ours.steps < expected.steps
    assert all(counts.replays == 1 for counts in ours.decodes)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_layers_that_draft_have_an_index_as_well(tmp_path: Path, family: str) -> None:
    folder = counting(mtp_checkpoint(tmp_path, family, tie_word_embeddings=False))
    settings: dict[str, Any] = {"drafter": "mtp", "speculate": 2}
    texts, asked = TEXTS[1:], GREEDY[1:]
    host = start(folder, "cpu", **settings)
    expected = drive(host, texts, asked, 6, drafter=host.drafter(2), late=0)
    with StandInDevice():
        runner: Any = start(folder, "cuda:0", (2, 6), **settings)
        ours = drive(runner, texts, asked, 6, drafter=runner.drafter(2), late=0)
    agree(ours, expected)
    assert ours.drafts == expected.drafts > 2 and ours.steps == expected.steps < 6


@pytest.mark.sampled(3, first=2)
@pytest.mark.parametrize("family", ["hy_v4", *WRAPPED])
def test_ranks_choose_the_same_tokens(folder: Folder, family: str) -> None:
    expected = drive(start(folder(family), "cpu"), TEXTS[1:], GREEDY[1:])
    with StandInDevice() as device, two_ranks(folder(family), device, (2,)) as (runner, steps):
        ours = drive(runner, TEXTS[1:], GREEDY[1:], device=device)
    agree(ours, expected)
    assert ours.decodes and all(counts.replays == 1 for counts in ours.decodes)
    assert not any(counts.waits for counts in steps)
