"""A shard in a few lines: applies commands, computes steps, and trusts nobody.

It keeps to the wire's promises (decode rows first, then prefill chunks, fewest tokens left first,
within the token budget; rows stall at the end of their blocks; unknown sequences are skipped) and
checks the router's: no block belongs to two sequences it holds, no cached block lacks its KV.
Copies to the host's memory and back are made as late as can be, a few after each step. With
states, no slot is written that another may read, and what a step starts from is what it needs.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tgi_trio.ipc.frames import Finish
from tgi_trio.ipc.messages import ExtendRow, PrefillRow, StateGrant, StepReport
from tgi_trio.ipc.transfers import Transfer
from tgi_trio.router.scheduling import Command, Copy, Extend, Filter, Limits, Prefill

EOS = 1


def next_token(token_ids: list[int], eos_every: int) -> int:
    """Return the only right token after `token_ids`, as a greedy model would."""
    digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=4).digest()
    value = int.from_bytes(digest, "little")
    return EOS if eos_every and value % eos_every == 0 else 2 + value % 97


@dataclass
class Row:
    """One sequence as the shard holds it."""

    token_ids: list[int]
    computed: int
    blocks: list[int]
    remaining: int
    ignore_eos: bool
    prompt_logprobs: bool
    prompt_top_n: int
    prompt_length: int
    states: StateGrant | None
    slot: int = 0  # that holds its states
    after: int = 0  # how many copies it waits for

    @property
    def length(self) -> int:
        return len(self.token_ids)


def saves_of(row: Row) -> list[int]:
    """Return behind which tokens a row's states are saved."""
    return [] if row.states is None else [at for at, _ in row.states.saves]


def other_slots(row: Row) -> set[int]:
    """Return the slots that a row may still read or write."""
    if row.states is None:
        return set()
    early = row.computed < row.prompt_length
    saves = {slot for at, slot in row.states.saves if early}
    return {*row.states.slots, row.slot, *saves}


def items_of(row: PrefillRow) -> list[tuple[bool, int]]:
    """Return what a row is granted: blocks, and slots."""
    slots = set[int]()
    if row.states is not None:
        slots = {*row.states.slots, row.states.source, *(slot for _, slot in row.states.saves)}
    return [*((False, block) for block in row.block_ids), *((True, slot) for slot in slots)]


