"""What a step moved, as the columns of a STEP frame. No torch in this file."""

from __future__ import annotations

from tgi_trio.ipc.messages import Finish, StepReport
from tgi_trio.shard.step import RowResult, Sequence

Moved = tuple[Sequence, RowResult, int, Finish]  # and how many of the result's tokens count


def fill_report(report: StepReport, moved: list[Moved]) -> None:
    """Write the columns of the rows that moved."""
    report.sequence = [sequence.id for sequence, _, _, _ in moved]
    report.computed = [sequence.computed for sequence, _, _, _ in moved]
    report.token_count = [used for _, _, used, _ in moved]
    report.finish = [finish for _, _, _, finish in moved]
    report.token_ids = [token for _, row, used, _ in moved for token in row.token_ids[:used]]
    report.logprobs = [value for _, row, used, _ in moved for value in row.logprobs[:used]]
    report.prompt_count = [len(row.prompt_logprobs) for _, row, _, _ in moved]
    report.prompt_logprobs = [value for _, row, _, _ in moved for value in row.prompt_logprobs]
    report.prompt_top_count = [0] * len(report.prompt_logprobs)
    if any(row.prompt_tops for _, row, _, _ in moved):
        every = [
            top
            for _, row, _, _ in moved
            for top in (row.prompt_tops or [()] * len(row.prompt_logprobs))
        ]
        report.prompt_top_count = [len(top) for top in every]
        report.prompt_top_ids = [token for top in every for token, _ in top]
        report.prompt_top_logprobs = [logprob for top in every for _, logprob in top]
    if not any(any(row.tops) for _, row, _, _ in moved):
        report.top_count = [0] * len(report.token_ids)
        return
    tops = [top for _, row, used, _ in moved for top in (row.tops or [()] * used)[:used]]
    report.top_count = [len(top) for top in tops]
    report.top_ids = [token for top in tops for token, _ in top]
    report.top_logprobs = [logprob for top in tops for _, logprob in top]
