"""A trace plays back to the same answers, and tells when it does not."""

from __future__ import annotations

import json
import random

import pytest

from tests.router.scheduling.harness import Pair, World, limits
from tests.router.scheduling.test_image_pins import FakePixels, seen
from tests.router.scheduling.test_image_pins import request as with_images
from tests.router.scheduling.test_machine import WORLDS, any_request, world
from tgi_trio.errors import Overloaded
from tgi_trio.router.scheduling.kept_prefixes import Budget
from tgi_trio.router.scheduling.trace import RecordingScheduler, TraceMismatch, replay


def recorded(name: str, lines: list[str], veil: int = 1, steps: int = 400) -> World:
    rng = random.Random(name)
    here = world(name)
    here.scheduler = RecordingScheduler(here.limits, lines.append, veil)
    for _ in range(steps):
        choice = rng.random()
        if choice < 0.4:
            deadline = here.now + rng.randint(1, 60) if rng.random() < 0.2 else None
            try:
                here.submit(any_request(rng, deadline=deadline))
            except Overloaded:
                here.turn()
        elif choice < 0.5 and here.open:
            here.abort(rng.choice(sorted(here.open)))
        elif choice < 0.55 and here.open:
            here.finish(rng.choice(sorted(here.open)))
        elif choice < 0.57 and here.shard.rows:
            here.fail(rng.choice(sorted(here.shard.rows)))
        elif choice < 0.58:
            here.crash()
        else:
            here.turn()
        here.expire(1 if choice < 0.8 else None)
    here.run()
    return here


@pytest.mark.sampled(5)
@pytest.mark.parametrize("veil", [1, 0x2545F491])
@pytest.mark.parametrize("name", sorted(WORLDS))
def test_a_trace_replays_to_the_same_state(name: str, veil: int) -> None:
    lines: list[str] = []
    original = recorded(name, lines, veil).scheduler
    again = replay(lines, check_every=7)
    assert again.counters == original.counters
    assert again.free_blocks == original.free_blocks
    assert again.cached_blocks == original.cached_blocks


@pytest.mark.parametrize("name", ["grow, cached", "grow, states"])
def test_a_trace_begins_with_the_prefixes_that_were_restored(name: str) -> None:
    lines: list[str] = []
    *_, found = recorded(name, []).scheduler.collect_prefixes(Budget(1 << 30, 1, 1))
    assert found is not None
    kept = found.prefixes
    here = world(name)
    here.scheduler = RecordingScheduler(here.limits, lines.append, veil=0x2545F491)
    here.scheduler.restore_prefixes(kept, len(kept.runs))
    again = replay(lines)
    assert again.cached_blocks == here.scheduler.cached_blocks == kept.blocks > 0
    assert again.state_slots == here.scheduler.state_slots


def test_a_veil_hides_the_prompts() -> None:
    lines: list[str] = []
    recorded("reserve", lines, veil=0x2545F491, steps=50)
    prompts = [json.loads(line)["request"]["prompt"] for line in lines if '"add"' in line]
    assert prompts and not any(token < 100 for prompt in prompts for token in prompt)
    with pytest.raises(ValueError, match="odd"):
        RecordingScheduler(world("reserve").limits, print, veil=2)


def test_a_different_answer_is_named() -> None:
    lines: list[str] = []
    recorded("grow", lines, steps=50)
    number = next(i for i, line in enumerate(lines) if '"prefill"' in line)
    record = json.loads(lines[number])
    record["out"][-1][2][0][3][0] += 1
    lines[number] = json.dumps(record)
    with pytest.raises(TraceMismatch, match=f"line {number + 1}: schedule gave"):
        replay(lines)


def test_images_are_in_a_trace() -> None:
    """Who waited for pixels, and which prompts share a prefix: those of the same image alone."""
    lines: list[str] = []
    pixels, chosen = FakePixels(), limits(prefix_caching=True)
    pair = Pair(chosen)
    original = pair.scheduler = RecordingScheduler(chosen, lines.append, veil=0x2545F491)
    original.use_pixels(pixels)
    for id, image in enumerate(("1", "2", "1"), start=1):  # of one size, in the same places
        original.add(id, with_images(*range(100, 108), image, 5, 6), 0.0)
        pair.send()
        pixels.there.add(int(image))  # decoded once it has been asked for
        pair.step()
        seen(original, (id, 0))
    pair.run()
    assert original.counters["finished"] == 3 and original.counters["prefix_hit_tokens"] > 0
    again = replay(lines)
    assert again.counters == original.counters
    assert again.cached_blocks == original.cached_blocks
    asked = {number: json.loads(line).get("pinned") for number, line in enumerate(lines)}
    answers = [found for each in asked.values() for found in each or ()]
    assert True in answers and False in answers
    assert not any((bytes([1]) * 32).hex() in line for line in lines)
    number = next(number for number, each in asked.items() if each)
    lines[number] = json.dumps(json.loads(lines[number]) | {"pinned": []})
    with pytest.raises(TraceMismatch, match="an image is asked for that was not"):
        replay(lines)
