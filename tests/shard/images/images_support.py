"""Drives batch, desk, tower and runner as the worker does, and compares with transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.shard.torch_backend.models_support import BLOCK, GreedyRecorder, generated
from tgi_trio.ipc.images import ALIGNMENT, ArenaPlace, ImageArena, SequenceImage, write_bundle
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, StateGrant
from tgi_trio.model.image_rules import ImageRules
from tgi_trio.shard.contract import Drafter, Runner, ShardSequence
from tgi_trio.shard.images.features import Bundle, ImageEncoder, ImageFeatures
from tgi_trio.shard.images.tower import TorchTower
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.loop.image_desk import ImageDesk
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

IMAGE_TOKEN = 100
TILED = ("aya_vision", "cohere2_vision", "internvl", "llama4")
WHOLE = ("deepseek_vl", "gemma3", "llava", "paligemma", "vipllava")  # one of a size
END = 1  # id of the end of a text
GLM = ("glm46v", "glm4v", "glm4v_moe", "glm_ocr")
CAUSAL = (
    *TILED,
    "deepseek_vl",
    "lfm3_vl",
    "lighton_ocr",
    "vipllava",
    "llava_next_video",
    "idefics2",
    "idefics3",
    "llava",
    "llava_next",
    "mistral3",
    "pixtral",
    "smolvlm",
)
HYBRIDS = ("qwen3_5", "qwen3_5_moe")
BY_PIXEL = ("lfm2_vl",)  # whose patches are pixel by pixel
QWEN = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", *HYBRIDS)
GRIDS = (*GLM, *QWEN)
CROSSED = ("idefics", "mllama")  # whose layers attend to images
FAMILIES = (*CAUSAL, *BY_PIXEL, "gemma3", "gemma4", "paligemma", *GRIDS, *CROSSED)
PROCESSOR = {
    **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
    **{"image_mean": [0.48, 0.45, 0.40], "image_std": [0.26, 0.27, 0.28]},
}
RESCALED = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": False}
NEW = 6
STATE_SLOTS = 32
PLAIN = ImageRules()


@dataclass(frozen=True)
class Picture:
    """An image as the shard gets it, and how many features it has."""

    bundle: dict[str, NDArray[Any]]
    features: int

    @property
    def key(self) -> bytes:
        parts = (name.encode() + array.tobytes() for name, array in self.bundle.items())
        return hashlib.sha256(b"".join(parts)).digest()


def make_folder(folder: Path, family: str, **text: Any) -> Path:
    make_wrapped(folder, family, image_token=IMAGE_TOKEN, **text)
    settings = RESCALED if family == "gemma4" else PROCESSOR
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def picture(family: str, seed: int) -> Picture:
    """Return an image of noise; all of a family are of one size."""
    draw = np.random.default_rng(seed)

    def pixels(*shape: int) -> NDArray[np.uint8]:
        return draw.integers(0, 256, shape, np.uint8)

    match family:
        case _ if family in TILED:  # two tiles, and the whole
            return Picture({"pixel_values": pixels(3, 3, 16, 16)}, 3)
        case _ if family in WHOLE:
            return Picture({"pixel_values": pixels(1, 3, 16, 16)}, 4)
        case "llava_next" | "llava_next_video":  # a whole and two halves, and what parts their rows
            sizes = np.array([[14, 30]])
            bundle = {"pixel_values": pixels(1, 3, 3, 16, 16), "image_sizes": sizes}
            return Picture(bundle, 4 + 8 + 2)
        case "idefics2":
            mask = np.ones((1, 1, 16, 16))
            return Picture(
                {"pixel_values": pixels(1, 1, 3, 16, 16), "pixel_attention_mask": mask}, 2
            )
        case "idefics3" | "smolvlm":  # three tiles
            mask = np.ones((1, 3, 16, 16))
            return Picture(
                {"pixel_values": pixels(1, 3, 3, 16, 16), "pixel_attention_mask": mask}, 3
            )
        case "idefics":
            return Picture({"pixel_values": pixels(1, 3, 16, 16)}, 1)
        case "mllama":  # two tiles, one of them of nothing
            tiles = np.zeros((1, 1, 2, 3, 16, 16), np.uint8)
            used = 2 - seed % 2
            tiles[:, :, :used] = pixels(1, 1, used, 3, 16, 16)
            mask = (np.arange(2) < used)[None, None].astype(np.uint8)
            shape = np.array([[used]])  # of the shapes that there are, counted from one
            bundle = {"pixel_values": tiles, "aspect_ratio_ids": shape, "aspect_ratio_mask": mask}
            return Picture({**bundle, "num_tiles": shape}, 1)
        case "gemma4":  # patches of all channels, pooled two by two, and some of nothing
            places = np.stack(np.meshgrid(np.arange(6), np.arange(4)), axis=-1).reshape(24, 2)
            places = np.concatenate((places, np.full((8, 2), -1)))[None]
            patches = pixels(1, 32, 48)
            patches[:, 24:] = 0
            return Picture({"pixel_values": patches, "image_position_ids": places}, 6)
        case "lfm2_vl":  # two tiles and the whole, which has more patches
            shapes = np.array([[4, 4], [4, 4], [4, 6]])
            mask = np.arange(24) < shapes.prod(axis=1)[:, None]
            patches = pixels(3, 24, 4 * 4 * 3) * mask[:, :, None]
            parts = {"pixel_attention_mask": mask.astype(np.uint8), "spatial_shapes": shapes}
            return Picture({"pixel_values": patches, **parts}, 4 + 4 + 6)
        case _ if family in (*GRIDS, "lfm3_vl"):  # patches of two frames, merged two by two
            grid = np.array([[1, 4, 6]])
            return Picture({"pixel_values": pixels(24, 2 * 3 * 16), "image_grid_thw": grid}, 6)
        case "pixtral":
            sizes = np.array([[16, 24]])
            return Picture({"pixel_values": pixels(1, 3, 16, 24), "image_sizes": sizes}, 6)
        case _:  # mistral3: patches are merged, two by two
            sizes = np.array([[32, 16]])
            return Picture({"pixel_values": pixels(1, 3, 32, 16), "image_sizes": sizes}, 2)


def together(pictures: Sequence[Picture], halves: bool = False) -> dict[str, torch.Tensor]:
    """Return what transformers is given for the images of one prompt.

    `halves`: pixels are normalised in bfloat16.
    """
    found = {}
    names = pictures[0].bundle.keys()
    by_pixel = "spatial_shapes" in names
    # One prompt, many tiles.
    tiles = not {"pixel_attention_mask", "aspect_ratio_mask"}.isdisjoint(names) and not by_pixel
    for name in pictures[0].bundle:
        whole = np.concatenate([each.bundle[name] for each in pictures], axis=1 if tiles else 0)
        if name == "pixel_values" and "image_position_ids" in pictures[0].bundle:
            found[name] = torch.from_numpy(whole.astype(np.float32) * np.float32(1 / 255))
        elif name == "pixel_values" and halves:
            numbers = [torch.tensor(PROCESSOR[f"image_{what}"]) for what in ("mean", "std")]
            centre, spread = (each.bfloat16()[:, None, None] for each in numbers)
            pixels = torch.from_numpy(whole).bfloat16() * (1 / 255)
            found[name] = ((pixels - centre) / spread).float()
        elif name == "pixel_values":
            channels = whole.reshape(len(whole), 3, -1, 1) if whole.ndim == 2 else whole
            mean, deviation = (
                np.array(PROCESSOR[f"image_{what}"], np.float32)[:, None, None]
                for what in ("mean", "std")
            )
            if by_pixel:
                channels = whole.reshape(*whole.shape[:2], -1, 3)
                mean, deviation = mean.reshape(3), deviation.reshape(3)
            channels = (channels.astype(np.float32) * np.float32(1 / 255) - mean) / deviation
            found[name] = torch.from_numpy(channels.astype(np.float32).reshape(whole.shape))
        else:
            found[name] = torch.from_numpy(whole.astype(np.int64))
    if "aspect_ratio_mask" in found:
        found["pixel_values"] *= found["aspect_ratio_mask"][..., None, None, None]
        del found["num_tiles"]
    return found


def shown(prompt: Prompt, more: int) -> torch.Tensor:
    """Return which tiles the tokens of a prompt see, and `more` behind them, as the processor of
    Llama 3.2 Vision says.
    """
    from transformers.models.mllama import processing_mllama as theirs

    ids, counts = prompt.ids, [each.bundle["num_tiles"].item() for each in prompt.pictures]
    spans = theirs.get_cross_attention_token_mask(ids, IMAGE_TOKEN)
    mask = theirs.convert_sparse_cross_attention_mask_to_dense([spans], [counts], 2, len(ids))
    found = torch.from_numpy(mask)
    return torch.cat((found, found[:, -1:].expand(-1, more, -1, -1)), dim=1)


def shown_apart(prompt: Prompt, more: int) -> torch.Tensor:
    """Return which images the tokens of a prompt see, and `more` behind them, as the processor of
    Idefics 1 says.
    """
    from transformers.models.idefics import processing_idefics as theirs

    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda _: IMAGE_TOKEN, eos_token_id=END)
    ids = torch.tensor([prompt.ids])
    which, _ = theirs.image_attention_mask_for_packed_input_ids(ids, tokenizer, "pt")
    count = len(prompt.pictures)
    found = theirs.incremental_to_binary_attention_mask(which, "pt", num_classes=count)
    return torch.cat((found, found[:, -1:].expand(-1, more, -1)), dim=1)


@dataclass(frozen=True)
class Prompt:
    """Ids and images; an image's tokens stand where the ids have IMAGE_TOKEN."""

    ids: list[int]
    pictures: tuple[Picture, ...]

    @classmethod
    def of(cls, *parts: int | Picture) -> Prompt:
        """Make a prompt of ids and images in turn."""
        ids: list[int] = []
        for part in parts:
            ids += [IMAGE_TOKEN] * part.features if isinstance(part, Picture) else [part]
        return cls(ids, tuple(part for part in parts if isinstance(part, Picture)))


