"""The queue of media that wait for their features; a tower runs for one between two steps.

A sequence is left out of steps until it has the features of all its images. It keeps them until its
prompt is computed, however that is divided into chunks, or until its end if layers of the text
attend to images. A store keeps features by content as well. Pixels stay in the arena until the
router is told that they are no longer needed.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from tgi_trio.errors import CorruptFrame
from tgi_trio.ipc.images import SOUND, ImageArena, SequenceImage, read_bundle
from tgi_trio.ipc.messages import Fault
from tgi_trio.model.image_rules import ImageRules
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.loop.step_columns import Columns
from tgi_trio.shard.media.features import Bundle, FeatureStore, ImageEncoder, ImageFeatures
from tgi_trio.shard.media.held_image import HeldImage
from tgi_trio.shard.media.prompt_geometry import (
    BundleGrid,
    ImageGrid,
    PromptGeometry,
    shape_prompt,
)
from tgi_trio.shard.media.video_grids import join_features, split_grids
from tgi_trio.shard.positions.canvas_turns import turn_by_canvases
from tgi_trio.shard.positions.numbered_turns import turn_by_numbers

# Makes the queue once the model is loaded; takes the cores that towers may be computed on.
ImageSource: TypeAlias = "Callable[[Set[int]], ImageQueue]"

_PLAIN: Final = ImageRules()
_NO_TOWER = "this server computes no images of this model"


@dataclass(slots=True)
class _Work:
    """A sequence whose images are not all computed."""

    sequence: ShardSequence
    images: tuple[SequenceImage, ...]
    missing: list[int] = field(default_factory=list)  # which of `images`, in order


@dataclass(slots=True)
class _Begun:
    """A video whose first parts are computed."""

    key: bytes
    parts: list[ImageFeatures] = field(default_factory=list)
    took: int = 0  # nanoseconds


class ImageQueue:
    """Computes the media of a shard's sequences, in order of arrival."""

    def __init__(
        self,
        encoder: ImageEncoder | None,
        arena: ImageArena | None,
        feature_memory: int,
        rules: ImageRules = _PLAIN,
        refusal: str = _NO_TOWER,
        peak: Callable[[], int] = lambda: 0,
    ) -> None:
        """`rules`: of the model. `feature_memory`: bytes of features that are kept by content.
        Sequences whose prompts are being computed, or that attend to images to their ends, may
        hold as many again, and one sequence more than that: others wait. `refusal`: why sequences
        with images are refused, where there is no encoder. `peak`: measures for `measure`.
        """
        self._peak = peak
        self._refusal = refusal
        self._encoder = encoder
        self._arena = arena
        self._most = feature_memory
        self._rules = rules
        self._store = FeatureStore(feature_memory)
        self._waiting: dict[int, _Work] = {}  # by sequence, in order of arrival
        self._using: dict[int, ShardSequence] = {}  # whose features are held
        # By (sequence, which of its images), where the bundle is not needed any more: nanoseconds
        # of the tower, 0 where it was not run.
        self.seen: dict[tuple[int, int], int] = {}
        self._faults: list[Fault] = []
        self._begun: _Begun | None = None
        self.is_partial = False  # the last `advance` has computed a part of a video, not its last
        self._raised = False  # the encoder, in this turn

    def __contains__(self, sequence: int) -> bool:
        """Whether a sequence waits for features."""
        return sequence in self._waiting

    @property
    def is_waiting(self) -> bool:
        """Whether features can be computed now, without which some sequence does not go on."""
        return any(map(self._has_room, self._waiting.values()))

    @property
    def is_busy(self) -> bool:
        """Whether there is anything for `advance` to do."""
        return bool(self._waiting or self._using)

    def measure(self) -> int:
        """Return the bytes of its device that the encoder takes for the largest image.

        Raises ConfigurationError where there are not as many.
        """
        return self._peak()

    def take_computed(self) -> Columns:
        """Return what is `seen` as columns of a STEP frame, and forget it."""
        seen, self.seen = self.seen, {}
        sequences, which = zip(*seen, strict=True)
        return {
            "seen_sequence": np.array(sequences, np.uint64),
            "seen_image": np.array(which),
            "seen_ns": np.array(list(seen.values()), np.uint64),
        }

    def take_faults(self) -> list[Fault]:
        """Return whose images have failed, and forget it."""
        faults, self._faults = self._faults, []
        return faults

    def add(
        self, sequence: ShardSequence, images: tuple[SequenceImage, ...]
    ) -> PromptGeometry | None:
        """Take in the images of a sequence; ValueError says why it cannot be run.

        Returns what they change of its prompt; None: nothing.
        """
        if self._encoder is None or self._arena is None:
            raise ValueError(self._refusal)
        _check(sequence, images)
        geometry = self._shape(sequence, images)
        lasting = self._rules.image_attention == "layers"
        needed = [i for i, image in enumerate(images) if lasting or image.end > sequence.computed]
        self.seen |= {(sequence.id, i): 0 for i in range(len(images)) if i not in needed}
        if needed:
            self._waiting[sequence.id] = _Work(sequence, images, needed)
        return geometry

    def _shape(
        self, sequence: ShardSequence, images: tuple[SequenceImage, ...]
    ) -> PromptGeometry | None:
        """Return what a sequence's images change of its prompt.

        Grids are read of those as well whose features no step needs: they say how what follows
        turns.
        """
        grids: list[BundleGrid] = []
        if self._rules.image_attention == "image" or self._rules.merge:
            # No tokens of a sound see those behind them, and all turn as those of a text.
            images = tuple(image for image in images if not self._is_sound(image))
        if self._rules.merge and self._arena is not None:
            try:
                bundles = [read_bundle(self._arena.view(image.place)) for image in images]
            except CorruptFrame as error:
                raise ValueError(f"its image cannot be read: {error}") from error
            if self._rules.marks:
                ids = sequence.token_ids[: sequence.prompt_length]
                pairs = zip(images, bundles, strict=True)
                parts = [_read_parts(image, bundle, self._rules.merge) for image, bundle in pairs]
                return PromptGeometry(turn_by_canvases(ids, parts, self._rules.marks))
            grids = [_read_grid(bundle, self._rules) for bundle in bundles]
            if self._rules.numbered:
                return PromptGeometry(turn_by_numbers(images, grids, self._rules.numbered))
        return shape_prompt(self._rules, images, grids, sequence.prompt_length)

    def _is_sound(self, image: SequenceImage) -> bool:
        """Whether an image of a sequence is a sound; raises ValueError."""
        if self._arena is None:
            return False
        try:
            return SOUND in read_bundle(self._arena.view(image.place))
        except CorruptFrame as error:
            raise ValueError(f"its image cannot be read: {error}") from error

    def drop(self, sequence: int) -> None:
        """Forget a sequence: it has ended, or its prompt is computed."""
        self._waiting.pop(sequence, None)
        if (held := self._using.pop(sequence, None)) is not None:
            held.images.clear()

    def advance(self) -> bool:
        """Find features that are kept, and compute those of one image, or part of a video, at most.

        Returns whether the encoder raised what nobody foresaw: it may be the device.
        """
        self._raised = self.is_partial = False
        if self._rules.image_attention != "layers":
            self._drop_used()
        computed = False
        for work in list(self._waiting.values()):
            if not self._has_room(work):
                continue
            while work.missing:
                features, took = self._store.find(work.images[work.missing[0]].key), 0
                if features is None:
                    if computed:
                        break
                    began = time.monotonic_ns()
                    features, computed = self._compute(work), True
                    took = time.monotonic_ns() - began
                    if self._begun is not None:
                        self._begun.took += took
                        took = self._begun.took
                    if features is None:
                        break
                    self._begun = None
                self._give(work, features, took)
        return self._raised

    def _drop_used(self) -> None:
        """Let go of the features that no step needs any more."""
        for sequence in [s for s in self._using.values() if s.computed >= s.images[-1].end]:
            if sequence.id not in self._waiting:
                self.drop(sequence.id)

    def _has_room(self, work: _Work) -> bool:
        """Whether the features of one more sequence may be held: those that have some go on."""
        if work.sequence.id in self._using or not self._using:
            return True
        held = (image.features for own in self._using.values() for image in own.images)
        return sum(each.nbytes for each in {id(each): each for each in held}.values()) < self._most

    def _compute(self, work: _Work) -> ImageFeatures | None:
        """Return the features of a sequence's next image; None: it has failed, or is not done."""
        image = work.images[work.missing[0]]
        try:
            if self._encoder is None or self._arena is None:
                raise ValueError(self._refusal)
            bundle = read_bundle(self._arena.view(image.place))
            parts = list(split_grids(bundle))
            if self._begun is None or self._begun.key != image.key:
                self._begun = _Begun(image.key)
            begun = self._begun
            begun.parts.append(self._encoder.encode(parts[len(begun.parts)]))
            if len(begun.parts) < len(parts):
                self.is_partial = True
                return None
            features = join_features(begun.parts)
            found = len(features.rows)
            if features.states is None and found != image.features:
                raise ValueError(f"{found} features, but {image.features} tokens for them")
        except (CorruptFrame, ValueError) as error:
            self._fail(work, f"its image cannot be computed: {error}")
            return None
        except Exception as error:  # whatever a tower raises: the others go on
            traceback.print_exc(file=sys.stderr)
            self._raised = True
            self._fail(work, f"its image cannot be computed: {type(error).__name__}: {error}")
            return None
        self._store.keep(image.key, features)
        return features

    def _give(self, work: _Work, features: ImageFeatures, took: int) -> None:
        which = work.missing.pop(0)
        positions = work.images[which].positions()
        until = self._find_end(work.sequence, int(positions[0]))
        work.sequence.images.append(HeldImage(positions, features, until))
        self._using[work.sequence.id] = work.sequence
        self.seen[work.sequence.id, which] = took
        if not work.missing:
            del self._waiting[work.sequence.id]

    def _find_end(self, sequence: ShardSequence, first: int) -> int | None:
        """Return the position behind the text that shows an image at `first`; None: none ends it.

        The last token of a prompt ends nothing: what is written behind it goes on.
        """
        said = sequence.token_ids[first : sequence.prompt_length - 1]
        ends = np.flatnonzero(said == self._rules.end_token)
        return first + int(ends[0]) + 1 if len(ends) else None

    def _fail(self, work: _Work, why: str) -> None:
        self._begun = None
        self._faults.append(Fault(work.sequence.id, why))
        self.drop(work.sequence.id)


