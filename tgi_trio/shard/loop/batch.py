"""The shard's running batch: its sequences, the plan of the next step, and their progress.

Commands change the batch (`add`, `extend`, `remove`, `clear`) and `plan` makes a step of it.
`expect` advances the sequences by what is known before the step's tokens are, `settle` by the
tokens, so the next step can be planned between the two. The numbers for this are kept in arrays
with one entry per sequence, in admission order: a large decode batch is planned and advanced in a
handful of numpy calls. No torch in this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.messages import ExtendRow, PrefillRow
from tgi_trio.shard.contract import (
    PlanCounts,
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.loop.following import FollowingRows, settle_positions
from tgi_trio.shard.loop.lone import decodes_alone, plan_alone
from tgi_trio.shard.loop.micro_batches import find_others
from tgi_trio.shard.loop.plan_layout import lay_out
from tgi_trio.shard.loop.row_checks import RowChecks
from tgi_trio.shard.loop.row_table import RowTable
from tgi_trio.shard.loop.settling import Settler
from tgi_trio.shard.loop.steady import SteadyDecode
from tgi_trio.shard.loop.step_columns import StepChanges
from tgi_trio.shard.loop.token_shares import share_budget
from tgi_trio.shard.media.prompt_geometry import PromptGeometry
from tgi_trio.shard.runner import Drafter, DraftRow
from tgi_trio.shard.speculation.drafting import Drafting

_SPARE_TOKENS = 256  # room for new tokens in a sequence's buffer; doubled when it is used up


class Batch:
    """The sequences a shard holds, in admission order."""

    def __init__(
        self,
        *,
        vocab_size: int,
        block_size: int,
        blocks: int,
        eos_ids: Iterable[int],
        state_slots: int = 0,
        drafter: Drafter | None = None,
        draft_budget: int = 0,
        micro_batches: int = 1,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`blocks`: KV blocks of the cache, block 0 (never granted) included; 0 = no cache yet.

        `state_slots`: slots for states, slot 0 (never granted) included; 0 = the model has none.
        `draft_budget`: query tokens up to which drafts fill a step.
        `micro_batches`: steps in flight at a time, among which the sequences are divided.
        `clock`: nanoseconds, as the results' times.
        """
        self.counts = PlanCounts()
        self._drafting = None if drafter is None else Drafting(drafter, clock)
        self._draft_budget = draft_budget
        self._checks = RowChecks(vocab_size, block_size, blocks, state_slots)
        self._table = RowTable(block_size)
        self._settler = Settler(self._table, eos_ids)
        self._steady: SteadyDecode | None = None
        self._micro_batches = micro_batches

    def __len__(self) -> int:
        return len(self._table.sequences)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._table.place_by_id

    @property
    def rows(self) -> tuple[ShardSequence, ...]:
        """The sequences held, in admission order."""
        return tuple(self._table.sequences)

    # --- commands -----------------------------------------------------------------------------

    def add(self, row: PrefillRow) -> ShardSequence:
        """Add a row of a PREFILL command. Raises ValueError, which says why it cannot be run."""
        self._checks.check_row(row, self._table.place_by_id)
        count = len(row.token_ids)
        token_ids = np.empty(count + min(row.max_new_tokens, _SPARE_TOKENS), np.int32)
        token_ids[:count] = row.token_ids
        sequence = ShardSequence(
            id=row.sequence,
            token_ids=token_ids,
            length=count,
            prompt_length=row.prompt_length,
            computed=row.cached_length,
            block_ids=[],
            remaining=row.max_new_tokens,
            min_remaining=row.min_new_tokens,
            sampling=row.sampling,
            states=row.states,
        )
        self._table.grant(self._table.add(sequence), row.block_ids)
        return sequence

    def extend(self, row: ExtendRow) -> None:
        """Grant more blocks; unknown sequences are skipped. Raises ValueError for bad blocks."""
        place = self._table.place_by_id.get(row.sequence)
        if place is not None:
            self._checks.check_blocks(row.block_ids)
            self._table.grant(place, row.block_ids)

    def shape(self, sequence: int, geometry: PromptGeometry) -> None:
        """Set what images change in a prompt, before any of it is computed."""
        self._table.shape(self._table.place_by_id[sequence], geometry)

    def hold(self, sequence: int, held: bool = True) -> None:
        """Leave a sequence out of steps, or (`held` False) take it in again."""
        self._table.hold(self._table.place_by_id[sequence], held)

    @property
    def holds(self) -> bool:
        """Whether any sequence may be left out of steps."""
        return self._table.holding

    @property
    def held(self) -> list[ShardSequence]:
        """The sequences that are left out of steps, in admission order."""
        table = self._table
        return [table.sequences[i] for i in np.flatnonzero(table.held[: len(table.sequences)])]

    def remove(self, sequences: Iterable[int]) -> list[ShardSequence]:
        """Drop sequences by id and return those that were held; unknown ids are skipped."""
        places = {self._table.place_by_id[s] for s in sequences if s in self._table.place_by_id}
        if not places:
            return []
        return self._table.remove(places)

    def clear(self) -> list[ShardSequence]:
        """Drop every sequence and return them."""
        return self._table.clear()

    # --- steps --------------------------------------------------------------------------------

    def plan(self, token_budget: int) -> StepPlan | None:
        """Return the next step, or None if no sequence can advance; sets `counts`.

        Decode rows come first. Chunks of prompts fill the step up to `token_budget` query tokens
        (chunked prefill), at least one token or a whole span that must not be cut. Prompts with the
        fewest remaining tokens go first, so that a short prompt does not wait for a long one, on
        which the router's admission relies. The rest of the budget, up to `draft_budget` tokens, is
        for drafts of the decode rows' next tokens. Rows are left out that are held, are at the end
        of their granted blocks, or whose last token is being chosen. The plan's arrays are copies:
        later commands do not change it.
        """
        table, n = self._table, len(self._table.sequences)
        drafting = self._drafting
        if drafting is not None and self._steady is not None and not drafting.sits_out(n):
            self._steady = None  # the next step may have drafts
        steady, expected = self._steady, self._settler.expected
        if expected is not None and (expected.drafts is not None or expected.leads):
            self._steady = None
            return self._follow_drafts(expected, token_budget)
        if steady is not None and steady.is_current(table, token_budget, expected):
            self.counts = steady.counts
            return steady.plan(table, expected)
        alone = expected is None and token_budget > 0 and self._micro_batches == 1
        if alone and decodes_alone(table):
            return self._plan_alone(token_budget)
        chosen, taken, stalled = self._share_budget(n, token_budget)
        prefill = table.computed[chosen] < table.given[chosen]
        spare = min(token_budget, self._draft_budget) - int(taken.sum())
        # After a wrong draft, states lack the tokens that were right: these are computed first.
        late = table.length[chosen] - table.computed[chosen] > 1
        drafts = self._draft(chosen, prefill | late, spare)
        self.counts = PlanCounts(
            prefill_tokens=int(taken[prefill].sum()),
            decode_rows=len(chosen) - int(prefill.sum()),
            stalled_rows=stalled,
            draft_tokens=0 if drafts is None else int(drafts.sum()),
        )
        if len(chosen) == 0:
            return None
        plan = lay_out(
            table,
            chosen,
            taken,
            prefill,
            drafts,
            before=expected,
            keeps_states=self._checks.state_slots > 0,
        )
        return self._finish_plan(plan, n)

    def _share_budget(
        self, n: int, token_budget: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return which of `n` rows a step has, their query tokens, and how many are stalled."""
        table = self._table
        computed = table.computed[:n]
        held = table.held[:n] | (table.remaining[:n] <= 0)
        reach = np.minimum(table.length[:n], table.granted[:n])
        wanted = (np.minimum(reach, table.stop[:n]) - computed) * ~held
        if self._micro_batches > 1:
            others = find_others(table, wanted, self._micro_batches)
            held, wanted = held | others, wanted * ~others
        lags = table.length[:n] - computed
        if 0 < n <= token_budget and wanted.min() == 1 and lags.max() == 1:  # all decode
            chosen, taken, stalled = np.arange(n), np.ones(n, np.int64), 0
        else:
            chosen, taken, stalled = share_budget(table, wanted, held, token_budget)
        if (adapters := table.adapter[chosen]).any():  # neighbours are read once, see `Tokens.of`
            by_adapter = np.argsort(adapters, kind="stable")
            chosen, taken = chosen[by_adapter], taken[by_adapter]
        return chosen, taken, stalled

    def _follow_drafts(self, before: StepPlan, token_budget: int) -> StepPlan | None:
        """Return the step after one with unverified drafts; None: that one has to end first."""
        followers = FollowingRows.find(self._table, before, token_budget)
        if followers is None or self._drafting is None:
            return None
        spare = min(token_budget, self._draft_budget) - len(followers.places)
        plan = followers.plan(self._table, self._drafting.follow, spare)
        self.counts = plan.counts
        plan.leads = self._leads(plan)
        return plan

    def settle_positions(self, plan: StepPlan) -> None:
        """Correct the positions of a plan's rows, once the step before it has been settled."""
        settle_positions(plan, self._table.block_size)

    def _plan_alone(self, token_budget: int) -> StepPlan:
        """Return the next step of a single row, which decodes."""
        table, drafts = self._table, 0
        spare = min(token_budget, self._draft_budget) - 1
        if self._drafting is not None and spare > 0:
            sequence, granted = table.sequences[0], int(table.granted[0])
            room = min(sequence.remaining - 1, granted - sequence.length)
            drafts = self._drafting.draft([DraftRow(0, sequence, room)], spare).get(0, 0)
        self.counts = PlanCounts(decode_rows=1, draft_tokens=drafts)
        return self._finish_plan(plan_alone(table, drafts), 1)

    def _finish_plan(self, plan: StepPlan, rows: int) -> StepPlan:
        """Complete a plan of a batch of `rows` rows; prepares for next plans that are alike."""
        plan.counts = self.counts
        self._steady = None
        if self._micro_batches > 1:
            return plan
        if self._drafting is None or self._drafting.is_resting(rows):
            self._steady = SteadyDecode.after(plan, self._table)
        else:
            plan.leads = self._leads(plan)
        return plan

    def _leads(self, plan: StepPlan) -> bool:
        """Return whether a step with the runner's own drafts may follow a plan at once.

        It may if the plan only decodes and its rows have no recurrent states.
        """
        if self._drafting is None or not self._drafting.follows or self.drafting_rests:
            return False
        decodes = not plan.counts.prefill_tokens and bool(plan.samples.all())
        return decodes and plan.state_writes is None

    @property
    def drafting_rests(self) -> bool:
        """Whether the next step would get no drafts even if all tokens before it were known."""
        return self._drafting is None or self._drafting.is_resting(len(self))

    def is_followed(self, plan: StepPlan) -> bool:
        """Return whether a step may follow the plan before its tokens are known.

        It may, if the runner allows it, while there are no drafts, or if the runner makes and
        verifies them by itself: the host drafts only for rows whose last token is known.
        """
        return self._drafting is None or self.drafting_rests or plan.leads

    def _draft(
        self, chosen: NDArray[np.int64], out: NDArray[np.bool_], spare: int
    ) -> NDArray[np.int64] | None:
        """Draft the next tokens of rows, except those `out`; returns how many, [chosen], or None.

        No row gets drafts beyond its granted blocks or its last token, and all rows together get
        at most `spare`. There are none in a step that follows one with unknown tokens.
        """
        if self._drafting is None or spare <= 0:
            return None
        if self._settler.expected is not None:
            self._drafting.sits_out(len(self))
            return None
        table, decodes = self._table, []
        for i in np.flatnonzero(~out).tolist():
            sequence, granted = table.sequences[chosen[i]], int(table.granted[chosen[i]])
            room = min(sequence.remaining - 1, granted - sequence.length)
            decodes.append(DraftRow(i, sequence, room))
        counts = self._drafting.draft(decodes, spare)
        if not counts:
            return None
        drafts = np.zeros(len(chosen), np.int64)
        drafts[list(counts)] = list(counts.values())
        return drafts

    def mark_in_flight(self, plan: StepPlan) -> None:
        """Leave the plan's rows out of further plans until it is settled."""
        self._table.in_flight[self._table.places(plan)] = True

    def expect(self, plan: StepPlan) -> None:
        """Advance the plan's rows by what is known before its tokens are; see `Settler.expect`."""
        self._settler.expect(plan)

    def settle(self, plan: StepPlan, result: StepResult) -> StepChanges:
        """Advance the plan's rows by its result; see `Settler.settle`."""
        if self._drafting is not None:
            self._drafting.note(plan, result)
        if self._micro_batches > 1:
            places = self._table.places(plan)
            self._table.in_flight[places[places >= 0]] = False
        return self._settler.settle(plan, result)

    # --- bookkeeping --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless arrays, sequences and index agree."""
        self._table.check()