@dataclass
class ModelShard:
    """Deterministic stand-in for a shard; `kv` remembers which token each slot was computed for."""

    block_size: int
    eos_every: int = 0
    speculate: int = 0
    budget: int = 0
    applied: int = 0
    steps: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    kv: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)  # tokens that states took in
    stateful: bool = False
    places: tuple[int, int] = (0, 0)  # of the host's memory, for blocks and slots
    host: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    host_slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    copies: deque[Transfer] = field(default_factory=deque)  # ordered, not made
    copied: int = 0
    # (whether it is a slot, block or slot) -> copies that it waits for
    after: dict[tuple[bool, int], int] = field(default_factory=dict)
    late: deque[tuple[int, ExtendRow]] = field(default_factory=deque)

    def apply(self, commands: Iterable[Command]) -> None:
        """Take commands in order."""
        for command in commands:
            assert command.number == self.applied + 1, "command numbers have a gap"
            self.applied = command.number
            match command:
                case Limits(token_budget=budget):
                    self.budget = budget
                case Prefill(rows=rows):
                    for row in rows:
                        self._join(row)
                case Extend(rows=extends):
                    for extend in extends:
                        wait = self._wait_of((False, block) for block in extend.block_ids)
                        self.late.append((wait, extend))
                    self._extend()
                case Copy(transfers=transfers):
                    self._order(transfers)
                case Filter(sequences=sequences):
                    for sequence in sequences:
                        self.rows.pop(sequence, None)
                    # A preempted sequence comes back under its number, without these blocks.
                    late = (each for each in self.late if each[1].sequence in self.rows)
                    self.late = deque(late)

    def _order(self, transfers: list[Transfer]) -> None:
        for each in transfers:
            most = self.places[each.states]
            assert 1 <= each.place <= most, "more of the host's memory than there is"
            self.copies.append(each)
            self.after[each.states, each.item] = self.copied + len(self.copies)

    def _wait_of(self, items: Iterable[tuple[bool, int]]) -> int:
        """Return how many copies are to be made before blocks and slots can be used."""
        return max((self.after.get(item, 0) for item in items), default=0)

    def _extend(self) -> None:
        while self.late and self.late[0][0] <= self.copied:
            _, extend = self.late.popleft()
            if (held := self.rows.get(extend.sequence)) is not None:
                held.blocks += extend.block_ids

    def copy(self, most: int) -> None:
        """Make up to so many of the copies that are ordered."""
        for _ in range(min(most, len(self.copies))):
            block, place, back, states = self.copies.popleft()
            self.copied += 1
            if states and back:
                self.slots[block] = self.host_slots[place]
            elif states:
                self.host_slots[place] = self.slots[block]
            for offset in range(0 if states else self.block_size):
                if back:
                    self.kv[block, offset] = self.host[place, offset]
                else:
                    self.host[place, offset] = self.kv[block, offset]
        self._extend()

    def _join(self, row: PrefillRow) -> None:
        assert row.sequence not in self.rows, f"sequence {row.sequence} is held already"
        token_ids = row.token_ids.tolist()
        assert 0 <= row.cached_length < len(token_ids), "at least one token is computed"
        assert row.max_new_tokens > 0
        blocks = list(row.block_ids)
        assert 0 not in blocks, "block 0 is never handed out"
        assert len(set(blocks)) == len(blocks)
        self.rows[row.sequence] = Row(
            token_ids=token_ids,
            computed=row.cached_length,
            blocks=blocks,
            remaining=row.max_new_tokens,
            ignore_eos=row.sampling.ignore_eos,
            prompt_logprobs=row.sampling.prompt_logprobs,
            prompt_top_n=row.sampling.prompt_top_n,
            prompt_length=row.prompt_length,
            states=row.states,
            after=self._wait_of(items_of(row)),
        )
        assert (row.states is not None) == self.stateful
        if row.states is not None:
            self._join_states(self.rows[row.sequence], row.states)

    def _join_states(self, row: Row, states: StateGrant) -> None:
        assert bool(states.source) == (row.computed > 0), "states start where a snapshot is"
        row.slot = states.source or states.slots[1]
        assert states.held_length in (0, *range(row.computed + 1, row.length))
        stops = [row.computed, *(at for at, _ in states.saves), row.length]
        assert stops == sorted(set(stops)), "snapshots are taken inside of what is computed"
        written = {*states.slots, *(slot for _, slot in states.saves)}
        assert 0 not in written and len(written) == 2 + len(states.saves)
        for other in self.rows.values():
            if other is not row and other.states is not None:
                assert not written & other_slots(other), "a slot that somebody else may read"

    def _compute(self, row: Row, count: int) -> None:
        """Write the KV of `count` tokens; first look whether what is before them is right."""
        held = 0 if row.states is None else row.states.held_length
        self._compute_states(row, row.computed + count)
        for position in range(max(held, row.computed), row.computed + count):
            slot = (row.blocks[position // self.block_size], position % self.block_size)
            self.kv[slot] = tuple(row.token_ids[: position + 1])
        row.computed += count
        for position in range(row.computed):
            slot = (row.blocks[position // self.block_size], position % self.block_size)
            found = self.kv.get(slot)
            assert found == tuple(row.token_ids[: position + 1]), (
                f"position {position}: block {slot[0]} holds the KV of something else"
            )

    def _compute_states(self, row: Row, end: int) -> None:
        """Read the states before a row's tokens, and write those behind them to another slot."""
        if row.states is None:
            return
        if row.computed:
            assert self.slots[row.slot] == tuple(row.token_ids[: row.computed]), (
                f"slot {row.slot} holds the states of something else"
            )
        first, second = row.states.slots
        spare = second if row.slot == first else first
        row.slot = dict(row.states.saves).get(end, spare)
        self.slots[row.slot] = tuple(row.token_ids[:end])

    def step(self) -> StepReport:
        """Run one step over everything held."""
        self.steps += 1
        report = StepReport(step=self.steps, acknowledged=self.applied)
        budget = self.budget
        there = {id: row for id, row in self.rows.items() if row.after <= self.copied}
        ready = [row for row in there.values() if row.computed == row.length - 1]
        ready_ids = {id(row) for row in ready}
        budget -= len(ready)
        shortest_first = sorted(there.items(), key=lambda item: item[1].length - item[1].computed)
        for sequence, row in shortest_first:
            if id(row) in ready_ids:
                count = 1
            else:
                count = max(0, min(budget, row.length - row.computed))
                budget -= count
            stop = next((at for at in saves_of(row) if at > row.computed), row.length)
            count = min(count, len(row.blocks) * self.block_size - row.computed)
            count = min(count, stop - row.computed)
            if count <= 0:
                report.stalled_rows += 1
                continue
            if id(row) in ready_ids:
                report.decode_rows += 1
            else:
                report.prefill_tokens += count
            self._report(report, sequence, row, count)
        report.held, report.copied = len(self.rows), self.copied
        self.copy(self.steps * 7 % 5)
        return report

    def _report(self, report: StepReport, sequence: int, row: Row, count: int) -> None:
        before = row.computed
        self._compute(row, count)
        prompts = 0
        if row.prompt_logprobs:
            done = min(row.computed, row.prompt_length)
            prompts = max(0, done - min(before, row.prompt_length))
            report.prompt_logprobs += [-float(p) for p in range(done - prompts, done)]
            report.prompt_top_count += [row.prompt_top_n] * prompts
            for p in range(done - prompts, done):
                report.prompt_top_ids += range(p, p + row.prompt_top_n)
                report.prompt_top_logprobs += [-1.0] * row.prompt_top_n
        tokens: list[int] = []
        finish = Finish.NONE
        drafts = self.steps % (self.speculate + 1)  # accepted ones; any number may be
        while row.computed == row.length and not finish and len(tokens) <= drafts:
            token = next_token(row.token_ids, self.eos_every)
            tokens.append(token)
            row.token_ids.append(token)
            row.remaining -= 1
            if token == EOS and not row.ignore_eos:
                finish = Finish.EOS
            elif row.remaining == 0:
                finish = Finish.LENGTH
            elif len(tokens) <= drafts and row.computed < len(row.blocks) * self.block_size:
                self._compute(row, 1)
        report.sequence.append(sequence)
        report.computed.append(row.computed)
        report.token_count.append(len(tokens))
        report.prompt_count.append(prompts)
        report.finish.append(int(finish))
        report.token_ids += tokens
        report.logprobs += [-0.5] * len(tokens)
        report.top_count += [0] * len(tokens)
        if finish:
            del self.rows[sequence]
