"""Drives batch, queue, tower and runner as the worker does, and compares with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.shard.media.hunyuan_models import turn_in_pairs
from tests.shard.media.pictures import (
    DELTA_RULES,
    GEMMA4,
    GRIDS,
    IMAGE_TOKEN,
    PROCESSOR,
    RESCALED,
    TIMM,
    Picture,
    Prompt,
    picture,
    shown,
    shown_apart,
    together,
)
from tests.shard.media.timm_support import use_timm
from tests.shard.torch_backend.models_support import BLOCK, GreedyRecorder, generated
from tgi_trio.ipc.images import ALIGNMENT, ArenaPlace, ImageArena, SequenceImage, write_bundle
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, StateGrant
from tgi_trio.model.image_rules import ImageRules
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.loop.image_queue import ImageQueue
from tgi_trio.shard.media.features import Bundle, ImageEncoder, ImageFeatures
from tgi_trio.shard.media.tower import TorchTower
from tgi_trio.shard.runner import Drafter, Runner
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

NEW = 6
STATE_SLOTS = 32
PLAIN = ImageRules()


def make_folder(folder: Path, family: str, **text: Any) -> Path:
    if family in TIMM:
        use_timm()
    make_wrapped(folder, family, image_token=IMAGE_TOKEN, **text)
    settings = RESCALED if family in GEMMA4 else PROCESSOR
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


class CountingTower:
    """An encoder that counts."""

    def __init__(self, tower: ImageEncoder) -> None:
        self._tower = tower
        self.encoded = 0

    def encode(self, bundle: Bundle) -> ImageFeatures:
        self.encoded += 1
        return self._tower.encode(bundle)


class Shard:
    """One runner's batch and queue, stepped by hand."""

    def __init__(
        self,
        runner: Runner,
        tower: ImageEncoder,
        arena: ImageArena,
        memory: int = 2**20,
        rules: ImageRules = PLAIN,
        drafter: Drafter | None = None,
    ) -> None:
        """`drafter`: None: the runner's own."""
        self.runner = runner
        self.tower = CountingTower(tower)
        self.queue = ImageQueue(self.tower, arena, memory, rules)
        self.seen: list[tuple[int, int]] = []
        self.pieces: list[int] = []  # tokens of each step
        self.drafted = 0
        self._arena = arena
        self._end = 0  # of what is used of the arena
        self._block = 1
        info = runner.info
        self.keeps_states = info.state_bytes > 0
        self.batch = Batch(
            vocab_size=info.vocab_size,
            block_size=BLOCK,
            blocks=10_000,
            eos_ids=(),
            drafter=drafter or (runner.drafter(2) if info.speculates else None),
            draft_budget=info.draft_budget,
            state_slots=STATE_SLOTS if self.keeps_states else 0,
        )

    def place(self, picture: Picture) -> ArenaPlace:
        """Write an image into the arena."""
        place = ArenaPlace(self._end, self._arena.nbytes - self._end)
        used = write_bundle(self._arena.view(place), picture.bundle)
        self._end += used + -used % ALIGNMENT
        return ArenaPlace(place.offset, used)

    def add(
        self,
        id: int,
        prompt: Prompt,
        new: int = NEW,
        *,
        blocks: Sequence[int] = (),
        cached: int = 0,
        states: StateGrant | None = None,
        said: Sequence[int] = (),
        **sampling: Any,
    ) -> ShardSequence:
        """Take a sequence in; `blocks`: its first ones, of which `cached` tokens are computed.

        `states`: where its own lie; None: in two slots of its number. `said`: what has been chosen
        of its `new` tokens before, in another life.
        """
        if self.keeps_states and states is None:
            states = StateGrant((1 + 2 * id, 2 + 2 * id))
        images, at = [], 0
        for image in prompt.pictures:
            begin = prompt.ids.index(image.ids[0], at)
            at = begin + len(image.ids)
            (first, _), *_, (last, count) = (image.runs[0], *image.runs)
            runs = tuple((offset - first, size) for offset, size in image.runs)
            place, tokens = self.place(image), last + count - first
            images.append(SequenceImage(begin + first, tokens, runs, image.key, place))
        wanted = -(-(len(prompt.ids) + new) // BLOCK) - len(blocks)
        own = [*blocks, *range(self._block, self._block + wanted)]
        self._block += wanted
        ids = np.array([*prompt.ids, *said], np.int32)
        asked = SamplingParameters(ignore_eos=True, **sampling)
        row = PrefillRow(
            *(id, ids, len(prompt.ids), cached, own, new - len(said), 0, asked, tuple(images)),
            states=states,
        )
        sequence = self.batch.add(row)
        if images:
            self.batch.hold(id)
            geometry = self.queue.add(sequence, row.images)
            if geometry is not None:
                self.batch.shape(id, geometry)
        return sequence

    def drop(self, id: int) -> None:
        """Do what a FILTER does: the sequence is preempted, or its client gone."""
        for sequence in self.batch.remove([id]):
            self.runner.drop(sequence)
            self.queue.drop(id)

    def step(self, budget: int = 1000) -> bool:
        """Do a turn of the loop; return whether anything moved."""
        if self.queue.is_busy:
            self.queue.advance()
            assert not self.queue.take_faults()
        self.seen += self.queue.seen
        self.queue.seen = {}
        for sequence in self.batch.held:
            if sequence.id not in self.queue and self.runner.prepare(sequence):
                self.batch.hold(sequence.id, False)
        plan = self.batch.plan(budget)
        if plan is None:
            return self.queue.is_waiting
        self.pieces.append(len(plan.token_ids))
        self.drafted += 0 if plan.drafts is None else int(plan.drafts.sum())
        moved = self.batch.settle(plan, self.runner.step(plan))
        assert not moved.faults, moved.faults
        for sequence in moved.dropped:
            self.queue.drop(sequence.id)
        return True

    def run(self, budget: int = 1000) -> None:
        while self.step(budget):
            pass


def _without_images(text: torch.nn.Module, given: Any, found: Any) -> None:
    """Say that a text model saw no images, which Llama 4 of transformers 5.24 reads of its own."""
    found.image_outputs = None


class Golden:
    """transformers on the same folder, float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText

        # With torch's own kernel, PaliGemma without an image sees what follows, and so never meant.
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        # Rows choose it like any other; which weights do depends on what a processor draws.
        self.model.generation_config.eos_token_id = None
        if self.model.config.model_type == "hunyuan_vl":
            turn_in_pairs(self.model)
        if self.model.config.model_type == "llama4":
            self.model.language_model.register_forward_hook(_without_images)
        self._known: dict[tuple[object, ...], torch.Tensor] = {}

    def _inputs(self, prompt: Prompt, more: int = 0) -> dict[str, torch.Tensor]:
        """Return what the model is given of images beside a prompt's ids and `more` behind them."""
        family = self.model.config.model_type
        if not prompt.pictures and family == "idefics":  # as its processor has it
            places = torch.zeros(1, len(prompt.ids) + more, 1, dtype=torch.long)
            return {"pixel_values": torch.zeros(1, 1, 3, 16, 16), "image_attention_mask": places}
        if not prompt.pictures:
            return {}
        inputs = together(prompt.pictures, family)
        kinds = torch.tensor([[id == IMAGE_TOKEN for id in prompt.ids] + [False] * more]).long()
        if family == "gemma3":
            inputs["token_type_ids"] = kinds
        elif family == "paligemma":  # 0: sees all that is
            inputs["token_type_ids"] = (torch.arange(kinds.shape[1]) >= len(prompt.ids))[
                None
            ].long()
        elif family in (*GRIDS, *GEMMA4, "minicpmv4_7"):
            inputs["mm_token_type_ids"] = kinds
        elif family == "idefics":
            inputs["pixel_values"] = inputs["pixel_values"][None]
            inputs["image_attention_mask"] = shown_apart(prompt, more)
        elif family == "mllama":
            inputs["cross_attention_mask"] = shown(prompt, more)
        return inputs

    @torch.no_grad()
    def generate(self, prompt: Prompt, new: int = NEW) -> list[int]:
        ids = torch.tensor([prompt.ids])
        found = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            **self._inputs(prompt),
        )
        return found[0, len(prompt.ids) :].tolist()

    @torch.no_grad()
    def logits(self, prompt: Prompt, tokens: list[int]) -> torch.Tensor:
        """Return what each of `tokens` is chosen from, by one pass over everything.

        What is asked again, as other orders of steps say the same, is computed once.
        """
        pictures = tuple(each.key for each in prompt.pictures)
        key = tuple(prompt.ids), tuple(tokens), pictures
        if key not in self._known:
            ids = torch.tensor([[*prompt.ids, *tokens]])
            inputs = self._inputs(prompt, len(tokens))
            found = self.model(input_ids=ids, **inputs).logits[0, len(prompt.ids) - 1 : -1]
            self._known[key] = found.float()
        return self._known[key]

    def check(
        self, prompt: Prompt, row: ShardSequence, recorder: GreedyRecorder, said: int = 0
    ) -> None:
        """Check a finished row token for token, and the logits that they were chosen from.

        `said`: how many of them it came with.
        """
        tokens = generated(row)
        expected = self.logits(prompt, tokens)
        assert tokens == expected.argmax(-1).tolist()
        places = [len(prompt.ids) + i for i in range(said, len(tokens))]
        found = torch.stack([recorder.by_place[row.id][place] for place in places])
        assert (found[:, expected.shape[1] :] == -torch.inf).all(), "what is read and never said"
        found = found[:, : expected.shape[1]]
        # States of a delta rule make more of rounding: there it is in parts of the largest logit.
        largest = expected.abs().max() if self.model.config.model_type in DELTA_RULES else 1.0
        torch.testing.assert_close(found / largest, expected[said:] / largest, atol=1e-4, rtol=0.0)


@dataclass
class Model:
    """A family's checkpoint, as transformers and as we have it."""

    family: str
    folder: Path
    golden: Golden
    tower: TorchTower
    rules: ImageRules

    def prompts(self) -> list[Prompt]:
        """Return prompts that share steps: an image alone, two, none, the same one twice."""
        one, two = (picture(self.family, seed, beside=True) for seed in (1, 2))
        return [
            Prompt.of(5, 6, 7, picture(self.family, 1), 8, 9),
            Prompt.of(one, 20, two, 21),
            Prompt.of(*range(5, 40)),
            Prompt.of(9, two, 12, two, 11),
        ]


Maker = Callable[..., Model]


@contextmanager
def arena(nbytes: int = 2**20) -> Iterator[ImageArena]:
    with ImageArena.create(nbytes) as made:
        yield made