class CountingTower:
    """An encoder that counts."""

    def __init__(self, tower: ImageEncoder) -> None:
        self._tower = tower
        self.encoded = 0

    def encode(self, bundle: Bundle) -> ImageFeatures:
        self.encoded += 1
        return self._tower.encode(bundle)


class Shard:
    """One runner's batch and desk, stepped by hand."""

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
        self.desk = ImageDesk(self.tower, arena, memory, rules)
        self.seen: list[tuple[int, int]] = []
        self.pieces: list[int] = []  # tokens of each step
        self.guessed = 0
        self._arena = arena
        self._end = 0  # of what is used of the arena
        self._block = 1
        info = runner.info
        self._keeps_states = info.state_bytes > 0
        self.batch = Batch(
            vocab_size=info.vocab_size,
            block_size=BLOCK,
            blocks=10_000,
            eos_ids=(),
            drafter=drafter or (runner.drafter(2) if info.speculates else None),
            draft_budget=info.draft_budget,
            state_slots=STATE_SLOTS if self._keeps_states else 0,
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
        if self._keeps_states and states is None:
            states = StateGrant((1 + 2 * id, 2 + 2 * id))
        images, at = [], 0
        for picture in prompt.pictures:
            first = prompt.ids.index(IMAGE_TOKEN, at)
            at = first + picture.features
            runs = ((0, picture.features),)
            place = self.place(picture)
            images.append(SequenceImage(first, picture.features, runs, picture.key, place))
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
            geometry = self.desk.add(sequence, row.images)
            if geometry is not None:
                self.batch.shape(id, geometry)
        return sequence

    def drop(self, id: int) -> None:
        """Do what a FILTER does: the sequence is preempted, or its client gone."""
        for sequence in self.batch.remove([id]):
            self.runner.drop(sequence)
            self.desk.drop(id)

    def step(self, budget: int = 1000) -> bool:
        """Do a turn of the loop; return whether anything moved."""
        if self.desk.is_busy:
            self.desk.advance()
            assert not self.desk.take_faults()
        self.seen += self.desk.seen
        self.desk.seen = {}
        for sequence in self.batch.held:
            if sequence.id not in self.desk and self.runner.prepare(sequence):
                self.batch.hold(sequence.id, False)
        plan = self.batch.plan(budget)
        if plan is None:
            return self.desk.is_waiting
        self.pieces.append(len(plan.token_ids))
        self.guessed += 0 if plan.drafts is None else int(plan.drafts.sum())
        moved = self.batch.settle(plan, self.runner.step(plan))
        assert not moved.faults, moved.faults
        for sequence in moved.dropped:
            self.desk.drop(sequence.id)
        return True

    def run(self, budget: int = 1000) -> None:
        while self.step(budget):
            pass


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

    def _inputs(self, prompt: Prompt, more: int = 0) -> dict[str, torch.Tensor]:
        """Return what the model is given of images beside a prompt's ids and `more` behind them."""
        family = self.model.config.model_type
        if not prompt.pictures and family == "idefics":  # as its processor has it
            places = torch.zeros(1, len(prompt.ids) + more, 1, dtype=torch.long)
            return {"pixel_values": torch.zeros(1, 1, 3, 16, 16), "image_attention_mask": places}
        if not prompt.pictures:
            return {}
        inputs = together(prompt.pictures, halves=family == "llama4")
        kinds = torch.tensor([[id == IMAGE_TOKEN for id in prompt.ids] + [False] * more]).long()
        if family == "gemma3":
            inputs["token_type_ids"] = kinds
        elif family == "paligemma":  # 0: sees all that is
            inputs["token_type_ids"] = (torch.arange(kinds.shape[1]) >= len(prompt.ids))[
                None
            ].long()
        elif family in (*GRIDS, "gemma4"):
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
        """Return what each of `tokens` is chosen from, by one pass over everything."""
        ids = torch.tensor([[*prompt.ids, *tokens]])
        inputs = self._inputs(prompt, len(tokens))
        found = self.model(input_ids=ids, **inputs).logits[0, len(prompt.ids) - 1 : -1]
        return found.float()

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
        largest = expected.abs().max() if self.model.config.model_type in HYBRIDS else 1.0
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
        one, two = (picture(self.family, seed) for seed in (1, 2))
        return [
            Prompt.of(5, 6, 7, one, 8, 9),
            Prompt.of(one, 20, two, 21),
            Prompt.of(*range(5, 40)),
            Prompt.of(9, two, 12, two, 11),
        ]


Maker = Callable[..., Model]


@contextmanager
def arena(nbytes: int = 2**20) -> Iterator[ImageArena]:
    with ImageArena.create(nbytes) as made:
        yield made
