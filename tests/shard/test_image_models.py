"""Text layers with images' features give what transformers' whole models give, on both backends.

What a tower would make of an image is made up here, for transformers' model and ours alike: it is
what the text makes of it that is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.numba_backend.numba_support import cpu_runner
from tests.shard.torch_backend.models_support import BLOCK, GreedyRecorder, load
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters
from tgi_trio.shard.contract import Drafter, Runner, StepPlan
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.placed_features import PlacedFeatures
from tgi_trio.shard.prompt_geometry import ImageGrid, PromptGeometry, turn_by_grids
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGE = 9  # id of an image's tokens
NEW = 5
HIDDEN = 64
DEEP = 2  # layers of the text that Qwen3-VL's images have features for
_QWEN: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "mrope_section": [4, 6, 6],
        "mrope_interleaved": True,  # which Qwen3-VL's alone are
    },
}
# In sizes that the kernels fit; windows are shorter than an image.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        **{"head_dim": 32, "sliding_window": 4, "query_pre_attn_scalar": 32},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "paligemma": {"model_type": "gemma", "head_dim": 32},
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_vl": _QWEN | {"head_dim": 32},
}


@dataclass
class Picture:
    """What a tower makes of an image: rows and columns of features."""

    grid: tuple[int, int]
    rows: np.ndarray[Any, np.dtype[np.float32]]  # [features, HIDDEN]
    deep: tuple[np.ndarray[Any, np.dtype[np.float32]], ...]  # the same each, for layers


def picture(seed: int, rows: int, columns: int, deep: int) -> Picture:
    draw = np.random.default_rng(seed)
    parts = draw.standard_normal((1 + deep, rows * columns, HIDDEN), np.float32)
    return Picture((rows, columns), parts[0], tuple(parts[1:]))


@dataclass
class Prompt:
    """Ids with images among them, in the order of their places."""

    ids: list[int]
    firsts: list[int]
    pictures: list[Picture]

    @property
    def of_image(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        found = np.zeros(len(self.ids), np.bool_)
        for first, each in zip(self.firsts, self.pictures, strict=True):
            found[first : first + len(each.rows)] = True
        return found


def prompt(*parts: int | Picture, seed: int = 0) -> Prompt:
    """Return so many tokens of text, then an image, and so on."""
    draw = np.random.default_rng(seed)
    made = Prompt([], [], [])
    for part in parts:
        if isinstance(part, Picture):
            made.firsts.append(len(made.ids))
            made.pictures.append(part)
            made.ids += [IMAGE] * len(part.rows)
        else:
            made.ids += draw.integers(IMAGE + 1, VOCAB_SIZE, part).tolist()
    return made


class Whole:
    """transformers' model, given what its tower would have found."""

    def __init__(self, folder: Path, family: str) -> None:
        from transformers import AutoModelForImageTextToText

        # With torch's own kernel, PaliGemma without an image sees what follows, and so never meant.
        found = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.model: Any = found.eval()
        self.family = family
        self.model.config.image_token_id = IMAGE
        self.model.generation_config.eos_token_id = None

    def generate(self, asked: Prompt) -> tuple[list[int], torch.Tensor]:
        """Return greedy tokens [NEW] and the logits [NEW, vocabulary] they were chosen from."""
        kinds = torch.from_numpy(asked.of_image).long()[None]
        given: dict[str, Any] = {}
        if asked.pictures:
            given["mm_encoder_outputs"] = {"image": self._features(asked)}
            if self.family == "paligemma":
                given["token_type_ids"] = torch.zeros_like(kinds)
            elif self.family == "gemma3":
                given["token_type_ids"] = kinds
            else:
                grids = [[1, 2 * p.grid[0], 2 * p.grid[1]] for p in asked.pictures]
                given |= {"image_grid_thw": torch.tensor(grids), "mm_token_type_ids": kinds}
        found = self.model.generate(
            torch.tensor([asked.ids]),
            **given,
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = found.sequences[0, len(asked.ids) :].tolist()
        return tokens, torch.cat(found.logits).float()

    def _features(self, asked: Prompt) -> SimpleNamespace:
        rows = torch.from_numpy(np.concatenate([p.rows for p in asked.pictures]))
        layers = range(len(asked.pictures[0].deep))
        deep = [[torch.from_numpy(p.deep[i]) for p in asked.pictures] for i in layers]
        listed = [torch.from_numpy(p.rows) for p in asked.pictures]
        return SimpleNamespace(
            pooler_output=listed if self.family.startswith("qwen") else rows[None],
            deepstack_features=deep,
        )


def geometry(family: str, asked: Prompt, length: int) -> PromptGeometry:
    """Return what images of a family change of a prompt of `length` tokens."""
    placed = list(zip(asked.firsts, asked.pictures, strict=True))
    if family.startswith("qwen"):
        return PromptGeometry(turns=turn_by_grids([ImageGrid(at, *p.grid) for at, p in placed]))
    if family == "paligemma":
        return PromptGeometry(spans=np.array([[0, length]]))
    return PromptGeometry(spans=np.array([[at, at + len(p.rows)] for at, p in placed]))


def place_features(plan: StepPlan, prompts: list[Prompt]) -> None:
    """Put the features of the step's image tokens into a plan, whose rows have prompts by id."""
    places, rows, deep = [], [], []
    for i, row in enumerate(plan.rows):
        asked = prompts[row.id]
        if not asked.pictures:
            continue
        stacked = np.stack(
            [
                np.concatenate(of_layer)
                for of_layer in zip(*((p.rows, *p.deep) for p in asked.pictures), strict=True)
            ]
        )
        number = np.cumsum(asked.of_image) - 1
        for token in range(plan.query_starts[i], plan.query_starts[i + 1]):
            at = int(plan.positions[token])
            if at < len(asked.ids) and asked.of_image[at]:
                places.append(token)
                rows.append(stacked[0, number[at]])
                deep.append(stacked[1:, number[at]])
    if places:
        layers = tuple(np.ascontiguousarray(each) for each in np.stack(deep, axis=1))
        plan.features = PlacedFeatures(np.array(places), np.stack(rows), layers)


class Told:
    """A drafter that guesses the tokens it was told, every third of them wrong."""

    def __init__(self, tokens: list[list[int]], prompts: list[Prompt]) -> None:
        self._tokens, self._prompts = tokens, prompts

    def draft_rows(self, rows: Any, spare: int) -> dict[int, int]:
        counts = {}
        for row in rows:
            sequence: Any = row.sequence
            done = sequence.length - len(self._prompts[sequence.id].ids)
            guesses = self._tokens[sequence.id][done : done + min(row.room, 2)]
            if guesses:
                wrong = [(t + 1) % VOCAB_SIZE if done % 3 == 2 else t for t in guesses]
                end = sequence.length + len(wrong)
                sequence.token_ids[sequence.length : end] = wrong
                counts[row.place] = len(wrong)
        return counts


def run(
    runner: Runner,
    family: str,
    prompts: list[Prompt],
    *,
    budget: int = 10_000,
    joins: int = 10,
    drafter: Drafter | None = None,
    emitted: int = 0,
    cached: int = 0,
) -> list[list[int]]:
    """Return the tokens of all prompts, `joins` of which begin in a step; a batch plans them.

    `emitted`: how many of a prompt's last ids were chosen before, in another life of the shard;
    `cached`: its first blocks, which hold what was computed for the same prompt before.
    """
    batch = Batch(
        vocab_size=VOCAB_SIZE,
        block_size=BLOCK,
        blocks=512,
        eos_ids=[],
        drafter=drafter,
        draft_budget=100 if drafter else 0,
    )
    waiting, begun, blocks = list(enumerate(prompts)), [], 1
    while waiting or len(batch):
        for i, asked in waiting[:joins]:
            count = -(-(len(asked.ids) + NEW) // BLOCK)
            ids = np.array(asked.ids, np.int32)
            own = range(blocks + cached, blocks + count)
            granted = [*range(1, 1 + cached), *(own if not cached else (100 + b for b in own))]
            blocks += count
            length, new = len(ids) - emitted, NEW - emitted
            row = PrefillRow(i, ids, length, cached * BLOCK, granted, new, 0, SamplingParameters())
            begun.append(batch.add(row))
            if asked.pictures:
                batch.shape(i, geometry(family, asked, length))
        del waiting[:joins]
        plan = batch.plan(budget)
        assert plan is not None
        place_features(plan, prompts)
        batch.advance(plan, runner.step(plan))
        batch.check()
    return [each.token_ids[each.prompt_length : each.length].tolist() for each in begun]


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
    deep = DEEP if family == "qwen3_vl" else 0
    one, other = picture(1, 2, 3, deep), picture(2, 4, 2, deep)
    prompts = [
        prompt(3, one, 4),
        prompt(1, other, 2, one, 20, seed=1),
        prompt(7, seed=2),
        prompt(18, other, 1, seed=3),
    ]
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


def test_images_beside_guesses(case: Case, runner: tuple[Runner, GreedyRecorder]) -> None:
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
