"""The front's benchmark kills a replica under streams, and not behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bench.cluster import front


def test_streams_that_were_over_too_soon_are_asked_for_anew_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    enough = 300

    @contextmanager
    def fronted(count: int) -> Iterator[tuple[None, list[None]]]:
        yield None, [None] * count

    def kill_one(_: object, replicas: list[None], count: int, tokens: int) -> dict[str, Any]:
        asked.append(tokens)
        if tokens < enough:
            raise front.Overtaken
        return {"streams": count}

    monkeypatch.setattr(front, "fronted", fronted)
    monkeypatch.setattr(front, "kill_one", kill_one)
    assert front.kill_under(2, 16) == {"streams": 2}
    assert asked == [16, 64, 256, 800]
    enough = 10_000
    with pytest.raises(front.Overtaken):
        front.kill_under(2, 300)
