"""Text layers with images' features give what transformers' whole models give, on both backends.

What a tower would make of an image is made up here, for transformers' model and ours alike: it is
what the text makes of it that is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.cpu_backend.kernel_support import cpu_runner
from tests.shard.image_support import (
    FAMILIES,
    NEW,
    Prompt,
    Told,
    Whole,
    make_prompts,
    picture,
    run,
)
from tests.shard.torch_backend.models_support import GreedyRecorder, load
from tgi_trio.shard.runner import Runner
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def torch_runner(folder: Path) -> Iterator[tuple[Runner, GreedyRecorder]]:
    yield load(folder)


BACKENDS: dict[str, Callable[[Path], Any]] = {"torch": torch_runner, "kernels": cpu_runner}


@dataclass
class Case:
    """A family's model: transformers', and what that says of prompts."""

    family: str
    folder: Path
    whole: Whole
    prompts: list[Prompt]
    expected: list[tuple[list[int], torch.Tensor]]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family: str = request.param
    folder = make_wrapped(tmp_path_factory.mktemp(family), family, **FAMILIES[family])
    prompts = make_prompts(family)
    whole = Whole(folder, family)
    return Case(family, folder, whole, prompts, [whole.generate(each) for each in prompts])


@pytest.fixture(scope="module", params=BACKENDS)
def runner(request: pytest.FixtureRequest, case: Case) -> Iterator[tuple[Runner, GreedyRecorder]]:
    with BACKENDS[request.param](case.folder) as pair:
        yield pair


def check(case: Case, runner: tuple[Runner, GreedyRecorder], which: list[int], **how: Any) -> None:
    runner[1].by_place.clear()
    prompts = [case.prompts[i] for i in which]
    found = run(runner[0], case.family, prompts, **how)
    for row, i in enumerate(which):
        tokens, logits = case.expected[i]
        assert found[row] == tokens, f"prompt {i}"
        chosen = runner[1].logits(row)[:NEW]
        torch.testing.assert_close(chosen, logits, atol=1e-4, rtol=1e-4)


def test_images_alone_two_and_beside_text(
    case: Case, runner: tuple[Runner, GreedyRecorder]
) -> None:
    check(case, runner, [0])
    check(case, runner, [1])
    check(case, runner, [0, 1, 2, 3], joins=2)


@pytest.mark.parametrize("budget", [1, 9])
def test_images_cut_by_chunks_where_they_may_be(
    case: Case, runner: tuple[Runner, GreedyRecorder], budget: int
) -> None:
    check(case, runner, [0, 1, 3] if budget > 1 else [0, 1], budget=budget)


def test_images_beside_drafts(case: Case, runner: tuple[Runner, GreedyRecorder]) -> None:
    drafter = Told([tokens for tokens, _ in case.expected], case.prompts)
    check(case, runner, [0, 1, 2, 3], joins=1, drafter=drafter)


def test_images_of_a_prompt_that_is_computed_again(
    case: Case, runner: tuple[Runner, GreedyRecorder]
) -> None:
    """With the tokens it had when the shard was lost; what it wrote sees nothing behind itself."""
    runner[1].by_place.clear()
    done = 2
    prompts = [
        Prompt([*asked.ids, *tokens[:done]], asked.firsts, asked.pictures)
        for asked, (tokens, _) in zip(case.prompts, case.expected, strict=True)
    ]
    found = run(runner[0], case.family, prompts, emitted=done)
    for row, (tokens, logits) in enumerate(case.expected):
        assert found[row] == tokens
        chosen = runner[1].logits(row)[: NEW - done]
        torch.testing.assert_close(chosen, logits[done:], atol=1e-4, rtol=1e-4)


def test_images_in_a_prefix_that_was_computed_before(
    case: Case, runner: tuple[Runner, GreedyRecorder]
) -> None:
    """It ends within the second image, whose other tokens are computed with what is there."""
    check(case, runner, [1])
    check(case, runner, [1], cached=1)


def test_images_matter(case: Case) -> None:
    """The comparisons above would notice another image, and other places of its tokens."""
    first = case.expected[0][1]
    asked = case.prompts[0]
    deep = len(asked.pictures[0].deep)
    other = Prompt(asked.ids, asked.firsts, [picture(5, 2, 3, deep)])
    assert (case.whole.generate(other)[1] - first).abs().max() > 1e-2
    if case.family.startswith("qwen"):
        turned = Prompt(asked.ids, asked.firsts, [picture(1, 3, 2, deep)])
        assert (case.whole.generate(turned)[1] - first).abs().max() > 1e-3
