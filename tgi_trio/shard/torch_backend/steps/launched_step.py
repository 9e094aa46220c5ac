"""A step that has been launched: what it brings down, and how that is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tgi_trio.shard.alternatives import Listed
from tgi_trio.shard.contract import Choices, StepResult
from tgi_trio.shard.torch_backend.prompt_logprobs import PromptSpan
from tgi_trio.shard.torch_backend.sampling.asking import Choosing, Wanted
from tgi_trio.shard.torch_backend.sampling.device_choices import list_best, read_choices
from tgi_trio.shard.torch_backend.sampling.device_sampler import Found
from tgi_trio.shard.torch_backend.staging import Array, PinnedLoan


@dataclass(slots=True)
class LaunchedStep:
    """See `Pending`."""

    refused: dict[int, str]  # by choosing row: nothing is chosen for it
    rows: int  # of the plan
    sampled: Array  # those that choose
    choosing: Choosing
    wanted: Wanted  # by choosing rows
    began: torch.Event
    event: Callable[[], torch.Event]  # recorded where the device's queue ends now
    prompts: dict[int, PromptSpan]
    landed: PinnedLoan  # where it comes down
    note: Callable[[Choices, Array], None] | None = None  # is told what was guessed behind them
    later: Callable[[LaunchedStep], None] | None = None  # chooses, once tokens before are known
    faults: dict[int, str] = field(default_factory=dict)  # by choice: nothing is chosen for it
    # What was chosen, as `Found` has it, on its way into pinned memory; None: nothing, or not yet.
    tokens: Array | None = None
    listed: Array | None = None
    guesses: Array | None = None
    computed: Array | None = None  # pinned: see `Choosing`
    done: torch.Event | None = None

    def proceed(self) -> None:
        """Launch what had to wait for the tokens of the step before."""
        later, self.later = self.later, None
        if later is not None:
            later(self)

    def take(self, found: Found) -> None:
        """Have what was chosen copied down."""
        keep = self.landed.keep_array
        self.tokens = keep(found.tokens)
        if found.listed is not None:
            self.listed = keep(found.listed)
        if found.guesses is not None:
            self.guesses = keep(found.guesses)

    def finish(self) -> None:
        """Everything is launched."""
        self.done = self.event()

    def result(self) -> StepResult:
        """Wait for the device; the duration is its own, choosing included.

        Nothing of the result is where it came down: that memory is another step's soon.
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
            wanted = self.wanted
            if not self.choosing.alone:
                wanted = Wanted.of(wanted.each[self.choosing.owners])
            tops = list_best(wanted, self.listed)
        if self.computed is not None:
            self.choosing.computed = self.computed.copy()
        choices = read_choices(self.choosing, self.tokens, tops, self.faults, self.refused)
        if self.note is not None and self.guesses is not None:
            self.note(choices, self.guesses.copy())
        result = StepResult(choices.spread(self.sampled, self.rows), took, 0, prompts)
        if self.computed is not None:
            result.drafts = self.choosing.count_guesses()
        return result
