"""Applies steps' reports to the sequences, row by row, and returns their progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as ListLike

from tgi_trio.ipc.frames import Finish
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling.lifecycle import SequenceEvent, SequenceState
from tgi_trio.router.scheduling.report_columns import (
    prompt_logprobs_per_row,
    prompt_tops_per_row,
    tops_per_token,
)
from tgi_trio.router.scheduling.running_batch import RunningBatch
from tgi_trio.router.scheduling.sequence import Sequence
from tgi_trio.router.scheduling.sequence_table import SequenceTable
from tgi_trio.router.scheduling.shard_commands import Progress, Top
from tgi_trio.router.scheduling.ttft import TtftTarget

_GOES_ON = Finish.NONE
_FINISHES = tuple(Finish(value) for value in range(len(Finish)))


class StepReports:
    """Applies steps' reports."""

    def __init__(
        self,
        sequence_table: SequenceTable,
        batch: RunningBatch,
        ttft_target: TtftTarget,
        counters: Counter[str],
    ) -> None:
        self._sequence_table = sequence_table
        self._batch = batch
        self._ttft_target = ttft_target
        self._counters = counters

    def apply_step(self, step: StepReport, now: float) -> list[Progress]:
        """Return the progress of every row whose client still listens."""
        if step.top_ids or step.prompt_logprobs:
            return self._rich(step, now)
        find, starving = self._batch.running.get, self._batch.starving
        ids, logprobs = step.token_ids, step.logprobs
        out: list[Progress] = []
        # `tuple.__new__` takes half the time of the NamedTuple's own constructor.
        append, new = out.append, tuple.__new__
        end = 0
        for id, computed, count, finish in zip(
            step.sequence, step.computed, step.token_count, step.finish, strict=True
        ):
            running = find(id)
            if running is not None and count == 1 and not finish:
                # Fast path for nearly every row of nearly every step; `_row` would do the same.
                running.computed = computed
                if computed >= running.extend_at:
                    starving[id] = running
                token = ids[end]
                append(new(Progress, (id, [token], [logprobs[end]], (), _GOES_ON, (), (), False)))
                running.emitted.append(token)
                end += 1
                continue
            start, end = end, end + count
            sequence = self._sequence_table.living.get(id)
            if sequence is not None:
                progress = self._row(
                    sequence, computed, finish, ids[start:end], logprobs[start:end], (), (), (), now
                )
                if progress is not None:
                    append(progress)
        return out

    def _rich(self, step: StepReport, now: float) -> list[Progress]:
        """As `apply_step`, for steps with alternatives or prompt log-probabilities."""
        tops, prompts = tops_per_token(step), prompt_logprobs_per_row(step)
        prompt_tops = prompt_tops_per_row(step)
        out: list[Progress] = []
        end = 0
        for row, sequence_id in enumerate(step.sequence):
            start, end = end, end + step.token_count[row]
            sequence = self._sequence_table.living.get(sequence_id)
            if sequence is None:
                continue
            progress = self._row(
                sequence,
                step.computed[row],
                step.finish[row],
                step.token_ids[start:end],
                step.logprobs[start:end],
                tops[start:end],
                prompts[row],
                prompt_tops[row],
                now,
            )
            if progress is not None:
                out.append(progress)
        return out

    def _row(
        self,
        sequence: Sequence,
        computed: int,
        finish: int,
        tokens: list[int],
        logprobs: list[float],
        tops: ListLike[ListLike[Top]],
        prompts: list[float] | tuple[()],
        prompt_tops: ListLike[ListLike[Top]],
        now: float,
    ) -> Progress | None:
        """Apply one row of a step; returns None if there is nothing new for its client."""
        if sequence.state is not SequenceState.RUNNING:
            if not self._takes_part(sequence, finish):
                return None
            if sequence.state is SequenceState.PREFILLING:
                self._batch.prefill(sequence, computed, bool(tokens or finish))
        sequence.computed = computed
        if computed >= sequence.extend_at:
            self._batch.starving[sequence.id] = sequence
        new_prompts = sequence.new_prompt_logprobs(prompts) if prompts else ()
        if not (tokens or finish or new_prompts):
            return None
        first = bool(tokens) and len(sequence.emitted) == len(sequence.request.emitted)
        if first and sequence.started is not None:
            self._ttft_target.note(now - sequence.started)
        sequence.emitted += tokens
        done = _FINISHES[finish]
        if finish:
            self._counters["finished"] += 1
            self._sequence_table.end(sequence, SequenceEvent.END)
        new_tops = prompt_tops[len(prompts) - len(new_prompts) :]
        return Progress(sequence.id, tokens, logprobs, tops, done, new_prompts, new_tops, first)

    def _takes_part(self, sequence: Sequence, finish: int) -> bool:
        """Whether to apply a row of a sequence that is not RUNNING."""
        if sequence.state is SequenceState.LEAVING:
            if finish:  # it ended by itself before its FILTER came
                self._sequence_table.end(sequence, SequenceEvent.END)
            return False
        # No step can have a WAITING sequence, except for a faulty shard.
        return sequence.state is not SequenceState.WAITING
