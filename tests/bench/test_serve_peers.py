"""A peer that fails under load is named with the reason, and what others reached is reported."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench.serve import peers
from bench.serve.peers import Findings, report, run
from tgi_trio.client.measures import summarise

ROUNDS = 3


def loads_of(monkeypatch: pytest.MonkeyPatch, breaking: str, at: int) -> None:
    """Have three servers that answer at once, and `breaking` too late in round `at`, from 1."""
    asked: list[str] = []

    def load_on(server: Any, clients: int, work: Any) -> dict[str, Any]:
        asked.append(server.name)
        if server.name == breaking and asked.count(breaking) == at:
            raise RuntimeError("not every answer came within 300 s")
        return summarise([], 1.0) | {"cpu_s": 1.0}

    def started(*_: Any) -> list[tuple[Any, Any]]:
        peers = [argparse.Namespace(name=name, whole=False) for name in ("ours", "a", "b")]
        return [(peer, argparse.Namespace(name=peer.name, ready_s=1.0)) for peer in peers]

    monkeypatch.setattr(peers, "OURS", "ours")
    monkeypatch.setattr(peers, "load_on", load_on)
    monkeypatch.setattr(peers, "started", started)


def loaded(breaking: str, at: int, monkeypatch: pytest.MonkeyPatch) -> Findings:
    loads_of(monkeypatch, breaking, at)
    found = Findings("bfloat16")
    args = argparse.Namespace(rounds=ROUNDS, clients=1, requests=1, words=1, max_tokens=1)
    run(args, None, found)  # type: ignore[arg-type]
    return found


def test_a_peer_that_is_too_slow_is_named_and_left_out_of_later_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = loaded("a", 2, monkeypatch)
    assert [[row["server"] for row in turn] for turn in found.rounds] == [
        ["ours", "a", "b"],
        ["ours", "b"],
        ["ours", "b"],
    ]
    text, written = report([found])
    assert [row["server"] for row in written["rows"]] == ["ours", "a", "b"]
    assert "not measured, bfloat16: a: not every answer came within 300 s, in round 2" in text


def test_without_ours_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="not every answer"):
        loaded("ours", 1, monkeypatch)
