"""Attention where registers hold the sums of few heads: heads take turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.forward import Forward
from tgi_trio.shard.cpu_backend.program import pack_program
from tgi_trio.shard.cpu_backend.self_tests import step as self_test
from tgi_trio.shard.cpu_backend.variant import Variant
from tgi_trio.shard.cpu_backend.weight_layout import Storage

pytestmark = pytest.mark.usefixtures("one_thread")


def logits(variant: Variant) -> Floats:
    """Return float32 [T, vocabulary] of two sequences, a prompt and then more of it."""
    tiny, tensors = self_test._tiny(variant), self_test.RandomWeights(int8=False)
    with pack_program(tiny, tensors, variant.kv.numbers, int8=False, kv=None) as program:
        program.allocate_kv(8)
    with Forward(program, variant, [0]) as forward:
        return np.concatenate([self_test._run(forward, 0, 17), self_test._run(forward, 17, 4)])


@pytest.mark.parametrize(("heads", "tokens"), [(3, 4), (5, 2), (7, 1)])
def test_heads_that_take_turns_say_what_all_at_once_say(heads: int, tokens: int) -> None:
    """3 and 5 heads of several tokens are rows of a tile; 7 are four heads, then three."""
    plain = Storage("bfloat16")
    at_once = Variant(plain, plain, plain, heads, value_vectors=2, rows=8)
    in_turns = replace(at_once, rows=6, tokens=tokens)
    assert at_once.paired_rows == heads and in_turns.paired_rows < heads
    assert np.array_equal(logits(in_turns), logits(at_once))
