"""Engines, shards and clients whose order a seed decides: no run may stand still."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.harness import byte_tokenizer
from tests.stress.interleavings import play

_PATIENCE_S = 60.0  # however busy the machine is


# Of those that are always played, 11 stood still where a wait had decided before it slept whether
# commands waited for room in the ring, and 28 where it had for a connection.
@pytest.mark.sampled(17, first=11)
@pytest.mark.parametrize("seed", range(40))
def test_nobody_waits_for_ever(seed: int, tmp_path: Path) -> None:
    run = play(seed, byte_tokenizer(tmp_path), tmp_path, _PATIENCE_S)
    assert run.answered + sum(run.refused.values()) > 0 and run.served > 0
