"""What a step has brought each sequence, read out of the columns that the shard reports."""

from __future__ import annotations

from collections.abc import Iterator

from tgi_trio.shard.loop.step_columns import StepChanges


def tokens_of(moved: StepChanges) -> Iterator[tuple[int, list[int]]]:
    """Yield the id of each sequence that moved, and its tokens."""
    columns = (moved.columns[name].tolist() for name in ("sequence", "token_count", "token_ids"))
    sequences, counts, token_ids = columns
    end = 0
    for sequence_id, count in zip(sequences, counts, strict=True):
        yield sequence_id, token_ids[end : end + count]
        end += count
