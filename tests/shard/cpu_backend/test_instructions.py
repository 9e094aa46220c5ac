"""How the kernels are compiled: what a machine's registers leave room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.shard.cpu_backend.kernel_support import LLAMA
from tgi_trio.shard.cpu_backend import instructions


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(
    ("group", "heads", "tokens"),
    [(1, 1, 4), (3, 3, 4), (4, 4, 3), (6, 6, 2), (7, 7, 1), (16, 8, 1)],
)
def test_heads_and_tokens_attend_together(
    group: int, heads: int, tokens: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(LLAMA, heads=2 * group, kv_heads=2)
    monkeypatch.setattr(instructions, "has", lambda _: wide)
    variant = instructions.find_variant(spec, "float32", pairs="float32")
    assert (variant.heads, variant.tokens) == (heads, tokens)
    assert variant.paired_rows == (heads * tokens if wide else 2)
