"""The sampling parameters of a step's choices, as columns for the device. No tensor here."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.sampling.base import MOST_TIES
from tgi_trio.shard.sampling.choosing import choice_positions
from tgi_trio.shard.sampling.logits_processors import RowState
from tgi_trio.shard.sampling.philox import uniform
from tgi_trio.shard.torch_backend.sampling.drawn_numbers import Drawn, Positions, most_steps
from tgi_trio.shard.torch_backend.staging import Array

NO_ENTRIES = np.empty((0, 2), np.int32)


@dataclass(slots=True)
class Choosing:
    """A step's choices: C for R rows, one for each row and one more after each of its drafts."""

    rows: list[ShardSequence]  # [R]: those that get a token
    owners: NDArray[np.int64]  # [C]: the row of each choice
    aheads: NDArray[np.int64]  # [C]: how many of the row's drafts it assumes to be right
    positions: Positions  # [C]: index in its sequence of the token to be chosen
    targets: NDArray[np.int64]  # [C]: row of the plan
    # [C]: row of the previous step that chooses the row's last token; -1: the sequence has it.
    # Set to None once all sequences have theirs.
    unknown: NDArray[np.int32] | None = None
    # int64 [C]: the computed tokens, drafts included, if only the device knew them; -1: there was
    # no draft.
    computed: NDArray[np.int64] | None = None
    # Indices of rows that have left since the step was launched, set by who chooses later: their
    # last tokens were never written, so nothing may be read of their texts.
    gone: ListLike[int] = ()

    @classmethod
    def of(cls, plan: StepPlan, sampled: NDArray[np.int64]) -> Choosing:
        """Return the choices of the plan's rows `sampled`."""
        count = len(sampled)
        if plan.drafts is None and count == len(plan.token_ids):  # decodes, all of them
            every, zeros = count_up(count), repeat(0, count, np.int64)
            return cls(plan.rows, every, zeros, plan.context_lengths, every, plan.inputs)
        rows = [plan.rows[i] for i in sampled.tolist()]
        places = choice_positions(plan, sampled)
        owners = count_up(len(rows))
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

    @property
    def alone(self) -> bool:
        """Whether each row has one choice, as there are no drafts."""
        return len(self.owners) == len(self.rows)

    def drafts(self, choice: int) -> NDArray[np.int32] | NDArray[np.int64]:
        """Return the drafts that a choice assumes to be right."""
        ahead = int(self.aheads[choice])
        if self.computed is not None:
            return self.computed[choice + 1 - ahead : choice + 1]
        row = self.rows[self.owners[choice]]
        drafts: NDArray[np.int32] = row.token_ids[row.length :][:ahead]
        return drafts

    def count_drafts(self) -> NDArray[np.int64]:
        """Return how many drafts of each row were computed: int64 [R]."""
        own = self.aheads > 0
        if self.computed is not None:
            own = own & (self.computed >= 0)
        return np.bincount(self.owners[own], minlength=len(self.rows)).astype(np.int64)


def nobody() -> Choosing:
    """Return the choices of no rows."""
    none = np.empty(0, np.int64)
    return Choosing([], none, none, none, none)


# A row's sampling parameters, which do not change while it runs; its columns are [R].
_ROW: Final = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("typical_p", np.float64),
        ("floor", np.float64),  # log(min_p)
        ("frequency", np.float64),
        ("presence", np.float64),
        ("temperature", np.float32),
        ("repetition", np.float32),
        ("samples", np.int32),
        ("top_k", np.int32),
        ("listed", np.int32),  # top tokens to be listed by the kernels; 0: none
        ("top_n", np.int64),  # how many of these are wanted
        ("counted", np.bool_),  # it has penalties
        ("absolute", np.bool_),  # these are OpenAI's
        ("masked", np.bool_),  # the host makes a mask for it, or chooses
        ("biased", np.bool_),
    ]
)
_PACKED: Final = "asked"  # key in Sequence.state: (vocab_size, bytes of `_ROW`)
# The columns that kernels read, in their order.
_FIXED: Final = ("top_p", "typical_p", "floor", "frequency", "presence")
_FIXED_TOO: Final = ("temperature", "repetition", "samples", "top_k", "listed")


@dataclass(frozen=True, slots=True)
class TopCounts:
    """How many top tokens are wanted."""

    each: NDArray[np.int64]  # [C], or [R]
    even: int  # by each, if all want as many; else 0

    @classmethod
    def of(cls, each: NDArray[np.int64]) -> TopCounts:
        even = len(each) > 0 and bool((each == each[0]).all())
        return cls(each, int(each[0]) if even else 0)


