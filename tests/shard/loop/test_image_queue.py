"""Images between steps: one tower at a time, who waits for it, what is kept and what is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.shard.loop.scripted_router import BLOCK, answer, channel, fake_shard
from tests.shard.loop.scripted_router import row as prefill
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.images import ArenaPlace, ImageArena, SequenceImage, write_bundle
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.startup import WarmupRequest, WarmupResult
from tgi_trio.model.image_rules import ImageRules
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.loop.image_queue import ImageQueue, ImageSource
from tgi_trio.shard.loop.soundness import RunnerBroken
from tgi_trio.shard.media import video_grids
from tgi_trio.shard.media.features import Bundle, FeatureStore, ImageFeatures
from tgi_trio.testing.fake_model import FakeRunner, FakeSettings
from tgi_trio.testing.fake_shard import FakeShard

EACH = 4 * 4 * 8  # bytes of an image's features


class FakeTower:
    """Makes of an image four features of its only number; counts, and fails at 13."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode(self, bundle: Bundle) -> ImageFeatures:
        number = int(bundle["pixel_values"][0])
        self.encoded.append(number)
        if number == 13:
            raise RuntimeError("an unlucky image")
        return ImageFeatures(np.full((5 if number == 14 else 4, 8), number, np.float32))


@pytest.fixture
def arena() -> Iterator[ImageArena]:
    """Yield an arena whose images have a number each: that of its place."""
    with ImageArena.create(20 * 256) as made:
        for number in range(20):
            place = made.view(ArenaPlace(256 * number, 256))
            write_bundle(place, {"pixel_values": np.array([number])})
        yield made


def images(*numbers: int, gap: int = 2) -> tuple[SequenceImage, ...]:
    """Return images of six tokens, the middle four features, `gap` tokens in between."""
    return tuple(
        SequenceImage(gap + i * (6 + gap), 6, ((1, 4),), bytes([n]) * 32, ArenaPlace(256 * n, 256))
        for i, n in enumerate(numbers)
    )


def sequence(id: int, computed: int = 0, length: int = 40) -> ShardSequence:
    ids = np.zeros(length, np.int32)
    return ShardSequence(id, ids, length, length, computed, [], 9, 0, SamplingParameters())


def turns(queue: ImageQueue, tower: FakeTower, count: int) -> list[int]:
    """Return how many towers each of some turns computed."""
    found = []
    for _ in range(count):
        before = len(tower.encoded)
        queue.advance()
        found.append(len(tower.encoded) - before)
    return found


def test_one_image_between_two_steps(arena: ImageArena) -> None:
    tower = FakeTower()
    queue = ImageQueue(tower, arena, 10 * EACH)
    rows = [sequence(1), sequence(2), sequence(3)]
    for row, numbers in zip(rows, ((1, 2), (2,), (1,)), strict=True):
        queue.add(row, images(*numbers))
    assert turns(queue, tower, 4) == [1, 1, 0, 0] and tower.encoded == [1, 2]
    assert sorted(queue.seen) == [(1, 0), (1, 1), (2, 0), (3, 0)]
    assert not queue.is_waiting and 1 not in queue
    assert [len(row.images) for row in rows] == [2, 1, 1]
    assert rows[0].images[1].positions.tolist() == [11, 12, 13, 14]
    placed = rows[0].images[1].between(12, 14)
    assert placed is not None and placed.places.tolist() == [0, 1] and (placed.rows == 2).all()
    columns = queue.take_computed()
    assert len(columns["seen_sequence"]) == 4 and not queue.seen
    images_of = list(zip(columns["seen_sequence"], columns["seen_image"], strict=True))
    took = dict(zip(images_of, columns["seen_ns"].tolist(), strict=True))
    assert {each for each, ns in took.items() if ns} == {(1, 0), (1, 1)}, "the others found theirs"


def test_who_waits_for_a_tower_is_passed_by_who_does_not(arena: ImageArena) -> None:
    tower = FakeTower()
    queue = ImageQueue(tower, arena, 10 * EACH)
    queue.add(sequence(1), images(1))
    queue.advance()
    queue.add(sequence(2), images(2, 3))
    queue.add(sequence(3), images(1))
    queue.advance()
    assert 2 in queue and 3 not in queue


def test_features_go_when_the_prompt_is_computed(arena: ImageArena) -> None:
    tower = FakeTower()
    queue = ImageQueue(tower, arena, 10 * EACH)
    row = sequence(1)
    queue.add(row, images(1))
    queue.advance()
    row.computed = 6
    queue.advance()
    assert row.images and queue.is_busy
    row.computed = 7
    queue.advance()
    assert not row.images and not queue.is_busy


