"""Requests with images: who waits for pixels, until when they are pinned, what is shared."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.router.scheduling.harness import LIMITS, Pair, limits
from tests.router.scheduling.model_shard import ModelShard
from tgi_trio.ipc.images import ArenaPlace
from tgi_trio.ipc.messages import Fault, SamplingParameters, StepReport
from tgi_trio.router.media.layouts.layout import ImageSize
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.request import Request, StoppingCriteria
from tgi_trio.router.scheduling import Filter, Prefill, Scheduler


class FakePixels:
    """Keeps what it was told to keep; counts pins."""

    def __init__(self, *numbers: int) -> None:
        self.there = set(numbers)
        self.pins: Counter[int] = Counter()

    def pin(self, image: PromptImage) -> ArenaPlace | None:
        number = image.key[0]
        if number not in self.there:
            return None
        self.pins[number] += 1
        return ArenaPlace(64 * number, 64)

    def unpin(self, image: PromptImage) -> None:
        assert self.pins[image.key[0]] > 0
        self.pins[image.key[0]] -= 1

    @property
    def pinned(self) -> dict[int, int]:
        return {number: count for number, count in self.pins.items() if count}


def request(*parts: int | str, new: int = 4, images: int = 6) -> Request:
    """Return a request of tokens and images; "3" is image 3, of `images` tokens, two no features.

    Placeholders have the same id in all of them.
    """
    ids: list[int] = []
    found = []
    for part in parts:
        if isinstance(part, str):
            runs = ((1, images - 2),)
            key, size = bytes([int(part)]) * 32, ImageSize(10, 10)
            found.append(PromptImage(len(ids), images, runs, size, key, b""))
            ids += [90, *[91] * (images - 2), 92]
        else:
            ids.append(part)
    return Request(
        prompt_ids=np.array(ids, np.int32),
        sampling=SamplingParameters(ignore_eos=True),
        stopping=StoppingCriteria(max_new_tokens=new),
        images=tuple(found),
    )


def start(pixels: FakePixels) -> tuple[Scheduler, Pair]:
    pair = Pair(limits(prefix_caching=True))
    pair.scheduler.use_pixels(pixels)
    return pair.scheduler, pair


def prefilled(pair: Pair) -> list[int]:
    """Send what is to be sent; return who went to the shard."""
    commands = pair.send()
    return [row.sequence for each in commands if isinstance(each, Prefill) for row in each.rows]


def seen(scheduler: Scheduler, *images: tuple[int, int]) -> None:
    ids, which = [id for id, _ in images], [n for _, n in images]
    scheduler.commit(StepReport(1, 0, seen_sequence=ids, seen_image=which), 0.0)


def test_a_sequence_goes_when_all_its_pixels_are_there() -> None:
    pixels = FakePixels(1)
    scheduler, pair = start(pixels)
    scheduler.add(1, request(5, "1", 6, "2"), 0.0)
    scheduler.add(2, request(7, 8), 0.0)
    assert prefilled(pair) == [2], "who has no images does not wait"
    assert not pixels.pinned, "all or none"
    pixels.there.add(2)
    (command,) = (c for c in pair.send() if isinstance(c, Prefill))
    (row,) = command.rows
    assert [(i.first, i.tokens, i.runs) for i in row.images] == [
        (1, 6, ((1, 4),)),
        (8, 6, ((1, 4),)),
    ]
    assert [image.place.offset for image in row.images] == [64, 128]
    assert [image.key[0] for image in row.images] == [1, 2]
    assert row.token_ids.tolist().count(91) == 8, "the model gets its own ids"
    assert pixels.pinned == {1: 1, 2: 1}


def test_images_are_let_go_when_a_step_says_so() -> None:
    pixels = FakePixels(1, 2)
    scheduler, pair = start(pixels)
    scheduler.add(1, request("1", "2"), 0.0)
    scheduler.add(2, request("2", 5), 0.0)
    assert prefilled(pair) == [1, 2]
    assert pixels.pinned == {1: 1, 2: 2}
    seen(scheduler, (1, 1), (2, 0))
    assert pixels.pinned == {1: 1}
    seen(scheduler, (1, 1), (7, 0), (2, 5))
    assert pixels.pinned == {1: 1}, "twice, of nobody, and of none"
    pair.run()
    assert not pixels.pinned


def test_who_leaves_is_read_until_the_filter_is_acknowledged() -> None:
    pixels = FakePixels(1)
    scheduler, pair = start(pixels)
    scheduler.add(1, request("1", 5), 0.0)
    assert prefilled(pair) == [1]
    scheduler.abort(1, 0.0)
    (command,) = (c for c in pair.send() if isinstance(c, Filter))
    assert pixels.pinned == {1: 1}
    scheduler.commit(StepReport(1, command.number), 0.0)
    assert not pixels.pinned


def test_a_failed_sequence_lets_go() -> None:
    pixels = FakePixels(1)
    scheduler, pair = start(pixels)
    scheduler.add(1, request("1", 5), 0.0)
    prefilled(pair)
    assert scheduler.fault([Fault(1, "unlucky")], 0, 0.0) == [1]
    assert not pixels.pinned


def test_a_replay_pins_again_and_waits_where_pixels_are_gone() -> None:
    pixels = FakePixels(1, 2)
    scheduler, pair = start(pixels)
    scheduler.add(1, request("1", 5), 0.0)
    scheduler.add(2, request("2", 5), 0.0)
    assert prefilled(pair) == [1, 2]
    seen(scheduler, (1, 0))
    scheduler.shard_lost(0.0)
    assert not pixels.pinned
    pixels.there.remove(1)
    pair.shard = ModelShard(LIMITS.block_size)
    assert prefilled(pair) == [2]
    pixels.there.add(1)
    pair.commit(pair.shard.step())
    assert prefilled(pair) == [1] and pixels.pinned == {1: 1, 2: 1}
    pair.run()
    assert not pixels.pinned


def test_without_pixels_images_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="nothing keeps their pixels"):
        Scheduler(LIMITS).add(1, request("1"), 0.0)
