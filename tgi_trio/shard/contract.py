"""The contract of a step: what a backend is given, and what it returns.

Prefill chunks, decodes and drafted tokens are all the same here: a row with some query tokens at
given positions. Every backend (`runner.py`) takes a `StepPlan` and returns a `StepResult`. No torch
in this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.messages import SamplingParameters, StateGrant
from tgi_trio.shard.alternatives import Alternatives, Listed
from tgi_trio.shard.media.held_image import HeldImage
from tgi_trio.shard.media.placed_features import PlacedFeatures
from tgi_trio.shard.media.prompt_geometry import PromptGeometry


@dataclass(slots=True, eq=False)
class ShardSequence:
    """One sequence as the shard holds it. Created by a PREFILL row, changed by the worker only."""

    id: int
    token_ids: NDArray[np.int32]  # buffer [capacity]; the first `length` entries are real
    length: int  # known tokens: prompt + generated
    prompt_length: int  # leading tokens that are the client's prompt (for penalties)
    computed: int  # tokens whose K and V are in the blocks
    block_ids: list[int]  # block table, in order; extended by EXTEND
    remaining: int  # tokens still to generate at most
    min_remaining: int  # tokens still to generate before EOS is allowed
    sampling: SamplingParameters
    states: StateGrant | None = None  # slots of what the model keeps of it; None: nothing
    state: dict[str, object] = field(default_factory=dict)  # backend's own (grammar matcher, ...)
    # Rotary position of a token after the images, minus its position: images of some families
    # advance rotary positions by fewer than the tokens they have. Never positive.
    rotary_delta: int = 0
    geometry: PromptGeometry | None = None  # of its prompt, where that has images
    # Images with their features, in the order of their tokens, while any of these tokens are still
    # to be computed. The sequence sits out steps until all features are there.
    images: list[HeldImage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """What planning found; the STEP frame reports it."""

    prefill_tokens: int = 0
    decode_rows: int = 0
    stalled_rows: int = 0  # sequences at the end of their granted blocks
    draft_tokens: int = 0  # drafts among the decode rows' query tokens


@dataclass(slots=True)
class StepPlan:
    """One step: R rows, T query tokens in all, flat and without padding.

    A value: its arrays are copies, so that commands applied after it was made do not change it.
    Plans may share arrays, which are never written to. `rows` are the batch's own sequences, for
    what only few rows need (sampling parameters, tokens known so far); a runner must not change
    them.
    """

    rows: list[ShardSequence]
    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T] position of each token in its sequence
    kv_slots: NDArray[np.int64]  # [T] block_id * block_size + offset: where its K and V go
    query_starts: NDArray[np.int32]  # [R + 1] rows' first token in the flat list, cumulative
    context_lengths: NDArray[np.int32]  # [R] KV tokens a row sees, its own query included
    block_tables: NDArray[np.int32]  # [R, widest], unused entries 0
    samples: NDArray[np.bool_]  # [R] the row's last known token is in the step: choose the next
    # [R] how many of a row's last query tokens are drafts (they follow the known ones in its
    # `token_ids`); after each that proves right one more token is chosen. None: no row has any.
    drafts: NDArray[np.int32] | None = None
    # [R] the row computes tokens it came with. Set by the batch; None: any row may.
    prefills: NDArray[np.bool_] | None = None
    # [T] which row of the previous step chooses this token, whose id is not known yet and 0 in
    # `token_ids`; -1: it is known. Set by a batch that plans ahead of a step's result. None: all
    # are known. A draft has the same number as its row's last token: the runner knows what it
    # drafted after that.
    inputs: NDArray[np.int32] | None = None
    # The previous step has drafts that are not judged yet: rows will be further than `positions`,
    # `kv_slots` and `context_lengths` say, by as many as were right. The runner corrects them on
    # the device; `loop/following.py` does so here, once the previous step has been settled.
    moves: bool = False
    # The next step `moves` rows and has drafts, where the runner can make them (`runs_ahead`).
    leads: bool = False
    features: PlacedFeatures | None = None  # of images' tokens, in the places of their embeddings
    # [3, T] time, row and column of each token; of Hunyuan VL [4, T] place, column, row and image.
    # None: each is the token's position.
    rotary_positions: NDArray[np.int64] | None = None
    # [T] the last position that each query token sees. None: its own. Windows still bound it.
    visible: NDArray[np.int64] | None = None
    # [R] slots of rows' states: where those before the first token of this step are, and (another
    # slot) where those after the last one go. None: the model keeps none, or the rows are made up
    # and use the null slot. A row whose first position is 0 reads nothing: its states are zero.
    state_reads: NDArray[np.int64] | None = None
    state_writes: NDArray[np.int64] | None = None
    # [T] which of `rows` each token belongs to, where a plan has been turned into one of decodes
    # alone and has more tokens than rows. None: as `query_starts` says.
    owners: NDArray[np.int64] | None = None
    # What the batch needs to settle the step: [R] the rows' places in its arrays, their known
    # query tokens, and when that was (places move when sequences leave).
    places: NDArray[np.int64] | None = None
    taken: NDArray[np.int64] | None = None
    moment: int = 0
    # Every row computes its last token alone, which is no image's, and chooses the next. A hint:
    # False says nothing.
    decodes: bool = False
    # The same, for every row of the batch, in its order; and none chooses its last token.
    uniform: bool = False
    counts: PlanCounts = PlanCounts()
    applied: int = 0  # number of the last command applied before it: what its STEP acknowledges
    transfers: int = 0  # how many launches of copies (`host_copies.py`) are over before it

    @property
    def turning_positions(self) -> NDArray[np.int64]:
        """The positions of rotary embeddings, [T] or [parts, T]."""
        return self.positions if self.rotary_positions is None else self.rotary_positions


@dataclass(slots=True)
class RowResult:
    """What one row got; that of a row that only prefilled is empty.

    A row at a time is easy to read and write, but slow: hot paths use `Choices`.
    """

    token_ids: ListLike[int] = ()
    logprobs: ListLike[float] = ()
    tops: ListLike[Alternatives] = ()  # per token
    prompt_logprobs: ListLike[float] = ()  # for the prompt positions computed in this step
    prompt_tops: ListLike[Alternatives] = ()  # of each, or none at all
    fault: str | None = None  # the row failed alone; the others are fine


@dataclass(slots=True)
class Choices:
    """Tokens chosen for R rows, as columns: N tokens, row after row."""

    counts: NDArray[np.int64]  # [R] tokens of each row, 0 where none was due or the row failed
    token_ids: NDArray[np.int64]  # [N]
    logprobs: NDArray[np.float64]  # [N]
    tops: Listed | None = None  # of the tokens; None: none has any
    faults: Mapping[int, str] = field(default_factory=dict)  # by row

    @classmethod
    def none(cls, rows: int) -> Choices:
        """Return the choices of rows that get no token."""
        return cls(np.zeros(rows, np.int64), np.empty(0, np.int64), np.empty(0))

    @classmethod
    def failed(cls, why: str) -> Choices:
        """Return the choices of one row that has failed."""
        return replace(cls.none(1), faults={0: why})

    @classmethod
    def of(cls, rows: ListLike[RowResult]) -> Choices:
        """Return rows' tokens as columns."""
        return cls(
            counts=np.array([len(row.token_ids) for row in rows], np.int64),
            token_ids=np.array([token for row in rows for token in row.token_ids], np.int64),
            logprobs=np.array([value for row in rows for value in row.logprobs], np.float64),
            tops=_list_tops(rows) if any(any(row.tops) for row in rows) else None,
            faults={i: row.fault for i, row in enumerate(rows) if row.fault is not None},
        )

    @property
    def rows(self) -> list[RowResult]:
        """Return the columns row by row."""
        ends = np.cumsum(self.counts).tolist()
        ids, logprobs = self.token_ids.tolist(), self.logprobs.tolist()
        tops = [[]] * len(ids) if self.tops is None else self.tops.each
        return [
            RowResult(
                token_ids=tuple(ids[end - count : end]),
                logprobs=tuple(logprobs[end - count : end]),
                tops=tuple(tops[end - count : end]),
                fault=self.faults.get(row),
            )
            for row, (end, count) in enumerate(zip(ends, self.counts.tolist(), strict=True))
        ]

    def spread(self, places: NDArray[np.intp], rows: int) -> Choices:
        """Return these as the choices of `rows` rows, where those at `places` have them."""
        if len(places) == rows:
            return self
        counts = np.zeros(rows, np.int64)
        counts[places] = self.counts
        faults = {int(places[row]): fault for row, fault in self.faults.items()}
        return Choices(counts, self.token_ids, self.logprobs, self.tops, faults)

    @classmethod
    def concatenate(cls, parts: ListLike[Choices]) -> Choices:
        """Return the choices of all parts' rows, one after the other."""
        if len(parts) == 1:
            return parts[0]
        firsts = [0, *np.cumsum([len(part.counts) for part in parts]).tolist()]
        numbered = list(zip(firsts, parts, strict=False))
        tops = None
        if any(part.tops is not None for part in parts):
            each = [part.tops or Listed.none(len(part.token_ids)) for part in parts]
            tops = Listed(
                np.concatenate([own.counts for own in each]),
                np.concatenate([own.token_ids for own in each]),
                np.concatenate([own.logprobs for own in each]),
            )
        return cls(
            counts=np.concatenate([part.counts for part in parts]),
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            tops=tops,
            faults={at + row: fault for at, part in numbered for row, fault in part.faults.items()},
        )


