"""Kernels that are compiled apart, and are wrong, do not serve: their self-tests find it."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.shard.cpu_backend.kernel_support import VARIANT
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend import apart_table, verified
from tgi_trio.shard.cpu_backend.apart_table import Apart
from tgi_trio.shard.cpu_backend.self_tests import blocks, index, latents, pooled
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.cpu_backend.variant import Variant


@pytest.mark.parametrize(
    ("apart", "self_test", "work", "words"),
    [
        (apart_table.BLOCKS, blocks, "_attend", "of blocks failed: ATTEND_BLOCKS"),
        (apart_table.INDEX, index, "_choose", "of an index failed: CHOOSE"),
        (apart_table.LATENTS, latents, "_turn", "of latents failed: TURN"),
        (apart_table.POOLED, pooled, "_pool", "of an index of pooled keys failed: POOL_KEYS"),
    ],
)
def test_kernels_that_are_wrong_do_not_serve(
    apart: Apart, self_test: ModuleType, work: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verified.choose_apart(apart, VARIANT)
    right = getattr(self_test, work)

    def differ(variant: Variant) -> tuple[Floats, Floats]:
        found, expected = right(variant)
        return found, expected + 1

    monkeypatch.setattr(self_test, work, differ)
    with pytest.raises(UnsupportedError, match=f"{words} is 1 away from the reference"):
        verified.choose_apart(apart, VARIANT)
