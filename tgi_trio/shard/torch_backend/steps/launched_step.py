"""A step that has been launched, and reading its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tgi_trio.shard.alternatives import Listed
from tgi_trio.shard.contract import Choices, StepResult
from tgi_trio.shard.torch_backend.prompt_logprobs import PromptSpan
from tgi_trio.shard.torch_backend.sampling.choice_settings import Choosing, TopCounts
from tgi_trio.shard.torch_backend.sampling.device_choices import list_best, read_choices
from tgi_trio.shard.torch_backend.sampling.device_sampler import Found
from tgi_trio.shard.torch_backend.staging import Array, PinnedLoan


@dataclass(slots=True)
class LaunchedStep:
    """See `Pending`."""

    refused: dict[int, str]  # reasons, by choosing row, for which no token is chosen for it
    rows: int  # of the plan
    sampled: Array  # the rows that choose
    choosing: Choosing
    top_counts: TopCounts  # the choosing rows' top tokens
    began: torch.Event
    event: Callable[[], torch.Event]  # records an event on the current stream
    prompts: dict[int, PromptSpan]
    landed: PinnedLoan  # pinned memory for the results
    note: Callable[[Choices, Array], None] | None = None  # told of choices and drafts after them
    later: Callable[[LaunchedStep], None] | None = None  # makes a choice that waits for tokens
    faults: dict[int, str] = field(default_factory=dict)  # reasons, by choice, for choosing nothing
    # The fields of `Found`, being copied to pinned memory; None: nothing, or not yet.
    tokens: Array | None = None
    listed: Array | None = None
    drafts: Array | None = None
    computed: Array | None = None  # pinned: see `Choosing`
    done: torch.Event | None = None

    def proceed(self) -> None:
        """Launch the choice that had to wait for the previous step's tokens."""
        later, self.later = self.later, None
        if later is not None:
            later(self)

    def take(self, found: Found) -> None:
        """Start copying down what was chosen."""
        keep = self.landed.keep_array
        self.tokens = keep(found.tokens)
        if found.listed is not None:
            self.listed = keep(found.listed)
        if found.drafts is not None:
            self.drafts = keep(found.drafts)

    def finish(self) -> None:
        """Record the event after everything that the step launches."""
        self.done = self.event()

    def result(self) -> StepResult:
        """Wait for the device, and read the results; the duration is the device's, choice included.

        The result holds no views of pinned memory, which the next steps reuse.
        """
        if self.later is not None:
            self.proceed()
        if self.done is None:
            raise RuntimeError("a step that was not launched to its end has no result")
        self.done.synchronize()
        took = int(self.began.elapsed_time(self.done) * 1e6)
        prompts = {row: span.read() for row, span in self.prompts.items()} if self.prompts else {}
        if self.tokens is None:
            return StepResult(Choices.none(self.rows), took, 0, prompts)
        tops: Listed | None = None
        if self.listed is not None:
            top_counts = self.top_counts
            if not self.choosing.alone:
                top_counts = TopCounts.of(top_counts.each[self.choosing.owners])
            tops = list_best(top_counts, self.listed)
        if self.computed is not None:
            self.choosing.computed = self.computed.copy()
        choices = read_choices(self.choosing, self.tokens, tops, self.faults, self.refused)
        if self.note is not None and self.drafts is not None:
            self.note(choices, self.drafts.copy())
        result = StepResult(choices.spread(self.sampled, self.rows), took, 0, prompts)
        if self.computed is not None:
            result.drafts = self.choosing.count_drafts()
        return result