def _list_tops(rows: ListLike[RowResult]) -> Listed:
    """Return rows' alternatives as columns; a row may have been given none at all."""
    return Listed.of([top for row in rows for top in row.tops or [()] * len(row.token_ids)])


@dataclass(slots=True)
class PromptValues:
    """Log-probabilities of a row's prompt tokens: of those whose predecessors a step computed."""

    logprobs: ListLike[float]  # NaN for the first, which nothing predicts
    tops: ListLike[Alternatives] = ()  # of each, or none at all


@dataclass(slots=True)
class StepResult:
    """Answer to a plan: its rows' tokens, in the plan's order."""

    choices: Choices
    forward_ns: int
    sample_ns: int
    prompts: dict[int, PromptValues] = field(default_factory=dict)  # by row, of those that asked
    raised: bool = False  # before its rows were computed again; set by the worker
    # Processor time of the thread that computed it; 0: not measured. For comparing steps, since
    # other load on the machine is not in it.
    processor_ns: int = 0
    # [R] how many drafts rows had, where the runner made them: it may have found fewer than the
    # plan has room for. None: as many as the plan says.
    drafts: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, rows: ListLike[RowResult], forward_ns: int, sample_ns: int) -> StepResult:
        """Return results given row by row."""
        prompts = {
            i: PromptValues(row.prompt_logprobs, row.prompt_tops)
            for i, row in enumerate(rows)
            if len(row.prompt_logprobs)
        }
        return cls(Choices.of(rows), forward_ns, sample_ns, prompts)

    @property
    def rows(self) -> list[RowResult]:
        """Return the results row by row."""
        rows = self.choices.rows
        for i, values in self.prompts.items():
            rows[i].prompt_logprobs, rows[i].prompt_tops = values.logprobs, values.tops
        return rows
