"""What the rows of a step ask of the device's sampler, as columns; no tensor in this file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.sampling.base import MOST_TIES
from tgi_trio.shard.sampling.choosing import choice_positions
from tgi_trio.shard.sampling.logits_processors import RowState
from tgi_trio.shard.sampling.truncation import Cuts
from tgi_trio.shard.torch_backend.sampling.resident_counts import NONE, ResidentCounts
from tgi_trio.shard.torch_backend.staging import Array

_NO_ENTRIES = np.empty((0, 2), np.int32)


@dataclass(slots=True)
class Choosing:
    """Whom a step chooses for: C choices of R rows, one each and one more behind every guess."""

    rows: list[ShardSequence]  # [R] that get a token
    owners: NDArray[np.int64]  # [C] whose choice it is
    aheads: NDArray[np.int64]  # [C] how many of the row's guesses it takes for right
    positions: NDArray[np.int64]  # [C] index in its sequence of the token to be chosen
    targets: NDArray[np.int64]  # [C] row of the plan
    # [C] which row of the step before chooses the row's last token; -1: the sequence has it.
    # Set to None once it does.
    unknown: NDArray[np.int32] | None = None
    # int64 [C] the tokens that were computed, guesses among them, where only the device knew them;
    # -1: there was nothing to guess.
    computed: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, plan: StepPlan, sampled: NDArray[np.int64]) -> Choosing:
        """Return the choices of the plan's rows `sampled`."""
        rows = [plan.rows[i] for i in sampled.tolist()]
        places = choice_positions(plan, sampled)
        owners = np.arange(len(rows))
        aheads = np.zeros(len(rows), np.int64)
        if plan.drafts is not None:
            counts = 1 + plan.drafts[sampled].astype(np.int64)
            owners = np.repeat(owners, counts)
            aheads = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(
            rows=rows,
            owners=owners,
            aheads=aheads,
            positions=plan.positions[places] + 1,
            targets=sampled[owners].astype(np.int64),
            unknown=None if plan.inputs is None else plan.inputs[places],
        )

    def __len__(self) -> int:
        return len(self.owners)

    def guesses(self, choice: int) -> NDArray[np.int32] | NDArray[np.int64]:
        """Return the guesses that a choice takes for right."""
        ahead = int(self.aheads[choice])
        if self.computed is not None:
            return self.computed[choice + 1 - ahead : choice + 1]
        row = self.rows[self.owners[choice]]
        guesses: NDArray[np.int32] = row.token_ids[row.length :][:ahead]
        return guesses

    def count_guesses(self) -> NDArray[np.int64]:
        """Return how many guesses each row had among what was computed: int64 [R]."""
        own = self.aheads > 0
        if self.computed is not None:
            own = own & (self.computed >= 0)
        return np.bincount(self.owners[own], minlength=len(self.rows)).astype(np.int64)


def nobody() -> Choosing:
    """Return the choices of no rows."""
    none = np.empty(0, np.int64)
    return Choosing([], none, none, none, none)


@dataclass(frozen=True)
class Settings:
    """What a list of rows asks for; kept while the list stays the same, as in most steps."""

    rows: list[ShardSequence]
    seeds: NDArray[np.uint64]
    samples: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    cuts: Cuts
    floors: NDArray[np.float64]
    listed: NDArray[np.int32]  # how many of the best tokens are wanted; 0: none
    repetition: NDArray[np.float32]
    frequency: NDArray[np.float64]
    presence: NDArray[np.float64]
    counted: NDArray[np.bool_]  # rows with penalties
    biases: list[NDArray[np.int32]]  # [B, 2] by row: id and float32 bits; none of rows that fail
    minimum: NDArray[np.bool_]  # rows that may have a minimum to generate
    faults: dict[int, str]

    @classmethod
    def of(cls, rows: list[ShardSequence], vocab_size: int) -> Settings:
        asked = [row.sampling for row in rows]
        cuts = Cuts.of(asked, vocab_size)
        with np.errstate(divide="ignore"):
            floors = np.log(cuts.min_p)
        counted = [
            s.repetition_penalty != 1.0 or bool(s.frequency_penalty or s.presence_penalty)
            for s in asked
        ]
        faults = bias_faults(rows, vocab_size)
        return cls(
            rows=list(rows),
            seeds=np.array([s.seed for s in asked], np.uint64),
            samples=np.array([s.sample for s in asked], np.int32),
            temperatures=np.array([s.temperature for s in asked], np.float32),
            cuts=cuts,
            floors=floors,
            listed=np.array([_count_listed(s.top_n, vocab_size) for s in asked], np.int32),
            repetition=np.array([s.repetition_penalty for s in asked], np.float32),
            frequency=np.array([s.frequency_penalty for s in asked], np.float64),
            presence=np.array([s.presence_penalty for s in asked], np.float64),
            counted=np.array(counted, np.bool_),
            biases=[_NO_ENTRIES if i in faults else _bias_entries(r) for i, r in enumerate(rows)],
            minimum=np.array(
                [r.min_remaining > 0 and not r.sampling.ignore_eos for r in rows], np.bool_
            ),
            faults=faults,
        )


