"""Kernels that are compiled apart, and are wrong, do not serve: their self-tests find it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.shard.cpu_backend.kernel_support import VARIANT
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend import kernel_groups, verified
from tgi_trio.shard.cpu_backend.kernel_groups import KernelGroup
from tgi_trio.shard.cpu_backend.self_tests import (
    alone,
    blocks,
    gated,
    hyper,
    index,
    latents,
    mixed,
    pooled,
    streams,
)
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.cpu_backend.variant import Variant


@pytest.mark.parametrize(
    ("group", "self_test", "work", "words"),
    [
        (kernel_groups.BLOCKS, blocks, "_attend", "of blocks failed: ATTEND_BLOCKS"),
        (kernel_groups.INDEX, index, "_choose", "of an index failed: CHOOSE"),
        (kernel_groups.LATENTS, latents, "_turn", "of latents failed: TURN"),
        (kernel_groups.POOLED, pooled, "_pool", "of an index of pooled keys failed: POOL_KEYS"),
    ],
)
def test_kernels_that_are_wrong_do_not_serve(
    group: KernelGroup,
    self_test: ModuleType,
    work: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert verified.open_kernel_group(group, VARIANT)
    right = getattr(self_test, work)

    def differ(variant: Variant) -> tuple[Floats, Floats]:
        found, expected = right(variant)
        return found, expected + 1

    monkeypatch.setattr(self_test, work, differ)
    with pytest.raises(UnsupportedError, match=f"{words} is 1 away from the reference"):
        verified.open_kernel_group(group, VARIANT)


@pytest.mark.parametrize(
    ("group", "self_test", "name"),
    [
        (kernel_groups.HYPER, hyper, "GATHER"),
        (kernel_groups.MIXED, mixed, "GATHER_MIXED"),
        (kernel_groups.GATED, gated, "MIX"),
        (kernel_groups.STREAMS, streams, "CORRECT"),
    ],
)
@pytest.mark.parametrize("wrong", [1.0, np.nan])
def test_a_wrong_number_in_any_buffer_is_found(
    group: KernelGroup,
    self_test: ModuleType,
    name: str,
    wrong: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NaN behind a buffer that is right was the least of two distances, and so none."""
    right = alone.run_alone
    for buffer in self_test._CHANGED:

        def differ(
            kernel: Any, code: Code, rows: Any, *given: Any, changed: Buffer = buffer
        ) -> None:
            right(kernel, code, rows, *given)
            if code.name == name:
                rows[changed][-1] += wrong

        monkeypatch.setattr(self_test, "run_alone", differ)
        with pytest.raises(UnsupportedError, match=f"failed: {name} is (1|nan) away"):
            verified.open_kernel_group(group, VARIANT)
