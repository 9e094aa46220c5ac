"""A round whose chats were over too soon is repeated with longer ones."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench.mixed import __main__ as mixed


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """What was asked for: the chats' tokens, and whether with the long prompt, which takes 50."""
    asked: list[tuple[int, bool]] = []

    async def round_of(
        client: Any, args: argparse.Namespace, max_tokens: int, seed: int, long: bool
    ) -> tuple[list[float], float | None]:
        asked.append((max_tokens, bool(long)))
        if long and max_tokens < 50:
            raise mixed.Overtaken
        return [2.0 if long else 1.0] * 10, 7.0 if long else None

    monkeypatch.setattr(mixed, "round_of", round_of)
    return asked


def add(rounds: mixed.Rounds, number: int, most: int) -> None:
    rounds.add(None, argparse.Namespace(), number, most)  # type: ignore[arg-type]


def test_answers_get_longer_until_they_suffice(asked: list[tuple[int, bool]]) -> None:
    rounds = mixed.Rounds(20)
    add(rounds, 0, 512)
    add(rounds, 1, 512)
    assert [tokens for tokens, long in asked if long] == [20, 40, 80, 80]
    text, written = rounds.summary()
    assert "p99 with / without: 2.00 (median of 2 rounds" in text
    assert (written["max_tokens"], written["p99_ratios"]) == (80, [2.0, 2.0])


def test_what_the_context_has_no_room_for_is_an_error(asked: list[tuple[int, bool]]) -> None:
    rounds = mixed.Rounds(20)
    with pytest.raises(mixed.Overtaken):
        add(rounds, 0, 45)
    assert [tokens for tokens, long in asked if long] == [20, 40, 45]
    assert rounds.summary()[1]["p99_ratios"] == []