def test_features_that_layers_attend_to_stay_to_the_end(arena: ImageArena) -> None:
    """Those of one sequence more than there is room for; an image of several counts once."""
    tower = FakeTower()
    queue = ImageQueue(tower, arena, EACH + 1, ImageRules("layers"))
    rows = [sequence(i) for i in range(4)]
    queue.add(rows[0], images(1))
    queue.add(replace(rows[1], computed=20), images(1))  # a prefix has its K and V
    for row, number in zip(rows[2:], (2, 3), strict=True):
        queue.add(row, images(number))
    assert turns(queue, tower, 3) == [1, 1, 0] and tower.encoded == [1, 2]
    assert 1 not in queue and 2 not in queue and 3 in queue
    assert not queue.is_waiting, "nothing can be done for the last one"
    rows[2].computed = 30
    assert turns(queue, tower, 2) == [0, 0] and rows[2].images
    queue.drop(2)
    assert queue.is_waiting and turns(queue, tower, 1) == [1] and 3 not in queue


def test_what_the_largest_image_takes_is_told_before_the_cache_is_sized(
    arena: ImageArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    warm_up = FakeRunner.warm_up

    def note(runner: FakeRunner, request: WarmupRequest) -> WarmupResult:
        told.append(request.tower_bytes)
        return warm_up(runner, request)

    monkeypatch.setattr(FakeRunner, "warm_up", note)
    with fake_shard(images=lambda cores: ImageQueue(FakeTower(), arena, EACH, peak=lambda: 7)):
        assert told == [7]


def test_memory_for_features_is_bounded(arena: ImageArena) -> None:
    """Who has begun goes on; the next one begins when others have let theirs go."""
    tower = FakeTower()
    queue = ImageQueue(tower, arena, EACH)
    rows = [sequence(1), sequence(2), sequence(3)]
    for i, row in enumerate(rows):
        queue.add(row, images(2 * i + 1, 2 * i + 2))
    assert turns(queue, tower, 4) == [1, 1, 0, 0] and 2 in queue
    rows[0].computed = 20
    assert turns(queue, tower, 3) == [1, 1, 0] and 2 not in queue and 3 in queue
    queue.drop(2)
    assert turns(queue, tower, 3) == [1, 1, 0] and not queue.is_waiting


def test_what_a_prefix_holds_is_not_computed(arena: ImageArena) -> None:
    tower = FakeTower()
    queue = ImageQueue(tower, arena, 10 * EACH)
    queue.add(sequence(1, computed=8), images(1, 2))
    assert queue.seen == {(1, 0): 0}
    queue.advance()
    assert list(queue.seen) == [(1, 0), (1, 1)] and tower.encoded == [2]
    queue.add(sequence(2, computed=16), images(1, 2))
    assert list(queue.seen)[2:] == [(2, 0), (2, 1)] and 2 not in queue


@pytest.mark.parametrize(
    ("number", "why"),
    [(13, "RuntimeError: an unlucky image"), (14, "5 features, but 4 tokens"), (25, "is none of")],
)
def test_a_sequence_fails_alone(arena: ImageArena, number: int, why: str) -> None:
    queue = ImageQueue(FakeTower(), arena, 10 * EACH)
    queue.add(sequence(1), images(1, number))
    queue.add(sequence(2), images(3))
    for _ in range(4):
        queue.advance()
    (fault,) = queue.take_faults()
    assert fault.sequence == 1 and "its image cannot be computed" in fault.message
    assert why in fault.message and not queue.take_faults()
    assert not queue.is_waiting and (2, 0) in queue.seen


def test_a_sequence_that_has_left_is_not_computed(arena: ImageArena) -> None:
    tower = FakeTower()
    queue = ImageQueue(tower, arena, 10 * EACH)
    queue.add(sequence(1), images(1, 2))
    queue.advance()
    queue.drop(1)
    queue.drop(1)
    assert turns(queue, tower, 2) == [0, 0] and not queue.is_busy


def image(first: int, tokens: int, *runs: tuple[int, int]) -> SequenceImage:
    return SequenceImage(first, tokens, runs, bytes(32), ArenaPlace(0, 256))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([image(35, 6, (0, 6))], "6 tokens at 35 does not fit"),
        ([image(0, 6, (0, 7))], "6 tokens at 0 does not fit"),
        ([image(0, 6)], "6 tokens at 0 does not fit"),
        ([image(0, 6, (3, 2), (4, 1))], "at 0 has feature tokens out of order"),
        ([image(0, 6, (3, 0))], "at 0 has feature tokens out of order"),
        ([image(4, 6, (0, 6)), image(8, 6, (0, 6))], "6 tokens at 8 does not fit"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    arena: ImageArena, wrong: Sequence[SequenceImage], why: str
) -> None:
    queue = ImageQueue(FakeTower(), arena, EACH)
    with pytest.raises(ValueError, match=why):
        queue.add(sequence(1), tuple(wrong))
    assert not queue.is_busy


def test_without_a_tower_images_are_refused() -> None:
    with pytest.raises(ValueError, match="this server computes no images of this model"):
        ImageQueue(None, None, 0).add(sequence(1), images(1))
    with pytest.raises(ValueError, match="its images are not served: of no family"):
        queue = ImageQueue(None, None, 0, refusal="its images are not served: of no family")
        queue.add(sequence(1), images(1))


def test_the_least_recently_used_features_are_dropped() -> None:
    store = FeatureStore(2 * EACH)
    each = {n: ImageFeatures(np.full((4, 8), n, np.float32)) for n in range(3)}
    store.keep(b"0", each[0])
    store.keep(b"1", each[1])
    assert store.find(b"0") is each[0]
    store.keep(b"2", each[2])
    assert store.find(b"1") is None and store.find(b"0") is each[0]
    assert store.nbytes == 2 * EACH
    store.keep(b"3", ImageFeatures(np.zeros((9, 8), np.float32)))
    assert store.find(b"3") is None and store.find(b"2") is each[2]


def test_a_prompt_is_shaped_by_its_images(arena: ImageArena) -> None:
    """By grids of images, too, of which no feature is needed."""
    grids = {0: [1, 4, 4], 1: [1, 2, 8], 2: [1, 4, 6], 3: [1, 4]}
    for number, grid in grids.items():
        bundle = {"image_grid_thw": np.array([grid])}  # no pixels: nothing computes it
        write_bundle(arena.view(ArenaPlace(256 * number, 256)), bundle)
    queue = ImageQueue(FakeTower(), arena, 10 * EACH, ImageRules(merge=2))
    geometry = queue.add(sequence(1, computed=30), images(0, 1))
    assert geometry is not None and geometry.turns is not None
    assert geometry.turns[:, 3:7].tolist() == [[3, 3, 3, 3], [3, 3, 4, 4], [3, 4, 3, 4]]
    assert geometry.turns[:, 11:].tolist() == [[9] * 4, [9] * 4, [9, 10, 11, 12]]
    assert 1 not in queue and queue.seen == {(1, 0): 0, (1, 1): 0}
    for number, why in ((2, "2 x 3 features has 4"), (3, "rows and columns"), (9, "rows and")):
        with pytest.raises(ValueError, match=why):
            queue.add(sequence(2), images(number))
    assert (
        2 not in queue and ImageQueue(FakeTower(), arena, EACH).add(sequence(3), images(9)) is None
    )
    spans = ImageQueue(FakeTower(), arena, EACH, ImageRules("image")).add(sequence(3), images(9, 8))
    assert spans is not None and spans.spans.tolist() == [[3, 7], [11, 15]]


def test_a_prompt_is_shaped_by_the_parts_of_its_images(arena: ImageArena) -> None:
    for number, sizes in enumerate(([[4, 4]], [[4, 4], [4, 4]])):
        bundle = {"target_sizes": np.array(sizes)}
        write_bundle(arena.view(ArenaPlace(256 * number, 256)), bundle)
    rules = ImageRules(merge=2, marks=frozenset({5}))
    queue = ImageQueue(FakeTower(), arena, 10 * EACH, rules)
    geometry = queue.add(sequence(1, computed=30), images(0))
    assert geometry is not None and geometry.turns is not None
    assert geometry.turns[1:, 2:7].tolist() == [[1, 2, 2, 3, 3], [1, 2, 3, 2, 3]]
    for number in (1, 9):
        with pytest.raises(ValueError, match=r"runs of \[4\] features says other rows"):
            queue.add(sequence(2), images(number))


# --- in the loop --------------------------------------------------------------------------------


def test_the_loop_computes_images_and_says_which_it_has_seen(arena: ImageArena) -> None:
    tower = FakeTower()
    prompt = list(range(3, 23))
    with fake_shard(images=lambda cores: ImageQueue(tower, arena, 10 * EACH)) as (router, _):
        requests = [
            replace(prefill(1, prompt, 4), images=images(1, 2)),
            prefill(2, prompt, 4),
            replace(prefill(3, prompt, 4), images=images(2, 13)),
            replace(prefill(4, prompt, 4), images=images(2, gap=20)),
        ]
        router.prefill(*requests)
        router.finished(1, 2, 3, 4)
        assert router.tokens(1) == router.tokens(2) == answer(prompt, 4)
        assert "RuntimeError: an unlucky image" in (router.fault(3) or "")
        assert "an image of 6 tokens at 20 does not fit" in (router.fault(4) or "")
        seen = [
            pair
            for report in router.reports
            for pair in zip(report.seen_sequence, report.seen_image, strict=True)
        ]
    assert sorted(seen) == [(1, 0), (1, 1), (3, 0)]
    assert sorted(tower.encoded) == [1, 2, 13]


def test_parts_of_a_video_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router hears of each: a video that takes longer than `--stall-timeout` is no hang."""
    monkeypatch.setattr(video_grids, "_TOGETHER", 1)
    grids = 6
    with ImageArena.create(1024) as arena:
        place = ArenaPlace(0, 1024)
        bundle = {"pixel_values": np.arange(grids), "image_grid_thw": np.array([[grids, 1, 1]])}
        write_bundle(arena.view(place), bundle)
        video = SequenceImage(2, 4 * grids, ((0, 4 * grids),), bytes(32), place)
        prompt = list(range(3, 43))
        with fake_shard(images=lambda cores: ImageQueue(FakeTower(), arena, 10_000)) as (router, _):
            router.prefill(replace(prefill(1, prompt, 2), images=(video,)))
            router.finished(1)
            reports = list(router.reports)
            assert router.tokens(1) == answer(prompt, 2)
    empty = [each for each in reports if not each.seen_sequence and not each.sequence]
    assert len(empty) >= grids - 1


def test_a_shard_without_a_tower_refuses_images_and_serves_text() -> None:
    with fake_shard() as (router, _):
        router.prefill(replace(prefill(1, [5] * 20, 2), images=images(1)), prefill(2, [5, 6], 2))
        router.finished(1, 2)
        assert router.fault(1) == "cannot be run: this server computes no images of this model"
        assert router.tokens(2) == answer([5, 6], 2)


def test_a_tower_that_fails_because_the_device_is_broken_ends_the_shard_and_faults_nobody(
    arena: ImageArena, tmp_path: Path
) -> None:
    """Where there are only requests with images, no step would ever find it out."""
    broken = tmp_path / "broken"
    fake = FakeSettings(block_size=BLOCK, broken_while=str(broken))
    source: ImageSource = lambda cores: ImageQueue(FakeTower(), arena, 10 * EACH)  # noqa: E731
    with (
        channel() as (endpoints, router),
        FakeShard(endpoints.spec, fake, source) as shard,
    ):
        router.start()
        broken.touch()
        router.prefill(replace(prefill(1, [5] * 20, 4), images=images(13)))
        shard.wait()
        assert isinstance(shard.error, RunnerBroken)
        while (view := router.end.try_receive()) is not None:  # it may have told that it is idle
            assert Frame(view).kind is not FrameKind.FAULT
            del view
            router.end.release()


def test_a_video_is_computed_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for a part of it; one that is dropped half-way leaves nothing to another."""
    monkeypatch.setattr(video_grids, "_TOGETHER", 1)
    tower = FakeTower()
    with ImageArena.create(4 * 256) as arena:
        for number in (1, 2):
            bundle = {
                "pixel_values": np.array([number, number + 10, number + 20]),
                "image_grid_thw": np.array([[3, 1, 1]]),
            }
            write_bundle(arena.view(ArenaPlace(512 * (number - 1), 512)), bundle)
        queue = ImageQueue(tower, arena, 100 * EACH)
        first, other = (
            SequenceImage(2, 12, ((0, 12),), bytes([n]) * 32, ArenaPlace(512 * (n - 1), 512))
            for n in (1, 2)
        )
        queue.add(sequence(1), (first,))
        queue.advance()
        assert queue.is_partial and queue.is_waiting and tower.encoded == [1]
        queue.drop(1)
        row = sequence(2)
        queue.add(row, (other,))
        told = []
        for _ in range(4):
            queue.advance()
            told.append((queue.is_partial, 2 in queue))
        assert told == [(True, True), (True, True), (False, False), (False, False)]
        assert tower.encoded == [1, 2, 12, 22]
        placed = row.images[0].between(0, 40)
        assert placed is not None and placed.rows[:, 0].tolist() == [2] * 4 + [12] * 4 + [22] * 4
        assert queue.seen[2, 0] > 0
        queue.add(sequence(3), (first,))
        for _ in range(3):
            queue.advance()
        assert tower.encoded[4:] == [1, 11, 21], "all of it, not what was left of the first"
