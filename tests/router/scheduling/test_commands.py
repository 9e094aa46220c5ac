"""PREFILL commands: every row once, in order, and no frame larger than a ring takes."""

from __future__ import annotations

from itertools import count

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.ipc.endpoints import DEFAULT_RING_BYTES
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, encode_prefill
from tgi_trio.router.scheduling.shard_commands import prefills


def row(sequence: int, grammar_characters: int) -> PrefillRow:
    return PrefillRow(
        sequence=sequence,
        token_ids=np.arange(10, dtype=np.int32),
        prompt_length=10,
        cached_length=0,
        max_new_tokens=5,
        min_new_tokens=0,
        block_ids=[1],
        sampling=SamplingParameters(grammar="é" * grammar_characters),
    )


@given(st.lists(st.integers(0, 2**16), max_size=30))
def test_rows_with_large_grammars_travel_in_several_commands(sizes: list[int]) -> None:
    rows = [row(i, size) for i, size in enumerate(sizes)]
    commands = list(prefills(rows, count(7).__next__))
    assert [command.number for command in commands] == list(range(7, 7 + len(commands)))
    assert [row for command in commands for row in command.rows] == rows
    for command in commands:
        assert len(encode_prefill(command.number, command.rows)) < DEFAULT_RING_BYTES // 2
    if sum(sizes) < 2**16:
        assert len(commands) == bool(rows)
