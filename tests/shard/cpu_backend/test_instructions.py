"""How the kernels are compiled: what a machine's registers leave room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.shard.cpu_backend.kernel_support import LLAMA
from tgi_trio.shard.cpu_backend import instructions


@pytest.mark.parametrize(
    ("group", "wide", "narrow"), [(1, 1, 1), (3, 3, 3), (4, 4, 2), (6, 6, 3), (7, 7, 7), (16, 8, 2)]
)
def test_heads_that_attend_together_fit_the_registers(
    group: int, wide: int, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(LLAMA, heads=2 * group, kv_heads=2)
    for there, heads in ((True, wide), (False, narrow)):
        monkeypatch.setattr(instructions, "has", lambda feature, there=there: there)
        assert instructions.find_variant(spec, "float32", pairs="float32").heads == heads