def _read_grid(bundle: Bundle, rules: ImageRules) -> BundleGrid:
    """Return the grid of an image's features; raises ValueError where it says none."""
    found = bundle.get("image_grid_thw")
    if found is None or found.shape != (1, 3) or (found < 1).any():
        raise ValueError("its image does not say its rows and columns")
    grids, rows, columns = found[0].tolist()
    rows, columns = rows // rules.merge, columns // rules.merge
    seconds = bundle.get("seconds_per_grid")
    if seconds is None or not rules.by_second:
        return BundleGrid(rows, columns, grids)
    if seconds.shape != (1,) or not 0 < seconds[0] < np.inf:
        raise ValueError("its video does not say how many seconds there are from grid to grid")
    if rules.seconds_first:
        return BundleGrid(rows, columns, grids, float(seconds[0]), rules.by_second)
    return BundleGrid(rows, columns, grids, float(np.float32(rules.by_second) * seconds[0]))


def _read_parts(image: SequenceImage, bundle: Bundle, merge: int) -> list[ImageGrid]:
    """Return an image's parts, each a run of its features; raises ValueError if they are others."""
    sizes = bundle.get("target_sizes", np.empty((0, 2), np.int32)) // merge
    wanted = [count for _, count in image.runs]
    if sizes.shape[1:] != (2,) or sizes.prod(axis=1).tolist() != wanted:
        raise ValueError(f"an image with runs of {wanted} features says other rows and columns")
    runs = zip(image.runs, sizes.tolist(), strict=True)
    return [ImageGrid(image.first + offset, *size) for (offset, _), size in runs]


def _check(sequence: ShardSequence, images: tuple[SequenceImage, ...]) -> None:
    """Raise ValueError unless images come one after the other within a sequence."""
    place = 0
    for image in images:
        at = 0
        for offset, count in image.runs:
            if offset < at or not count:
                raise ValueError(f"an image at {image.first} has feature tokens out of order")
            at = offset + count
        if image.first < place or at > image.tokens or image.end > sequence.length or not at:
            raise ValueError(
                f"an image of {image.tokens} tokens at {image.first} does not fit its sequence"
            )
        place = image.end