def _count_listed(top_n: int, vocab_size: int) -> int:
    """Return how many tokens are looked at for `top_n` alternatives: those that tie are, too."""
    return min(max(MOST_TIES, top_n), vocab_size) if top_n else 0


def bias_faults(rows: list[ShardSequence], size: int) -> dict[int, str]:
    faults = {}
    for i, row in enumerate(rows):
        ids = [token for token, _ in row.sampling.logit_bias]
        if ids and (min(ids) < 0 or max(ids) >= size):
            faults[i] = f"logit_bias names token {max(ids)}; the model has 0 to {size - 1}"
    return faults


def too_early(choosing: Choosing, settings: Settings) -> NDArray[np.int32]:
    """Return 1 for choices that may not be EOS yet: int32 [C]."""
    early = np.zeros(len(choosing), np.int32)
    for c in np.flatnonzero(settings.minimum[choosing.owners]).tolist():
        known = int(choosing.aheads[c])
        if choosing.unknown is not None:
            known += int(choosing.unknown[c] >= 0)
        early[c] = choosing.rows[choosing.owners[c]].min_remaining - known > 0
    return early


def count_units(choosing: Choosing, settings: Settings) -> NDArray[np.float64]:
    """Return what a choice's counts are divided by: 1, or its length (TGI's penalty)."""
    units = np.ones(len(choosing))
    for c in np.flatnonzero(settings.counted[choosing.owners]).tolist():
        if not choosing.rows[choosing.owners[c]].sampling.absolute_penalties:
            units[c] = choosing.positions[c]
    return units


@dataclass(frozen=True, slots=True)
class Edits:
    """What changes the scores of C choices besides numbers of their own."""

    slots: NDArray[np.int32]  # [C] where their tokens are counted, -1: nowhere
    moves: NDArray[np.int32]  # [C] what becomes of that, once for every row
    starts: NDArray[np.int32]  # [3, C + 1] where entries begin: news of counts, guesses, biases
    entries: NDArray[np.int32]  # [N, 2]
    standing: bool  # the entries are the rows' biases alone: the same as long as the rows are


def list_edits(choosing: Choosing, settings: Settings, counts: ResidentCounts) -> Edits:
    """Return the edits of a step's choices, to be made exactly once: counts move with them."""
    count = len(choosing)
    slots, moves = np.full(count, -1, np.int32), np.full(count, NONE, np.int32)
    starts = np.zeros((3, count + 1), np.int32)
    lists: list[list[Array]] = [[], [], []]
    own = np.empty(len(choosing.rows), np.int32)
    for c in np.flatnonzero(settings.counted[choosing.owners]).tolist():
        owner, ahead = int(choosing.owners[c]), int(choosing.aheads[c])
        if ahead:
            guesses = choosing.guesses(c)
            starts[1, c + 1] = ahead
            lists[1].append(np.stack((guesses, np.zeros_like(guesses)), axis=1))
        else:
            unknown = choosing.unknown is not None and bool(choosing.unknown[c] >= 0)
            row, length = choosing.rows[owner], int(choosing.positions[c])
            news = counts.advance(row, length, unknown, choosing.rows)
            own[owner], moves[c], starts[0, c + 1] = news.slot, news.move, len(news.ids)
            lists[0].append(np.stack((news.ids, news.more), axis=1))
        slots[c] = own[owner]
    standing = count == len(choosing.rows) and not starts[:2].any()
    if any(len(biases) for biases in settings.biases):
        for c, owner in enumerate(choosing.owners.tolist()):
            starts[2, c + 1] = len(settings.biases[owner])
            lists[2].append(settings.biases[owner])
    flat = [entries for kind in lists for entries in kind]
    ends = np.cumsum(starts.ravel()).reshape(starts.shape).astype(np.int32)
    return Edits(slots, moves, ends, np.concatenate(flat) if flat else _NO_ENTRIES, standing)


def _bias_entries(row: ShardSequence) -> NDArray[np.int32]:
    """Return ids and values of a row's biases as entries."""
    bias = RowState.of(row).bias
    entries = np.empty((len(bias), 2), np.int32)
    entries[:, 0] = list(bias)
    entries[:, 1] = np.array(list(bias.values()), np.float32).view(np.int32)
    return entries
