"""The running set: what the shard holds, what the next step computes of it, what that step moved.

Commands change the set (`add`, `extend`, `remove`, `clear`), `plan` turns it into one step, and
`advance` moves the sequences by that step's result. The numbers a plan needs are kept in arrays,
one entry per sequence in admission order, so planning a large decode batch is a handful of numpy
calls. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.messages import ExtendRow, Fault, Finish, PrefillRow, StepReport
from tgi_trio.shard.report import Moved, fill_report
from tgi_trio.shard.speculation.sharing import Drafter, Guesser, share_guesses
from tgi_trio.shard.step import Sequence, StepPlan, StepResult

_FIRST_ROWS = 16  # rows and table width to start with; both double when they no longer do
_FIRST_WIDTH = 8
_MISCHOSEN = "the model runner chose a token where none was due, or none where one was"
_COLUMNS = ("_length", "_computed", "_given", "_granted", "_last", "_held", "_table")
_SPARE_TOKENS = 256  # room for new tokens in a sequence's buffer; doubled when it is used up


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """What the last `plan` call found; the STEP frame reports it."""

    prefill_tokens: int = 0
    decode_rows: int = 0
    stalled_rows: int = 0  # sequences at the end of their granted blocks
    draft_tokens: int = 0  # guesses among the decode rows' query tokens


class Batch:
    """The sequences a shard holds, in admission order."""

    def __init__(
        self,
        *,
        vocab_size: int,
        block_size: int,
        blocks: int,
        eos_ids: Iterable[int],
        drafter: Drafter | None = None,
        cheap_tokens: int = 0,
    ) -> None:
        """`blocks`: KV blocks of the cache, block 0 (never granted) included; 0 = no cache yet.

        `cheap_tokens`: query tokens up to which the drafter's guesses fill a step.
        """
        self.counts = PlanCounts()
        self._drafter = drafter
        self._cheap_tokens = cheap_tokens
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._blocks = blocks
        self._eos_ids = frozenset(eos_ids)
        self._rows: list[Sequence] = []
        self._by_id: dict[int, int] = {}  # sequence id -> its place in `_rows` and in the arrays
        # Copies of the sequences' fields for planning; only the first len(self._rows) are real.
        self._length = np.zeros(_FIRST_ROWS, np.int64)
        self._computed = np.zeros(_FIRST_ROWS, np.int64)
        self._given = np.zeros(_FIRST_ROWS, np.int64)  # tokens known at admission: prefill ends
        self._granted = np.zeros(_FIRST_ROWS, np.int64)  # KV tokens its blocks hold
        self._last = np.zeros(_FIRST_ROWS, np.int64)  # id of its last known token
        self._held = np.zeros(_FIRST_ROWS, np.bool_)  # sits steps out until it is released
        self._table = np.zeros((_FIRST_ROWS, _FIRST_WIDTH), np.int32)
        self._chosen: NDArray[np.int64] = np.empty(0, np.int64)  # rows of the plan in hand
        self._taken: NDArray[np.int64] = np.empty(0, np.int64)  # and their query tokens

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._by_id

    @property
    def rows(self) -> tuple[Sequence, ...]:
        """The sequences held, in admission order."""
        return tuple(self._rows)

    # --- commands -----------------------------------------------------------------------------

    def add(self, row: PrefillRow) -> Sequence:
        """Take in one row of a PREFILL command; ValueError says why it cannot be run."""
        self._check_row(row)
        count = len(row.token_ids)
        token_ids = np.empty(count + min(row.max_new_tokens, _SPARE_TOKENS), np.int32)
        token_ids[:count] = row.token_ids
        sequence = Sequence(
            id=row.sequence,
            token_ids=token_ids,
            length=count,
            prompt_length=row.prompt_length,
            computed=row.cached_length,
            block_ids=[],
            remaining=row.max_new_tokens,
            min_remaining=row.min_new_tokens,
            sampling=row.sampling,
        )
        place = len(self._rows)
        self._reserve(place + 1)
        self._rows.append(sequence)
        self._by_id[sequence.id] = place
        self._length[place] = self._given[place] = count
        self._computed[place] = row.cached_length
        self._last[place] = token_ids[count - 1]
        self._granted[place] = 0
        self._held[place] = False
        self._table[place] = 0
        self._grant(place, row.block_ids)
        return sequence

    def extend(self, row: ExtendRow) -> None:
        """Grant more blocks; unknown sequences are skipped. ValueError: no such blocks."""
        place = self._by_id.get(row.sequence)
        if place is not None:
            self._check_blocks(row.block_ids)
            self._grant(place, row.block_ids)

    def hold(self, sequence: int, held: bool = True) -> None:
        """Let a sequence sit steps out, or (`held` False) no longer."""
        self._held[self._by_id[sequence]] = held

    @property
    def held(self) -> list[Sequence]:
        """The sequences that sit steps out, in admission order."""
        return [self._rows[place] for place in np.flatnonzero(self._held[: len(self._rows)])]

    def remove(self, sequences: Iterable[int]) -> list[Sequence]:
        """Drop sequences by id and return those that were held; unknown ids are skipped."""
        places = {self._by_id[s] for s in sequences if s in self._by_id}
        if not places:
            return []
        dropped = [self._rows[place] for place in sorted(places)]
        keep = np.array([p for p in range(len(self._rows)) if p not in places], np.int64)
        for name in _COLUMNS:
            column = getattr(self, name)
            column[: len(keep)] = column[keep]
        self._rows = [self._rows[place] for place in keep.tolist()]
        self._by_id = {sequence.id: place for place, sequence in enumerate(self._rows)}
        return dropped

    def clear(self) -> list[Sequence]:
        """Drop every sequence and return them."""
        dropped, self._rows, self._by_id = self._rows, [], {}
        return dropped

    # --- steps --------------------------------------------------------------------------------

    def plan(self, token_budget: int) -> StepPlan | None:
        """Return the next step, or None when no sequence can move; sets `counts`.

        Decode rows come first, then prefill chunks, those with the fewest tokens left first (a
        short prompt does not wait behind a long one; the router's admission counts on it), until
        `token_budget` query tokens (at least 1) are taken. What is left of it, and of the tokens
        that cost little, goes to guesses of the decode rows' next tokens. Rows that are held or at
        the end of their granted blocks sit out. The plan's arrays are copies: commands applied
        later do not change it.
        """
        n = len(self._rows)
        computed = self._computed[:n]
        held = self._held[:n]
        wanted = (np.minimum(self._length[:n], self._granted[:n]) - computed) * ~held
        if (
            n
            and n <= token_budget
            and wanted.min() == 1
            and (self._length[:n] - computed).max() == 1
        ):
            chosen, taken = np.arange(n), np.ones(n, np.int64)
            stalled = 0
        else:
            prefilling = computed < self._given[:n]
            prompts = np.flatnonzero(prefilling)
            left = self._given[prompts] - computed[prompts]
            order = np.concatenate(
                (np.flatnonzero(~prefilling), prompts[np.argsort(left, kind="stable")])
            )
            wanted = wanted[order]
            before = np.cumsum(wanted) - wanted
            taken = np.clip(max(token_budget, 1) - before, 0, wanted)
            stalled = int(np.count_nonzero(wanted == 0) - np.count_nonzero(held))
            chosen, taken = order[taken > 0], taken[taken > 0]
        self._chosen, self._taken = chosen, taken
        prefill = computed[chosen] < self._given[chosen]
        prefill_tokens = int(taken[prefill].sum())
        spare = min(token_budget, self._cheap_tokens) - int(taken.sum())
        drafts = self._draft(chosen, prefill, spare)
        self.counts = PlanCounts(
            prefill_tokens=prefill_tokens,
            decode_rows=len(chosen) - int(prefill.sum()),
            stalled_rows=stalled,
            draft_tokens=0 if drafts is None else int(drafts.sum()),
        )
        return self._flatten(chosen, taken, prefill, drafts) if len(chosen) else None

    def _draft(
        self, chosen: NDArray[np.int64], prefill: NDArray[np.bool_], spare: int
    ) -> NDArray[np.int64] | None:
        """Have the next tokens of the decode rows guessed: [chosen] how many, None without any.

        No row guesses beyond its granted blocks or its last token; all together `spare` at most.
        """
        if self._drafter is None or spare <= 0:
            return None
        decodes = []
        for i in np.flatnonzero(~prefill).tolist():
            sequence, granted = self._rows[chosen[i]], int(self._granted[chosen[i]])
            room = min(sequence.remaining - 1, granted - sequence.length)
            decodes.append(Guesser(i, sequence, room))
        counts = share_guesses(self._drafter, decodes, spare)
        if not counts:
            return None
        drafts = np.zeros(len(chosen), np.int64)
        drafts[list(counts)] = list(counts.values())
        return drafts

    def _flatten(
        self,
        chosen: NDArray[np.int64],
        known: NDArray[np.int64],
        prefill: NDArray[np.bool_],
        drafts: NDArray[np.int64] | None,
    ) -> StepPlan:
        """Lay the chosen rows' query tokens out flat: `known` ones, then guesses."""
        rows = [self._rows[place] for place in chosen.tolist()]
        first = self._computed[chosen]
        several, taken = prefill, known
        if drafts is not None:
            several, taken = prefill | (drafts > 0), known + drafts
        context = first + taken
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(taken, out=starts[1:])
        if starts[-1] == len(rows):  # one token each: rows and tokens are the same thing
            places, positions, token_ids = chosen, first, self._last[chosen]
        else:
            places = np.repeat(chosen, taken)
            positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], taken)
            token_ids = self._last[places]
        for i in np.flatnonzero(several).tolist():
            sequence, at = rows[i], int(first[i])
            token_ids[starts[i] : starts[i + 1]] = sequence.token_ids[at : int(context[i])]
        size = self._block_size
        widest = -(-int(context.max()) // size)
        return StepPlan(
            rows=rows,
            token_ids=token_ids,
            positions=positions,
            kv_slots=self._table[places, positions // size] * np.int64(size) + positions % size,
            query_starts=starts,
            context_lengths=context.astype(np.int32),
            block_tables=self._table[chosen, :widest],
            samples=first + known == self._length[chosen],
            drafts=None if drafts is None else drafts.astype(np.int32),
        )

    def advance(
        self, plan: StepPlan, result: StepResult, report: StepReport
    ) -> tuple[list[Sequence], list[Fault]]:
        """Move the rows of the plan in hand by its result and write their columns into `report`.

        Returns the sequences dropped (finished or faulty) and the faults. A row stops at its first
        finishing token: the length limit is tested before EOS, as TGI does.
        """
        dropped: list[Sequence] = []
        faults: list[Fault] = []
        moved: list[Moved] = []
        last = self._last[self._chosen].tolist()
        rows = zip(plan.rows, result.rows, plan.samples.tolist(), self._taken.tolist(), strict=True)
        for i, (sequence, row, samples, taken) in enumerate(rows):
            if row.fault is not None or samples != (len(row.token_ids) > 0):
                faults.append(Fault(sequence.id, row.fault or _MISCHOSEN))
                dropped.append(sequence)
            elif not samples:
                sequence.computed += taken
                moved.append((sequence, row, 0, Finish.NONE))
            else:
                finish, used = self._append(sequence, row.token_ids)
                sequence.computed = sequence.length - 1
                last[i] = row.token_ids[used - 1]
                moved.append((sequence, row, used, finish))
                if finish:
                    dropped.append(sequence)
        fill_report(report, moved)
        self._length[self._chosen] = [sequence.length for sequence in plan.rows]
        self._computed[self._chosen] = [sequence.computed for sequence in plan.rows]
        self._last[self._chosen] = last
        if dropped:
            self.remove([sequence.id for sequence in dropped])
        return dropped, faults

    def _append(self, sequence: Sequence, tokens: ListLike[int]) -> tuple[Finish, int]:
        """Append tokens up to the finishing one; return why it ended and how many they are."""
        for used, token in enumerate(tokens, start=1):
            length = sequence.length
            if length == len(sequence.token_ids):
                sequence.token_ids = np.concatenate(
                    (sequence.token_ids, np.empty_like(sequence.token_ids))
                )
            sequence.token_ids[length] = token
            sequence.length = length + 1
            sequence.remaining -= 1
            if sequence.remaining <= 0:
                return Finish.LENGTH, used
            if sequence.min_remaining > 0:
                sequence.min_remaining -= 1
            elif token in self._eos_ids and not sequence.sampling.ignore_eos:
                return Finish.EOS, used
        return Finish.NONE, len(tokens)

    # --- bookkeeping --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless arrays, sequences and index say the same."""
        if list(self._by_id) != [sequence.id for sequence in self._rows]:
            raise AssertionError("the index does not list the rows in order")
        for place, sequence in enumerate(self._rows):
            blocks = sequence.block_ids
            facts = {
                "place": self._by_id[sequence.id] == place,
                "length": self._length[place] == sequence.length <= len(sequence.token_ids),
                "computed": self._computed[place] == sequence.computed < sequence.length,
                "granted": self._granted[place] == len(blocks) * self._block_size,
                "within grant": sequence.computed <= self._granted[place],
                "last token": self._last[place] == sequence.token_ids[sequence.length - 1],
                "table": self._table[place, : len(blocks)].tolist() == blocks,
                "padding": not self._table[place, len(blocks) :].any(),
                "remaining": sequence.remaining > 0 <= sequence.min_remaining,
            }
            wrong = [name for name, holds in facts.items() if not holds]
            if wrong:
                raise AssertionError(f"sequence {sequence.id}: wrong {', '.join(wrong)}")

    def _check_row(self, row: PrefillRow) -> None:
        self._check_blocks(row.block_ids)
        count = len(row.token_ids)
        if row.sequence in self._by_id:
            raise ValueError(f"sequence {row.sequence} is held already")
        if not 0 <= row.cached_length < count:
            raise ValueError(
                f"{row.cached_length} of {count} tokens cached; at least the last must be computed"
            )
        if not 0 <= row.prompt_length <= count:
            raise ValueError(f"a prompt of {row.prompt_length} tokens, but {count} were given")
        if row.max_new_tokens < 1:
            raise ValueError("max_new_tokens is 0; at least 1 token must be asked for")
        if row.token_ids.min() < 0 or row.token_ids.max() >= self._vocab_size:
            raise ValueError(
                f"token ids from {row.token_ids.min()} to {row.token_ids.max()}; the model has "
                f"0 to {self._vocab_size - 1}"
            )
        if len(row.block_ids) * self._block_size < row.cached_length:
            raise ValueError(
                f"{row.cached_length} cached tokens do not fit {len(row.block_ids)} blocks"
            )

    def _check_blocks(self, block_ids: Iterable[int]) -> None:
        if not self._blocks:
            raise ValueError("there is no KV cache before WARMUP")
        wrong = [block for block in block_ids if not 0 < block < self._blocks]
        if wrong:
            raise ValueError(f"KV blocks {wrong[:4]}; granted may be 1 to {self._blocks - 1}")

    def _grant(self, place: int, block_ids: Iterable[int]) -> None:
        blocks = self._rows[place].block_ids
        have = len(blocks)
        blocks.extend(block_ids)
        rows, width = self._table.shape
        if len(blocks) > width:
            wider = np.zeros((rows, max(2 * width, len(blocks))), np.int32)
            wider[:, :width] = self._table
            self._table = wider
        self._table[place, have : len(blocks)] = blocks[have:]
        self._granted[place] = len(blocks) * self._block_size

    def _reserve(self, rows: int) -> None:
        """Make room for `rows` rows in every array."""
        if rows <= len(self._length):
            return
        for name in _COLUMNS:
            old: NDArray[Any] = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros_like(old))))