@dataclass
class ChoiceSettings:
    """The parameters of a list of rows, kept while the list stays the same, as in most steps."""

    rows: list[ShardSequence]
    columns: dict[str, Array]  # [R] by name of `_ROW`
    biases: list[NDArray[np.int32]]  # [B, 2] by row: id and float32 bits; empty for faulty rows
    # The same of rows whose own ends are forbidden for a while, with these, by row.
    forbidding: dict[int, NDArray[np.int32]]
    minimum: NDArray[np.bool_]  # rows that may still have a minimum to generate
    faults: dict[int, str]
    widest: int  # most tokens listed with a choice; 0: none
    top_counts: TopCounts  # by row
    penalised: list[ShardSequence]  # rows with penalties
    places: NDArray[np.int64]  # the indices of those
    samples: bool  # whether any row samples
    masked: bool  # whether any row needs a mask, or the host's choice
    waits: bool  # whether any row may have a minimum
    stays: bool  # nothing that kernels read depends on the rows' positions
    by_length: NDArray[np.bool_]  # rows whose counts are divided by their lengths
    # For rows with one choice each: columns that do not change, in two parts; by size, edits by
    # biases alone; the last edits of decodes with penalties.
    alone: tuple[list[Array], list[Array]]
    standing: dict[int, Edits] = field(default_factory=dict)
    followed: Followed | None = None
    _drawn: Drawn | None = None

    @classmethod
    def of(cls, rows: list[ShardSequence], vocab_size: int) -> ChoiceSettings:
        packed = np.frombuffer(b"".join([_pack_row(row, vocab_size) for row in rows]), _ROW)
        columns = {name: fix(packed[name].copy()) for name in _ROW.names or ()}
        faults: dict[int, str] = {}
        biases = [NO_ENTRIES] * len(rows)
        if columns["biased"].any():
            faults = bias_faults(rows, vocab_size)
            for i in np.flatnonzero(columns["biased"]).tolist():
                biases[i] = NO_ENTRIES if i in faults else _bias_entries(rows[i])
        counted = columns["counted"]
        minimum = [r.min_remaining > 0 and not r.sampling.ignore_eos for r in rows]
        forbidding = {
            i: _bias_entries(row, forbids=vocab_size)
            for i, row in enumerate(rows)
            if minimum[i] and row.sampling.ends and i not in faults
        }
        places, samples = np.flatnonzero(counted), bool(columns["samples"].any())
        return cls(
            rows=list(rows),
            columns=columns,
            biases=biases,
            forbidding=forbidding,
            minimum=np.array(minimum, np.bool_),
            faults=faults,
            widest=int(columns["listed"].max(initial=0)),
            top_counts=TopCounts.of(columns["top_n"]),
            penalised=[rows[i] for i in places.tolist()],
            places=places,
            samples=samples,
            masked=bool(columns["masked"].any()),
            waits=any(minimum),
            stays=not (samples or len(places) or any(minimum)),
            by_length=counted & ~columns["absolute"],
            alone=([columns[name] for name in _FIXED], [columns[name] for name in _FIXED_TOO]),
        )

    def of_choices(self, choosing: Choosing) -> tuple[list[Array], list[Array]]:
        """Return the columns [C] that do not change, in two parts."""
        if choosing.alone:
            return self.alone
        first, second = ([column[choosing.owners] for column in part] for part in self.alone)
        return first, second

    def draw(self, choosing: Choosing) -> NDArray[np.float64]:
        """Return the random numbers of choices [C]; zeros if no row samples.

        Those of the following positions are drawn along with them.
        """
        if not self.samples:
            return repeat(0, len(choosing), np.float64)
        seeds, positions = self.columns["seed"], choosing.positions
        if not choosing.alone:
            return uniform(seeds[choosing.owners], positions.astype(np.uint64))
        own = None if self._drawn is None else self._drawn.find(positions)
        if own is not None:
            return own
        # Only one step at first: for rows that change with every step, more would be wasted.
        steps = 1 if self._drawn is None else most_steps(len(seeds))
        self._drawn = Drawn.of(seeds, positions, steps)
        first: NDArray[np.float64] = self._drawn.numbers[0]
        return first


