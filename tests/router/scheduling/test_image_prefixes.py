"""Prompts with images: which prefixes they share, and what of them no step cuts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.router.scheduling.harness import AllPixels, Pair, limits, request
from tgi_trio.errors import ValidationError
from tgi_trio.router.media.layouts.layout import ImageSize
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.request import Request
from tgi_trio.router.scheduling import Limits, Prefill, Scheduler, image_prefixes
from tgi_trio.router.scheduling.image_prefixes import ImagePrefixes
from tgi_trio.router.scheduling.sequence import Sequence

MARK, PAD = 8, 9


def seen(prompt: list[int], *images: tuple[int, int, str], salt: str = "") -> Request:
    """Return a request with images: (first, features, content), a mark before each."""
    placed = tuple(
        PromptImage(
            first,
            1 + features,
            ((1, features),),
            ImageSize(8, 8),
            content.encode().ljust(32, b"\0"),
            b"",
        )
        for first, features, content in images
    )
    return request(prompt, images=placed, cache_salt=salt)


TEXT = list(range(100, 108))
ONE = [*TEXT, MARK, *[PAD] * 11, *range(50, 60)]


def hits(sight: str, *requests: Request) -> list[int]:
    """Return how many tokens each finds in the cache, one after the other."""
    pair = Pair(limits(prefix_caching=True, image_sight=sight))
    found = []
    for number, each in enumerate(requests):
        before = pair.scheduler.counters["prefix_hit_tokens"]
        pair.scheduler.add(number, each, 0.0)
        pair.run()
        found.append(pair.scheduler.counters["prefix_hit_tokens"] - before)
    return found


@pytest.mark.parametrize("sight", ["causal", "image"])
def test_the_same_image_is_found_and_another_of_its_size_never(sight: str) -> None:
    assert (
        hits(
            sight,
            seen(ONE, (8, 11, "cat")),
            seen(
                ONE, (8, 11, "dog")
            ),  # the text before it, and its mark with what shares its block
            seen([*ONE[:-1], 99], (8, 11, "cat")),
            seen([*ONE[:-1], 98], (8, 11, "dog")),
            request(ONE),  # placeholders that a client typed
            seen(ONE, (8, 11, "cat"), salt="other"),
        )
        == [0, 8, 28, 28, 8, 0]
    )


def test_an_image_elsewhere_in_the_prompt_is_another_prefix() -> None:
    later = [*TEXT, MARK, PAD, PAD, PAD, MARK, *[PAD] * 7, *range(50, 60)]
    assert hits(
        "causal",
        seen(later, (8, 3, "cat"), (12, 7, "dog")),
        seen(later, (8, 3, "dog"), (12, 7, "cat")),
        seen(later, (8, 3, "cat"), (12, 7, "cat")),
        seen(later, (8, 3, "cat"), (12, 7, "dog")),
    ) == [0, 8, 12, 28]


def test_where_all_of_a_prompt_sees_itself_only_the_same_prompt_is_found() -> None:
    assert hits(
        "prompt",
        seen(ONE, (8, 11, "cat")),
        seen([*ONE[:-1], 99], (8, 11, "cat")),
        seen(ONE, (8, 11, "dog")),
        seen(ONE, (8, 11, "cat")),
        request(ONE),
        request([*ONE[:-1], 99]),  # text sees what is before it, as everywhere
        seen(ONE, (8, 11, "cat"), salt="other"),
    ) == [0, 0, 0, 28, 0, 28, 0]


def test_where_layers_attend_to_images_prompts_of_the_same_ones_share() -> None:
    """Tokens before an image depend on it, too."""
    two = [*ONE, MARK, *[PAD] * 7, *range(60, 68)]
    assert hits(
        "layers",
        seen(ONE, (8, 11, "cat")),
        seen([*ONE[:-1], 99], (8, 11, "cat")),
        seen(ONE, (8, 11, "dog")),
        seen(two, (8, 11, "cat"), (30, 7, "dog")),
        seen([*two[:-1], 99], (8, 11, "cat"), (30, 7, "dog")),
        request(ONE),
        request([*ONE[:-1], 99]),
    ) == [0, 28, 0, 0, 44, 0, 28]


def test_a_forgotten_image_gets_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_prefixes, "_KEPT", 2)
    monkeypatch.setattr(image_prefixes, "_NUMBERS", 5)
    prefixes = ImagePrefixes("causal")
    keys = []
    for number, content in enumerate(["cat", "dog", "cat", "owl", "dog", "cat", "cat", "elk"]):
        sequence = Sequence(number, seen(ONE, (8, 11, content)), number, 0.0, 0)
        prefixes.enter(sequence)
        keys.append((content, sequence.namespace, sequence.token_bytes()))
        assert sequence.token_ids().min() >= 0
    assert keys[0] == keys[2] and keys[5] == keys[6]
    others = {key[1:] for key in keys}
    assert len({(content, *key) for content, *key in keys}) == len(others), "one key, one content"
    numbers = np.frombuffer(keys[1][2], np.int32)
    assert (numbers[9:20] == -2).all() and (np.delete(numbers, range(9, 20)) > 0).all()


def test_a_step_has_room_for_what_may_not_be_cut() -> None:
    """While others generate, prompts get a small part of a step; an image gets what it needs."""
    for sight, least in (("causal", 1), ("layers", 1), ("image", 1 + 48)):
        scheduler = Scheduler(limits(token_budget=16, image_sight=sight))
        scheduler.use_pixels(AllPixels())
        prompt = [*TEXT, MARK, *[PAD] * 48, *TEXT]
        scheduler.add(1, seen(prompt, (8, 48, "cat")), 0.0)
        budgets = [c.token_budget for c in scheduler.schedule(0.0) if isinstance(c, Limits)]
        assert budgets == [max(16, least)]


def test_what_no_step_has_room_for_is_refused() -> None:
    scheduler = Scheduler(limits(max_batch_prefill_tokens=20, image_sight="image"))
    scheduler.use_pixels(AllPixels())
    with pytest.raises(ValidationError, match=r"21 tokens around an image .* which has 20: raise"):
        scheduler.add(1, seen([MARK, *[PAD] * 21, 5], (0, 21, "cat")), 0.0)
    scheduler.add(2, seen([MARK, *[PAD] * 20, 5], (0, 20, "cat")), 0.0)
    whole = Scheduler(limits(max_batch_prefill_tokens=20, image_sight="prompt"))
    whole.use_pixels(AllPixels())
    with pytest.raises(ValidationError, match="21 tokens"):
        whole.add(1, seen([MARK, *[PAD] * 15, *range(5)], (0, 15, "cat")), 0.0)
    whole.add(2, request(list(range(100, 125))), 0.0)


def test_states_are_read_behind_the_same_image_and_never_behind_another() -> None:
    """Of a model that keeps some: those of its snapshots, at the last full block of a prompt."""
    pair = Pair(limits(prefix_caching=True, image_sight="causal", state_slots=12))
    found = []
    for number, content in enumerate(("cat", "cat", "dog", "dog", "cat")):
        pair.scheduler.add(number, seen(ONE, (8, 11, content)), 0.0)
        (row,) = (row for each in pair.send() if isinstance(each, Prefill) for row in each.rows)
        assert row.states is not None
        found.append((row.cached_length, row.states.source > 0, len(row.states.saves)))
        pair.run()
    new, again = (0, False, 1), (28, True, 0)
    assert found == [new, again, new, again, again]


def test_what_follows_an_image_is_kept_under_its_own_tokens() -> None:
    """At the end of a sequence only what lies behind its shared blocks is read for its key."""
    own = Sequence(0, seen(ONE, (8, 11, "cat"), (21, 4, "dog")), 0, 0.0, 0)
    own.image_numbers = (3, 5)
    own.emitted += [1, 2, 3]
    whole = own.token_bytes()
    assert [own.token_bytes(first) for first in range(len(whole) // 4)] == [
        whole[4 * first :] for first in range(len(whole) // 4)
    ]
