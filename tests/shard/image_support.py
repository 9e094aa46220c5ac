"""Prompts with images whose features are made up, for transformers' models and ours alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tests.shard.torch_backend.models_support import BLOCK
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.media.placed_features import PlacedFeatures
from tgi_trio.shard.media.prompt_geometry import ImageGrid, PromptGeometry, turn_by_grids
from tgi_trio.shard.runner import Drafter, Runner
from tgi_trio.testing.checkpoints import VOCAB_SIZE

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


class HasIds(Protocol):
    """A prompt."""

    @property
    def ids(self) -> list[int]: ...


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


def make_prompts(family: str) -> list[Prompt]:
    """Return prompts with an image, with two, with none, and with one that a block ends before."""
    deep = DEEP if family == "qwen3_vl" else 0
    one, other = picture(1, 2, 3, deep), picture(2, 4, 2, deep)
    return [
        prompt(3, one, 4),
        prompt(1, other, 2, one, 20, seed=1),
        prompt(7, seed=2),
        prompt(18, other, 1, seed=3),
    ]


class Told:
    """A drafter that drafts the tokens it was told, every third of them wrong."""

    def __init__(self, tokens: list[list[int]], prompts: Sequence[HasIds]) -> None:
        self._tokens, self._prompts = tokens, prompts

    def draft_rows(self, rows: Any, spare: int) -> dict[int, int]:
        counts = {}
        for row in rows:
            sequence: Any = row.sequence
            done = sequence.length - len(self._prompts[sequence.id].ids)
            drafts = self._tokens[sequence.id][done : done + min(row.room, 2)]
            if drafts:
                wrong = [(t + 1) % VOCAB_SIZE if done % 3 == 2 else t for t in drafts]
                end = sequence.length + len(wrong)
                sequence.token_ids[sequence.length : end] = wrong
                counts[row.place] = len(wrong)
        return counts


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

    def _features(self, asked: Prompt) -> Any:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import (
            BaseModelOutputWithDeepstackFeatures,
        )

        rows = torch.from_numpy(np.concatenate([p.rows for p in asked.pictures]))
        layers = range(len(asked.pictures[0].deep))
        deep = [[torch.from_numpy(p.deep[i]) for p in asked.pictures] for i in layers]
        listed = [torch.from_numpy(p.rows) for p in asked.pictures]
        found: Any = BaseModelOutputWithDeepstackFeatures  # lists in both, whatever its types say
        return found(
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
        layers = dict(enumerate(map(np.ascontiguousarray, np.stack(deep, axis=1))))
        plan.features = PlacedFeatures(np.array(places), np.stack(rows), layers)


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
        batch.settle(plan, runner.step(plan))
        batch.check()
    return [each.token_ids[each.prompt_length : each.length].tolist() for each in begun]