def _pack_row(row: ShardSequence, vocab_size: int) -> bytes:
    """Return a row's `_ROW`, which is made once and kept."""
    kept = row.state.get(_PACKED)
    if isinstance(kept, tuple) and kept[0] == vocab_size:
        packed: bytes = kept[1]
        return packed
    sampling = row.sampling
    counted = (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )
    with np.errstate(divide="ignore"):
        floor = np.log(sampling.min_p)
    values = (
        *(sampling.seed, sampling.top_p, sampling.typical_p, floor),
        *(sampling.frequency_penalty, sampling.presence_penalty),
        *(sampling.temperature, sampling.repetition_penalty, sampling.sample),
        sampling.top_k if sampling.top_k < vocab_size else 0,
        *(_count_listed(sampling.top_n, vocab_size), sampling.top_n),
        *(
            bool(counted),
            sampling.absolute_penalties,
            bool(
                sampling.grammar
                or sampling.watermark
                or sampling.gap_ends
                or sampling.no_repeat_size
            ),
        ),
        bool(sampling.logit_bias),
    )
    packed = np.array([values], _ROW).tobytes()
    row.state[_PACKED] = (vocab_size, packed)
    return packed


@lru_cache(maxsize=256)
def repeat(value: float, count: int, dtype: Any) -> Array:
    """Return a read-only array of `count` times a value."""
    return fix(np.full(count, value, dtype))


@lru_cache(maxsize=256)
def count_up(count: int, size: int | None = None, rest: int = 0) -> NDArray[np.int64]:
    """Return a read-only array: 0, 1, 2 and so on up to `count`, then `rest` up to `size`."""
    found = np.full(size or count, rest, np.int64)
    found[:count] = np.arange(count)
    return fix(found)


def fix(array: Array) -> Array:
    """Make an array read-only and return it."""
    array.flags.writeable = False
    return array


def _count_listed(top_n: int, vocab_size: int) -> int:
    """Return how many tokens are listed for `top_n` wanted ones, so that ties are among them."""
    return min(max(MOST_TIES, top_n), vocab_size) if top_n else 0


def bias_faults(rows: list[ShardSequence], size: int) -> dict[int, str]:
    faults = {}
    for i, row in enumerate(rows):
        ids = [token for token, _ in row.sampling.logit_bias]
        if ids and (min(ids) < 0 or max(ids) >= size):
            faults[i] = f"logit_bias names token {max(ids)}; the model has 0 to {size - 1}"
    return faults


def too_early(choosing: Choosing, settings: ChoiceSettings) -> NDArray[np.int32]:
    """Return 1 for choices that may not be EOS yet, else 0: int32 [C]."""
    if not settings.waits:
        return repeat(0, len(choosing), np.int32)
    early = np.zeros(len(choosing), np.int32)
    for c in np.flatnonzero(settings.minimum[choosing.owners]).tolist():
        known = int(choosing.aheads[c])
        if choosing.unknown is not None:
            known += int(choosing.unknown[c] >= 0)
        early[c] = choosing.rows[choosing.owners[c]].min_remaining - known > 0
    return early


def count_units(choosing: Choosing, settings: ChoiceSettings) -> NDArray[np.float64]:
    """Return the divisors of the choices' counts: 1, or the length (TGI's penalty)."""
    if not settings.penalised:
        return repeat(1, len(choosing), np.float64)
    by_length = settings.by_length
    own = by_length if choosing.alone else by_length[choosing.owners]
    return np.where(own, choosing.positions, 1.0)


@dataclass(frozen=True, slots=True)
class Edits:
    """The counts, drafts and biases by which C choices' scores are edited."""

    slots: NDArray[np.int32]  # [C]: slot of the row's counts, -1: none
    moves: NDArray[np.int32]  # [C]: how the counts change, once for each row; see `count_tokens`
    starts: NDArray[np.int32]  # [3, C + 1]: where entries begin: of counts, drafts and biases
    entries: NDArray[np.int32]  # [N, 2]
    standing: bool  # all entries are biases, which stay the same as long as the rows


@dataclass(frozen=True, slots=True)
class Followed:
    """Edits of decodes with penalties whose last tokens the device counts itself."""

    unknown: Array  # read-only: the rows of the previous step that chose these tokens
    slots: Array  # from `ResidentCounts.follow`
    standing: Edits  # the edits by biases
    edits: Edits


def _bias_entries(row: ShardSequence, forbids: int = 0) -> NDArray[np.int32]:
    """Return the ids and values of a row's biases as entries; its own ends below `forbids` are
    forbidden.
    """
    ends = {end: -np.inf for end in row.sampling.ends if end < forbids}
    bias = RowState.of(row).bias | ends
    entries = np.empty((len(bias), 2), np.int32)
    entries[:, 0] = list(bias)
    entries[:, 1] = np.array(list(bias.values()), np.float32).view(np.int32)
    return entries
